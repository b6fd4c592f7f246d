"""The formats of calls: how each is read, and the signs by which a chat template shows that its model writes it.

A form that is data is a line here; one that is not has a file of its own. A sign is texts that a template has, and
texts that it must not have: one template has the signs of one format at most.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from server.settings import ToolCallParser
from server.text.answer.forms.call_array import ArrayMarks
from server.text.answer.forms.functionary import Functionary
from server.text.answer.forms.gemma import Gemma
from server.text.answer.forms.harmony import Harmony
from server.text.answer.forms.hermes import Hermes
from server.text.answer.forms.llama3_json import Llama3Json
from server.text.answer.forms.marked import Marks
from server.text.answer.forms.mistral import Mistral
from server.text.answer.forms.pythonic import PythonMarks
from server.text.answer.forms.tagged import Lines, TaggedCalls, Tags
from server.text.answer.parser import CallParser, Tools

Shape = type[CallParser] | TaggedCalls | Marks | ArrayMarks | PythonMarks


@dataclass(frozen=True, slots=True)
class Sign:
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def is_in(self, source: str) -> bool:
        return all(text in source for text in self.has) and not any(text in source for text in self.lacks)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format: its form, and signs of which a template has one."""

    shape: Shape
    signs: tuple[Sign, ...]

    def parser(self, tools: Tools) -> CallParser:
        return self.shape(tools) if isinstance(self.shape, type) else self.shape.parser(tools)

    def is_in(self, source: str) -> bool:
        """Return whether a chat template calls in this format."""
        return any(sign.is_in(source) for sign in self.signs)


_QWEN = Tags(
    section=("<tool_call>", "</tool_call>"), call=("<function=", ">", "</function>"), key=("<parameter=", ">"),
    value=("", "</parameter>"), is_padded=True, is_lenient=True,
)  # fmt: skip
_MIMO = Tags(
    section=("<tool_call>", "</tool_call>"), call=("<function=", ">", "</function>"), key=("<parameter=", ">"),
    value=("", "</parameter>"), is_lenient=True,
)  # fmt: skip
_SEED_OSS = Tags(
    section=("<seed:tool_call>", "</seed:tool_call>"), call=("<function=", ">", "</function>"),
    key=("<parameter=", ">"), value=("", "</parameter>"),
)  # fmt: skip
_MINIMAX_M2 = Tags(
    section=("<minimax:tool_call>", "</minimax:tool_call>"), call=('<invoke name="', '">', "</invoke>"),
    key=('<parameter name="', '">'), value=("", "</parameter>"), is_shared=True,
)  # fmt: skip
_DSML = "｜DSML｜"  # a token, with ordinary ones around it
_DEEPSEEK_V32 = Tags(
    section=(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
    call=(f'<{_DSML}invoke name="', '">', f"</{_DSML}invoke>"), key=(f'<{_DSML}parameter name="', '">'),
    value=("", f"</{_DSML}parameter>"), says_string='" string="', tokens=(_DSML,), is_shared=True,
)  # fmt: skip


def _glm(lines: Lines) -> TaggedCalls:
    """<tool_call>NAME, <arg_key>KEY</arg_key> and <arg_value>VALUE</arg_value> for each argument, </tool_call>."""
    key, value = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
    return TaggedCalls((Tags(("", ""), ("<tool_call>", "", "</tool_call>"), key, value, lines),))


def _hy_v3(suffix: str) -> Tags:
    """Hunyuan's: GLM's tags in a section, with <tool_sep> behind the name; the published tokenizer's have a suffix."""
    opens, closes = f"<{{}}{suffix}>".format, f"</{{}}{suffix}>".format
    return Tags(
        section=(opens("tool_calls"), closes("tool_calls")),
        call=(opens("tool_call"), opens("tool_sep"), closes("tool_call")),
        key=(opens("arg_key"), closes("arg_key")),
        value=(opens("arg_value"), closes("arg_value")),
        is_shared=True,
    )


_TOOL_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_TOOL_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_TOOL_SEP = "<｜tool▁sep｜>"
_DEEPSEEK_V3 = Marks(
    _TOOL_CALLS, _TOOL_CALL,
    head=re.compile(rf"\s*function{_TOOL_SEP}\s*(?P<name>[\w.:/-]+)\s*(```json)?\s*"),
    written=f"function{_TOOL_SEP}{{name}}\n```json\n", tail="\n```", between="\n", tokens=(_TOOL_SEP,),
)  # fmt: skip
_DEEPSEEK_V31 = Marks(
    _TOOL_CALLS, _TOOL_CALL,
    head=re.compile(rf"\s*(?P<name>[\w.:/-]+?)\s*{_TOOL_SEP}\s*"),
    written=f"{{name}}{_TOOL_SEP}", tokens=(_TOOL_SEP,),
)  # fmt: skip
_HUNYUAN_DENSE = Marks(
    ("<tool_calls>", "</tool_calls>"), ("<tool_call>", "</tool_call>"),
    head=re.compile(r"\s*(?P<name>[\w.:/-]+)\s*(```json)?\s*"),
    written="{name}\n```json\n", tail="\n```", between="\n",
)  # fmt: skip
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_K2 = Marks(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), ("<|tool_call_begin|>", "<|tool_call_end|>"),
    head=re.compile(
        rf"\s*(?P<id>(?:functions\.)?(?P<name>[\w.:/-]+?):\d+)\s*{re.escape(_KIMI_ARGUMENTS)}\s*"
    ),
    written=f"functions.{{name}}:{{number}}{_KIMI_ARGUMENTS}", tokens=(_KIMI_ARGUMENTS,),
)  # fmt: skip
_FUNCTIONARY_V31 = Marks(
    ("", ""), ("<function=", "</function>"), head=re.compile(r"\s*(?P<name>[\w.:/-]+)\s*>\s*"), written="{name}>",
)  # fmt: skip
_GRANITE = ArrayMarks((("<|tool_call|>", ""), ("<tool_call>", "")))
_PHI4_MINI = ArrayMarks((("functools", ""), ("<|tool_call|>", "<|/tool_call|>")))
_COHERE = ArrayMarks(
    (("<|START_ACTION|>", "<|END_ACTION|>"),), name="tool_name", arguments="parameters", number="tool_call_id",
    is_indented=True,
)  # fmt: skip
_PYTHONIC = PythonMarks(dropped=("<|python_start|>", "<|python_end|>", "<|python_tag|>"))

