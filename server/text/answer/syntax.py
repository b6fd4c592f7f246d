"""Formats that a model writes, by its chat template or by flags, and a parser for each answer."""

import logging
from dataclasses import dataclass
from typing import TypeVar

from server.errors import SettingsError
from server.settings import ReasoningParser, ToolCallParser
from server.text.answer.forms.gemma import Gemma
from server.text.answer.forms.harmony import CHANNEL, MARKS, MESSAGE, START, Harmony
from server.text.answer.forms.hermes import Hermes
from server.text.answer.forms.llama3_json import Llama3Json
from server.text.answer.forms.mistral import Mistral
from server.text.answer.forms.qwen3_coder import Qwen3Coder
from server.text.answer.parser import AnswerParser, CallParser, Filtered, Split, ThinkTags, Tools
from server.text.answer.texts.values import inlined
from server.text.chat_template import ChatTemplate

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
# What a template has that renders calls in a format, the surest first.
_SIGNS_OF_CALLS = (
    (ToolCallParser.HARMONY, ("<|channel|>", "<|message|>")),
    (ToolCallParser.GEMMA, ("<|tool_call>",)),
    (ToolCallParser.QWEN3_CODER, ("<function=", "<parameter=")),
    (ToolCallParser.MISTRAL, ("[TOOL_CALLS]",)),
    (ToolCallParser.HERMES, ("<tool_call>", '"arguments')),
    (ToolCallParser.LLAMA3_JSON, ("<|python_tag|>",)),
    (ToolCallParser.LLAMA3_JSON, ('{"name": function name, "parameters":',)),
)
# What a template has that renders calls in a format that is not read, by the format's usual name.
_SIGNS_OF_OTHERS = (
    ("functionary v3.1", ("<function=",)),
    ("functionary v3.2", (">>>all",)),
    ("GLM 4.5", ("<arg_key>",)),
    ("Granite", ("<|tool_call|>",)),
    ("Phi-4-mini", ("<|tool|>",)),
    ("DeepSeek", ("<｜tool▁calls▁begin｜>",)),
    ("Kimi K2", ("<|tool_calls_section_begin|>",)),
    ("MiniMax", ("<minimax:tool_call>",)),
    ("Seed-OSS", ("<seed:tool_call>",)),
)
_SIGNS_OF_REASONING = (
    (ReasoningParser.HARMONY, ("<|channel|>", "<|message|>")),
    (ReasoningParser.GEMMA, ("<|channel>", "<channel|>")),
    (ReasoningParser.MISTRAL, ("[THINK]", "[/THINK]")),
    (ReasoningParser.THINK, ("<think>",)),
    (ReasoningParser.THINK, ("</think>",)),
)
_TAGS = {
    ReasoningParser.THINK: ("<think>", "</think>", ""),
    ReasoningParser.THINK_FIRST: ("<think>", "</think>", ""),
    ReasoningParser.MISTRAL: ("[THINK]", "[/THINK]", ""),
    ReasoningParser.GEMMA: ("<|channel>", "<channel|>", "thought\n"),
}
_HARMONY = (f"{CHANNEL}analysis{MESSAGE}", f"<|end|>{START}assistant", f"{CHANNEL}final{MESSAGE}")
_CALLS: dict[ToolCallParser, type[CallParser]] = {
    ToolCallParser.HERMES: Hermes,
    ToolCallParser.QWEN3_CODER: Qwen3Coder,
    ToolCallParser.LLAMA3_JSON: Llama3Json,
    ToolCallParser.MISTRAL: Mistral,
    ToolCallParser.GEMMA: Gemma,
    ToolCallParser.HARMONY: Harmony,
}


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Form of the reasoning before an answer that is bound.

    marks       what of the texts may be a token of its own
    is_open     the prompt has begun it already; else the model may begin it, or not
    head        what stands before the answer unless that is a call
    has_breaks  line breaks may stand behind it
    """

    opening: str
    closing: str
    marks: tuple[str, ...]
    is_open: bool
    head: str = ""
    has_breaks: bool = False


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """The formats of one model."""

    calls: ToolCallParser = ToolCallParser.HERMES
    reasoning: ReasoningParser = ReasoningParser.NONE
    has_tool_template: bool = False  # else tools are described in the system's message, and called as Hermes does

    @property
    def reasoning_tags(self) -> tuple[str, ...]:
        """Return the tags around reasoning, where the format has such."""
        return _TAGS[self.reasoning][:2] if self.reasoning in _TAGS else ()

    def parser(
        self,
        tools: Tools | None,
        prompt: str,
        *,
        is_streamed: bool,
        is_bound: bool = False,
        is_forced: bool = False,
        calls: ToolCallParser | None = None,
        include_reasoning: bool = True,
        parallel_tool_calls: bool = True,
    ) -> AnswerParser | None:
        """A parser for one answer; None where all of the answer is content.

        tools        that the model may call, by name, with the JSON schemas of their arguments; None: no calls
        prompt       as the model reads it; its end says whether reasoning has begun
        is_streamed  calls are given as they come; else at the end, and a malformed one makes all of it content
        is_bound     a grammar binds what stands behind the reasoning
        is_forced    to calls alone, so that nothing of it is content
        calls        the format of its calls, where that is not the model's own
        """
        if tools is not None:
            tools = {name: inlined(schema) for name, schema in tools.items()}
        if is_bound:
            parser = self._bound_parser(
                tools, prompt, calls or self.calls, is_streamed=is_streamed, is_forced=is_forced
            )
        else:
            parser = self._parser(tools, prompt, is_streamed=is_streamed)
        if parser is None or (include_reasoning and parallel_tool_calls):
            return parser
        return Filtered(parser, has_reasoning=include_reasoning, has_many_calls=parallel_tool_calls)

    def reasoning_before(self, prompt: str) -> Reasoning | None:
        """Return the form of the reasoning before a bound answer; None where the prompt or the model allows none."""
        if self._has_channels(has_tools=False):
            opening, closing, head = _HARMONY
            return Reasoning(opening, closing, MARKS, is_open=False, head=head)
        if self.reasoning not in _TAGS:
            return None
        opening, closing, title = _TAGS[self.reasoning]
        if prompt[-256:].rstrip().endswith(closing):
            return None
        is_open = self._is_open(prompt)
        return Reasoning(opening + title, closing, (opening, closing), is_open=is_open, has_breaks=True)

    def _has_channels(self, *, has_tools: bool) -> bool:
        return self.reasoning is ReasoningParser.HARMONY or (self.calls is ToolCallParser.HARMONY and has_tools)

    def _parser(self, tools: Tools | None, prompt: str, *, is_streamed: bool) -> AnswerParser | None:
        if self._has_channels(has_tools=tools is not None):
            return Harmony(tools or {}, has_tools=tools is not None)
        calls = None if tools is None else _CALLS[self.calls](tools)
        tags = self._tags(prompt, calls)
        return None if calls is None and tags is None else Split(tags, calls, is_whole=not is_streamed)

    def _bound_parser(
        self, tools: Tools | None, prompt: str, form: ToolCallParser, *, is_streamed: bool, is_forced: bool
    ) -> AnswerParser | None:
        if self._has_channels(has_tools=tools is not None):
            channels = Harmony(tools or {}, has_tools=tools is not None)
            return Split(None, channels, is_whole=not is_streamed, is_bound=True, is_forced=is_forced)
        calls = None if tools is None else _CALLS[form](tools)
        tags = None if self.reasoning_before(prompt) is None else self._tags(prompt, None)
        if calls is None and tags is None:
            return None
        return Split(tags, calls, is_whole=not is_streamed, is_bound=True, is_forced=is_forced)

    def _is_open(self, prompt: str) -> bool:
        """Return whether the prompt has begun the reasoning, perhaps with the title of what follows."""
        start, end, title = _TAGS[self.reasoning]
        written = prompt[-256:].rstrip()
        is_titled = bool(title) and written.endswith(start + title.rstrip())
        is_first = self.reasoning is ReasoningParser.THINK_FIRST and not written.endswith(end)
        return is_titled or is_first or written.endswith(start)

    def _tags(self, prompt: str, calls: CallParser | None) -> ThinkTags | None:
        if self.reasoning not in _TAGS:
            return None
        start, end, title = _TAGS[self.reasoning]
        is_titled = bool(title) and prompt[-256:].rstrip().endswith(start + title.rstrip())
        call = None if calls is None else calls.ends_reasoning
        return ThinkTags(start, end, begins_open=self._is_open(prompt), title="" if is_titled else title, call=call)


def choose_syntax(template: ChatTemplate | None, calls: ToolCallParser, reasoning: ReasoningParser) -> AnswerSyntax:
    """The formats that flags name, or that a chat template shows where a flag is `auto`.

    Raises SettingsError for a format of calls that no prompt explains, as the template has no place for tools, and for
    gpt-oss's channels with another model's calls.
    """
    source, tool_source = (template.source, template.tool_source) if template is not None else ("", "")
    has_place = template is not None and template.reads("tools", has_tools=True)
    if not has_place and calls not in (ToolCallParser.AUTO, ToolCallParser.HERMES):
        raise SettingsError(
            f"--tool-call-parser {calls.value}: this model's chat template has no place for tools; they are described "
            "in the system's message, to call as hermes"
        )
    if calls is ToolCallParser.AUTO:
        calls = _first(_SIGNS_OF_CALLS, tool_source, ToolCallParser.AUTO)
        other = _first(_SIGNS_OF_OTHERS, tool_source, "")
        if other and calls is ToolCallParser.LLAMA3_JSON:  # functionary's models are Llamas
            calls = ToolCallParser.AUTO
        if has_place and calls is ToolCallParser.AUTO:
            logger.warning(
                "the chat template calls tools in a format that is not implemented%s: tools are described in the "
                "system's message and called as hermes; --tool-call-parser names another format",
                f" ({other})" if other else "",
            )
    if not has_place or calls is ToolCallParser.AUTO:
        calls, has_place = ToolCallParser.HERMES, False
    if reasoning is ReasoningParser.HARMONY and calls is not ToolCallParser.HARMONY:
        raise SettingsError(
            f"--reasoning-parser {reasoning.value}: a model with gpt-oss's channels calls tools in them, and this one "
            f"calls as {calls.value}"
        )
    if reasoning is ReasoningParser.AUTO:
        reasoning = _first(_SIGNS_OF_REASONING, f"{source}\n{tool_source}", ReasoningParser.NONE)
    return AnswerSyntax(calls, reasoning, has_tool_template=has_place)


def _first(signs: tuple[tuple[_T, tuple[str, ...]], ...], source: str, otherwise: _T) -> _T:
    return next((found for found, texts in signs if all(text in source for text in texts)), otherwise)
