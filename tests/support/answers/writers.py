"""Writers of calls, one a format: what a model of that format writes, as its chat template has it."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.settings import ReasoningParser, ToolCallParser
from support.answers.drawn import Call, dumped

Chance = random.Random
_FORM, _REASONING = ToolCallParser, ReasoningParser


class First(random.Random):
    """Takes the first of what may be written: the usual."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def random(self) -> float:
        return 0.0


def _bare(value: Any, chance: Chance) -> str:
    return value if isinstance(value, str) else dumped(value, chance)


def _glm(line: str, head: str = "", suffix: str = "") -> Callable[[Call, Chance], str]:
    def written(call: Call, chance: Chance) -> str:
        key, value = f"arg_key{suffix}", f"arg_value{suffix}"
        fields = [
            f"<{key}>{name}</{key}>{line}<{value}>{_bare(it, chance)}</{value}>{line}" for name, it in call[1].items()
        ]
        return f"<tool_call{suffix}>{call[0]}{head}{line}{''.join(fields)}</tool_call{suffix}>"

    return written


def _hy(suffix: str) -> Callable[[list[Call], Chance], str]:
    def written(calls: list[Call], chance: Chance) -> str:
        one = _glm("\n", f"<tool_sep{suffix}>", suffix)
        inside = "".join(f"{one(call, chance)}\n" for call in calls)
        return f"<tool_calls{suffix}>\n{inside}</tool_calls{suffix}>"

    return written


def _qwen(call: Call, chance: Chance) -> str:
    fields = (f"<parameter={key}>\n{_bare(it, chance)}\n</parameter>\n" for key, it in call[1].items())
    return f"<tool_call>\n<function={call[0]}>\n{''.join(fields)}</function>\n</tool_call>"


def _mimo(call: Call, chance: Chance) -> str:
    fields = (f"<parameter={key}>{_bare(it, chance)}</parameter>\n" for key, it in call[1].items())
    return f"<tool_call>\n<function={call[0]}>\n{''.join(fields)}</function>\n</tool_call>"


def _seed(call: Call, chance: Chance) -> str:
    """A call as Seed-OSS's template has it, which writes what is no string as Python does."""
    python = chance.random() < 0.5
    values = {
        key: it if isinstance(it, str) else str(it) if python else dumped(it, chance) for key, it in call[1].items()
    }
    fields = (f"<parameter={key}>{it}</parameter>\n" for key, it in values.items())
    return f"<seed:tool_call>\n<function={call[0]}>\n{''.join(fields)}</function>\n</seed:tool_call>"


def _minimax(calls: list[Call], chance: Chance) -> str:
    def one(call: Call) -> str:
        fields = (f'<parameter name="{key}">{_bare(it, chance)}</parameter>\n' for key, it in call[1].items())
        return f'<invoke name="{call[0]}">\n{"".join(fields)}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(map(one, calls))}</minimax:tool_call>"