_FORM = ToolCallParser
_DEEPSEEK = "<｜tool▁calls▁begin｜>"
_STEP = "<|im_start|>tool_response"
_MIMO_EXAMPLE = "<parameter=example_parameter_1>value_1</parameter>"
FORMATS: Mapping[ToolCallParser, CallFormat] = {
    _FORM.HERMES: CallFormat(
        Hermes, (Sign(("<tool_call>", '"arguments'), ("<function=", "<arg_key>", "<tool_calls>[")),)
    ),
    _FORM.QWEN3_CODER: CallFormat(
        TaggedCalls((_QWEN,)), (Sign(("<function=", "<parameter="), ("<seed:tool_call>", _STEP, _MIMO_EXAMPLE)),)
    ),
    _FORM.MIMO: CallFormat(TaggedCalls((_MIMO,)), (Sign(("<tool_call>", _MIMO_EXAMPLE), ("<seed:tool_call>",)),)),
    _FORM.STEP3P5: CallFormat(TaggedCalls((_QWEN,)), (Sign(("<function=", "<parameter=", _STEP)),)),
    _FORM.LLAMA3_JSON: CallFormat(
        Llama3Json,
        (
            Sign(("<|python_tag|>",), ("<function=", "[func_name1(")),
            Sign(('{"name": function name, "parameters":',), ("<|python_tag|>", "<function=")),
        ),
    ),
    _FORM.MISTRAL: CallFormat(Mistral, (Sign(("[TOOL_CALLS]",)),)),
    _FORM.HARMONY: CallFormat(Harmony, (Sign(("<|channel|>", "<|message|>")),)),
    _FORM.GEMMA: CallFormat(Gemma, (Sign(("<|tool_call>",)),)),
    _FORM.GLM45: CallFormat(
        _glm(Lines.ALL), (Sign(("<arg_key>",), ("</arg_key><arg_value>", "<available_tools>", "<tool_sep")),)
    ),
    _FORM.GLM47: CallFormat(_glm(Lines.NONE), (Sign(("</arg_key><arg_value>",), ("<available_tools>", "<tool_sep")),)),
    _FORM.POOLSIDE_V1: CallFormat(_glm(Lines.EITHER), (Sign(("<arg_key>", "<available_tools>")),)),
    _FORM.HY_V3: CallFormat(TaggedCalls((_hy_v3(":opensource"), _hy_v3(""))), (Sign(("<tool_sep", "<arg_key")),)),
    _FORM.MINIMAX_M2: CallFormat(TaggedCalls((_MINIMAX_M2,)), (Sign(("<minimax:tool_call>",)),)),
    _FORM.SEED_OSS: CallFormat(TaggedCalls((_SEED_OSS,)), (Sign(("<seed:tool_call>",)),)),
    _FORM.KIMI_K2: CallFormat(
        _KIMI_K2, (Sign(("<|tool_calls_section_begin|>",)), Sign(("<|im_system|>tool_declare<|im_middle|>",)))
    ),
    _FORM.DEEPSEEK_V3: CallFormat(_DEEPSEEK_V3, (Sign((_DEEPSEEK, "```json")),)),
    _FORM.DEEPSEEK_V31: CallFormat(_DEEPSEEK_V31, (Sign((_DEEPSEEK,), ("```json",)),)),
    _FORM.DEEPSEEK_V32: CallFormat(TaggedCalls((_DEEPSEEK_V32,)), (Sign((_DSML, "function_calls>")),)),
    _FORM.FUNCTIONARY_V31: CallFormat(_FUNCTIONARY_V31, (Sign(("<function=", "</function>"), ("<parameter=",)),)),
    _FORM.FUNCTIONARY_V32: CallFormat(Functionary, (Sign((">>>all",)),)),
    _FORM.GRANITE: CallFormat(_GRANITE, (Sign(("<|tool_call|>", "<|start_of_role|>")),)),
    _FORM.PHI4_MINI: CallFormat(_PHI4_MINI, (Sign(("functools[",)), Sign(("<|tool|>", "<|/tool|>"), ("functools[",)))),
    _FORM.HUNYUAN_A13B: CallFormat(ArrayMarks((("<tool_calls>", "</tool_calls>"),)), (Sign(("<tool_calls>[",)),)),
    _FORM.HUNYUAN_DENSE: CallFormat(
        _HUNYUAN_DENSE, (Sign(("<tool_calls>", "<tool_call>function_name"), ("<arg_key>",)),)
    ),
    _FORM.COHERE3: CallFormat(_COHERE, (Sign(("<|START_ACTION|>",), ("<|START_TEXT|>",)),)),
    _FORM.COHERE4: CallFormat(_COHERE, (Sign(("<|START_ACTION|>", "<|START_TEXT|>")),)),
    _FORM.NEMOTRON_JSON: CallFormat(ArrayMarks((("<TOOLCALL>", "</TOOLCALL>"),)), (Sign(("<TOOLCALL>",)),)),
    _FORM.PYTHONIC: CallFormat(_PYTHONIC, (Sign(("[func_name1(",)),)),
    _FORM.LFM2: CallFormat(
        PythonMarks(("<|tool_call_start|>", "<|tool_call_end|>")),
        (
            Sign(("<|tool_call_start|>",)),
            Sign(("<|tool_list_start|>",), ("<|tool_call_start|>",)),
            Sign(('"List of tools: ["', "<|im_start|>"), ("<|tool_call_start|>",)),
        ),
    ),
    _FORM.OLMO3: CallFormat(
        PythonMarks(("<function_calls>", "</function_calls>"), has_brackets=False), (Sign(("<function_calls>",)),)
    ),
}