def _kimi(calls: list[Call], chance: Chance) -> str:
    written = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{dumped(it, chance)}<|tool_call_end|>"
        for number, (name, it) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def _deepseek_v3(calls: list[Call], chance: Chance) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumped(it, chance)}\n```<｜tool▁call▁end｜>"
        for name, it in calls
    )
    return f"<｜tool▁calls▁begin｜>{chr(10).join(written)}<｜tool▁calls▁end｜>"


def _hunyuan_dense(calls: list[Call], chance: Chance) -> str:
    written = (f"<tool_call>{name}\n```json\n{dumped(it, chance)}\n```</tool_call>" for name, it in calls)
    return f"<tool_calls>{chr(10).join(written)}</tool_calls>"


def _deepseek_v31(calls: list[Call], chance: Chance) -> str:
    written = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumped(it, chance)}<｜tool▁call▁end｜>" for name, it in calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


def _deepseek_v32(calls: list[Call], chance: Chance) -> str:
    def field(key: str, value: Any) -> str:
        says = json.dumps(isinstance(value, str))
        return f'<{_DSML}parameter name="{key}" string="{says}">{_bare(value, chance)}</{_DSML}parameter>\n'

    written = (
        f'<{_DSML}invoke name="{name}">\n{"".join(field(*it) for it in given.items())}</{_DSML}invoke>\n'
        for name, given in calls
    )
    return f"<{_DSML}function_calls>\n{''.join(written)}</{_DSML}function_calls>"


def _functionary_v31(call: Call, chance: Chance) -> str:
    return f"<function={call[0]}>{dumped(call[1], chance)}</function>"


def _functionary_v32(calls: list[Call], chance: Chance) -> str:
    return ">>>".join(f"{name}\n{dumped(it, chance)}" for name, it in calls)


def _array(opening: str, closing: str = "") -> Callable[[list[Call], Chance], str]:
    def written(calls: list[Call], chance: Chance) -> str:
        array = dumped([{"name": name, "arguments": it} for name, it in calls], chance)
        return f"{opening}{chance.choice(['', ' '])}{array}{closing}"

    return written


def _cohere(calls: list[Call], chance: Chance) -> str:
    """Calls in lines, with the numbers that the template gives them."""
    written = (
        f'\n    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {dumped(it, chance)}}}'
        for number, (name, it) in enumerate(calls)
    )
    return f"<|START_ACTION|>[{','.join(written)}\n]<|END_ACTION|>"


def _object(call: Call, key: str, chance: Chance) -> str:
    """A call as JSON, with an id and in another order or not."""
    fields: list[tuple[str, Any]] = [("name", call[0]), (key, call[1])]
    if chance.random() > 0.7:
        fields.insert(chance.randrange(3), ("id", 'x"{'))
    return dumped(dict(fields if chance.random() < 0.5 else fields[::-1]), chance)


def _hermes(call: Call, chance: Chance) -> str:
    around = chance.choice(["\n", "", " "])
    return f"<tool_call>{around}{_object(call, 'arguments', chance)}{around}</tool_call>"


def _llama(calls: list[Call], chance: Chance) -> str:
    objects = [_object(call, chance.choice(["parameters", "arguments"]), chance) for call in calls]
    return chance.choice(["", "<|python_tag|>"]) + "; ".join(objects)


def _mistral(calls: list[Call], chance: Chance) -> str:
    opened = chance.choice(["[TOOL_CALLS][", "[TOOL_CALLS] ["])
    return opened + ", ".join(_object(call, "arguments", chance) for call in calls) + "]"


def _mistral_named(calls: list[Call], chance: Chance) -> str:
    between = chance.choice(["[ARGS]", "", "[CALL_ID]123456789[ARGS]"])
    return "".join(f"[TOOL_CALLS]{name}{between}{dumped(it, chance)}" for name, it in calls)


def _harmony(calls: list[Call], chance: Chance) -> str:
    """Messages of a channel, with the head of a message between two."""
    parts = []
    for name, arguments in calls:
        to, channel = f" to=functions.{name}", "<|channel|>commentary"
        head = chance.choice([f"{channel}{to} <|constrain|>json", f"{to}{channel} json"])
        parts.append(f"{head}<|message|>{dumped(arguments, chance)}<|call|>")
    return _HEAD.join(parts)


def _gemma(calls: list[Call], chance: Chance) -> str:
    def written(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(it)}" for key, it in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        text = value if isinstance(value, str) else json.dumps(value)
        may_be_bare = not isinstance(value, str) or (text.isascii() and text.isalnum())
        is_bare = may_be_bare and (chance.random() > 0.7 if isinstance(value, str) else chance.random() < 0.8)
        return text if is_bare else f"{QUOTE}{text}{QUOTE}"

    return "".join(f"<|tool_call>call:{name}{written(arguments)}<tool_call|>" for name, arguments in calls)


def _python(value: Any, chance: Chance) -> str:
    if isinstance(value, str) and chance.random() < 0.3:
        return json.dumps(value)
    return repr(value)


def _python_calls(opening: str, between: str, closing: str) -> Callable[[list[Call], Chance], str]:
    def written(calls: list[Call], chance: Chance) -> str:
        texts = (
            f"{name}({', '.join(f'{key}={_python(it, chance)}' for key, it in fields.items())})"
            for name, fields in calls
        )
        return f"{opening}{between.join(texts)}{closing}"

    return written


def _each(one: Callable[[Call, Chance], str], between: str = "\n") -> Callable[[list[Call], Chance], str]:
    """Calls one by one, in lines or not."""

    def written(calls: list[Call], chance: Chance) -> str:
        return chance.choice([between, "\n", ""]).join(one(call, chance) for call in calls)

    return written


@dataclass(frozen=True)
class Writer:
    """A format: how calls are written in it, its reasoning, and what no text in it can hold.

    openings    what begins a call: no content has it, and no reasoning that it ends
    not_in_text what ends an argument that is a string
    never       what no string of an argument can hold, not even one within another value
    ends_thought whether a call ends reasoning that is not closed
    is_last     whether a call ends an answer
    has_json    whether a call counts as whole only where its arguments are JSON
    """

    form: ToolCallParser
    calls: Callable[[list[Call], Chance], str]
    openings: tuple[str, ...]
    not_in_text: tuple[str, ...] = ()
    reasoning: ReasoningParser = ReasoningParser.THINK
    think: tuple[str, str] = ("<think>", "</think>")
    never: tuple[str, ...] = ()
    ends_thought: bool = True
    is_last: bool = False
    has_json: bool = True

    def answer(self, reasoning: str, before: str, calls: list[Call], behind: str, chance: Chance) -> str:
        if self.form is _FORM.HARMONY:
            messages = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
            if before or not (messages or calls):
                messages.append(f"<|channel|>{chance.choice(['final', 'commentary'])}<|message|>{before}<|end|>")
            messages += [self.calls(calls, chance)] if calls else []
            return _HEAD.join(messages).removesuffix("<|call|>")
        opened, closed = self.think
        thought = f"{opened}{reasoning}{closed}" if reasoning else ""
        if self.form is _FORM.FUNCTIONARY_V32:
            messages = [
                f"all\n{before}" if before else "",
                self.calls(calls, chance),
                f"all\n{behind}" if behind else "",
            ]
            return thought + ">>>".join(filter(None, messages))
        return thought + before + (self.calls(calls, chance) if calls else "") + behind


QUOTE = '<|"|>'
_HEAD = "<|start|>assistant"
_HARMONYS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
_THINK = ("[THINK]", "[/THINK]")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_DSML = "｜DSML｜"
_COHERE_THINK = ("<|START_THINKING|>", "<|END_THINKING|>")
_HY_THINK = ("<think:opensource>", "</think:opensource>")
WRITERS = {
    "hermes": Writer(_FORM.HERMES, _each(_hermes), ("<tool_call>",), is_last=True),
    "llama3_json": Writer(
        _FORM.LLAMA3_JSON, _llama, ("<|python_tag|>", "{"), ends_thought=False, is_last=True
    ),
    "mistral": Writer(
        _FORM.MISTRAL, _mistral, ("[TOOL_CALLS]", *_THINK), (), _REASONING.MISTRAL, _THINK,
        ends_thought=False, is_last=True,
    ),
    "mistral named": Writer(
        _FORM.MISTRAL, _mistral_named, ("[TOOL_CALLS]", *_THINK), (), _REASONING.MISTRAL, _THINK,
        ("[TOOL_CALLS]",), ends_thought=False, is_last=True, has_json=False,
    ),
    "harmony": Writer(
        _FORM.HARMONY, _harmony, _HARMONYS, (), _REASONING.HARMONY, never=_HARMONYS, is_last=True, has_json=False
    ),
    "gemma": Writer(
        _FORM.GEMMA, _gemma, ("<|tool_call>", "<|channel>", "<channel|>"), (), _REASONING.GEMMA,
        ("<|channel>thought\n", "<channel|>"), (QUOTE, "<tool_call|>"), ends_thought=False, is_last=True,
    ),
    "glm45": Writer(_FORM.GLM45, _each(_glm("\n")), ("<tool_call>",), ("</arg_value>",), _REASONING.GLM45),
    "glm47": Writer(_FORM.GLM47, _each(_glm(""), ""), ("<tool_call>",), ("</arg_value>",), _REASONING.GLM45),
    "poolside_v1": Writer(
        _FORM.POOLSIDE_V1, _each(_glm("\n")), ("<tool_call>",), ("</arg_value>",), _REASONING.POOLSIDE_V1
    ),
    "hy_v3": Writer(
        _FORM.HY_V3, _hy(":opensource"), ("<tool_call",), ("</arg_value",), _REASONING.HY_V3, _HY_THINK
    ),
    "hy_v3 plain": Writer(_FORM.HY_V3, _hy(""), ("<tool_call",), ("</arg_value",), _REASONING.HY_V3),
    "minimax_m2": Writer(
        _FORM.MINIMAX_M2, _minimax, ("<minimax:tool_call>", '<invoke name="'), ("</parameter>",), _REASONING.MINIMAX_M2
    ),
    "seed_oss": Writer(
        _FORM.SEED_OSS, _each(_seed), ("<seed:tool_call>", "<function="), ("</parameter>",), _REASONING.SEED_OSS,
        ("<seed:think>", "</seed:think>"),
    ),
    "qwen3_coder": Writer(
        _FORM.QWEN3_CODER, _each(_qwen), ("<tool_call>", "<function="), ("<parameter=", "</parameter>", "</function>")
    ),
    "step3p5": Writer(
        _FORM.STEP3P5, _each(_qwen), ("<tool_call>", "<function="), ("<parameter=", "</parameter>", "</function>"),
        _REASONING.STEP3P5,
    ),
    "mimo": Writer(
        _FORM.MIMO, _each(_mimo), ("<tool_call>", "<function="), ("<parameter=", "</parameter>", "</function>")
    ),
    "kimi_k2": Writer(
        _FORM.KIMI_K2, _kimi, ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"), (), _REASONING.KIMI_K2
    ),
    "deepseek_v3": Writer(_FORM.DEEPSEEK_V3, _deepseek_v3, _DEEPSEEK, (), _REASONING.DEEPSEEK_V3),
    "deepseek_v31": Writer(_FORM.DEEPSEEK_V31, _deepseek_v31, _DEEPSEEK, (), _REASONING.DEEPSEEK_V3),
    "deepseek_v32": Writer(
        _FORM.DEEPSEEK_V32, _deepseek_v32, (f"<{_DSML}function_calls>", f'<{_DSML}invoke name="'),
        (f"</{_DSML}parameter>",), _REASONING.DEEPSEEK_V3,
    ),
    "functionary_v3.1": Writer(_FORM.FUNCTIONARY_V31, _each(_functionary_v31, ""), ("<function=",)),
    "functionary_v3.2": Writer(_FORM.FUNCTIONARY_V32, _functionary_v32, (">>>",)),
    "granite": Writer(_FORM.GRANITE, _array("<|tool_call|>"), ("<|tool_call|>", "<tool_call>"), (), _REASONING.GRANITE),
    "phi4_mini_json": Writer(_FORM.PHI4_MINI, _array("functools"), ("functools", "<|tool_call|>")),
    "phi4_mini_json marks": Writer(
        _FORM.PHI4_MINI, _array("<|tool_call|>", "<|/tool_call|>"), ("functools", "<|tool_call|>")
    ),
    "hunyuan_a13b": Writer(_FORM.HUNYUAN_A13B, _array("<tool_calls>", "</tool_calls>"), ("<tool_calls>",)),
    "hunyuan_dense": Writer(
        _FORM.HUNYUAN_DENSE, _hunyuan_dense, ("<tool_calls>", "<tool_call>"), (), _REASONING.HUNYUAN_A13B
    ),
    "cohere_command3": Writer(
        _FORM.COHERE3, _cohere, ("<|START_ACTION|>", "<|START_RESPONSE|>"), (), _REASONING.COHERE3, _COHERE_THINK,
    ),
    "cohere_command4": Writer(
        _FORM.COHERE4, _cohere, ("<|START_ACTION|>", "<|START_TEXT|>"), (), _REASONING.COHERE4, _COHERE_THINK,
    ),
    "nemotron_json": Writer(
        _FORM.NEMOTRON_JSON, _array("<TOOLCALL>", "</TOOLCALL>"), ("<TOOLCALL>",), (), _REASONING.NEMOTRON_V3
    ),
    "pythonic": Writer(_FORM.PYTHONIC, _python_calls("[", ", ", "]"), ("<|python_tag|>",)),
    "lfm2": Writer(
        _FORM.LFM2, _python_calls("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"), ("<|tool_call_start|>",)
    ),
    "olmo3": Writer(_FORM.OLMO3, _python_calls("<function_calls>", "\n", "</function_calls>"), ("<function_calls>",)),
}  # fmt: skip
