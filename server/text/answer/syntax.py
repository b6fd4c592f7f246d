"""Formats that a model writes, by its chat template or by flags, and a parser for each answer."""

import logging
from dataclasses import dataclass

from server.errors import SettingsError
from server.settings import ReasoningParser, ToolCallParser
from server.text.answer.formats import FORMATS
from server.text.answer.forms.harmony import CHANNEL, MARKS, MESSAGE, START, Harmony
from server.text.answer.forms.marked import Marks
from server.text.answer.parser import AnswerParser, CallParser, Filtered, Split, Tools
from server.text.answer.texts.values import inlined
from server.text.answer.think_tags import TAGS, ReasoningTags, ThinkTags, Unwrapped
from server.text.chat_template import ChatTemplate

logger = logging.getLogger(__name__)
# What a template has that calls in a format that is not read, by the format's usual name.
_SIGNS_OF_OTHERS = (
    ("DeepSeek V4", "｜DSML｜"),
    ("MiniMax M3", "]<]minimax[>["),
    ("Kimi K3", "<|open|>"),
    ("Apertus", "<|tools_prefix|>"),
    ("FunctionGemma", "<start_function_call>"),
    ("MiniCPM5", "<function name="),
    ("Muse Glimmer", "<atem:function_calls>"),
    ("InternLM2", "<|action_start|>"),
    ("Solar Open", "<|tool_call:begin|>"),
    ("Granite 20B FC", "<|function_call_library|>"),
    ("GigaChat", "<function_usage>"),
)
_SIGNS_OF_REASONING = (
    (ReasoningParser.HARMONY, ("<|channel|>", "<|message|>")),
    (ReasoningParser.GEMMA, ("<|channel>", "<channel|>")),
    (ReasoningParser.MISTRAL, ("[THINK]", "[/THINK]")),
    (ReasoningParser.GRANITE, ("<response></response>",)),
    (ReasoningParser.GRANITE, ("Here is my thought process",)),
    (ReasoningParser.SEED_OSS, ("<seed:think>",)),
    (ReasoningParser.HY_V3, ("<think{}>",)),
    (ReasoningParser.HY_V3, ("<think:opensource>",)),
    (ReasoningParser.KIMI_K2, ("◁think▷",)),
    (ReasoningParser.COHERE4, ("<|START_THINKING|>", "<|START_TEXT|>")),
    (ReasoningParser.COHERE3, ("<|START_THINKING|>",)),
    (ReasoningParser.HUNYUAN_A13B, ("<think>", "<answer>")),
    (ReasoningParser.HUNYUAN_A13B, ("<think>", "<|extra_0|>")),
    (ReasoningParser.THINK, ("<think>",)),
    (ReasoningParser.THINK, ("</think>",)),
)
_HARMONY = (f"{CHANNEL}analysis{MESSAGE}", f"<|end|>{START}assistant", f"{CHANNEL}final{MESSAGE}")


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
        return TAGS[self.reasoning].marks if self.reasoning in TAGS else ()

    def parser(
        self,
        tools: Tools | None,
        prompt: str,
        *,
        is_streamed: bool,
        is_bound: bool = False,
        is_forced: bool = False,
        is_limited: bool = False,
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
        is_limited   calls of other tools, which the conversation may have, are left out
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
        if parser is None or (include_reasoning and parallel_tool_calls and not is_limited):
            return parser
        names = frozenset(tools or ()) if is_limited else None
        return Filtered(parser, has_reasoning=include_reasoning, has_many_calls=parallel_tool_calls, names=names)

    def reasoning_of(self, said: str) -> str:
        """Return what opens the reasoning that `said`, the beginning of an answer, is in; what closes it if it has one.

        Empty where the text has no reasoning.
        """
        tags = TAGS.get(self.reasoning)
        return "" if tags is None else tags.last_of(said)

    def reasoning_before(self, prompt: str) -> Reasoning | None:
        """Return the form of the reasoning before a bound answer; None where the prompt or the model allows none."""
        if self._has_channels(has_tools=False):
            opening, closing, head = _HARMONY
            return Reasoning(opening, closing, MARKS, is_open=False, head=head)
        tags = TAGS.get(self.reasoning)
        if tags is None or tags.closes(prompt):
            return None
        opened = self._opened(tags, prompt)
        opening, closing = opened or tags.pairs[0]
        marks = (opening, closing)
        return Reasoning(opening + tags.title, closing, marks, is_open=opened is not None, has_breaks=True)

    def _has_channels(self, *, has_tools: bool) -> bool:
        return self.reasoning is ReasoningParser.HARMONY or (self.calls is ToolCallParser.HARMONY and has_tools)

    def _parser(self, tools: Tools | None, prompt: str, *, is_streamed: bool) -> AnswerParser | None:
        if self._has_channels(has_tools=tools is not None):
            return Harmony(tools or {}, has_tools=tools is not None)
        calls = None if tools is None else FORMATS[self.calls].parser(tools)
        tags = self._tags(prompt, calls)
        if calls is None and tags is None:
            return None
        around = TAGS[self.reasoning].wrapped if self.reasoning in TAGS else None
        return Split(tags, calls, wrapped=None if around is None else Unwrapped(around), is_whole=not is_streamed)

    def _bound_parser(
        self, tools: Tools | None, prompt: str, form: ToolCallParser, *, is_streamed: bool, is_forced: bool
    ) -> AnswerParser | None:
        if self._has_channels(has_tools=tools is not None):
            channels = Harmony(tools or {}, has_tools=tools is not None)
            return Split(None, channels, is_whole=not is_streamed, is_bound=True, is_forced=is_forced)
        calls = None if tools is None else FORMATS[form].parser(tools)
        tags = None if self.reasoning_before(prompt) is None else self._tags(prompt, None)
        if calls is None and tags is None:
            return None
        return Split(tags, calls, is_whole=not is_streamed, is_bound=True, is_forced=is_forced)

    def _opened(self, tags: ReasoningTags, prompt: str) -> tuple[str, str] | None:
        """Return the marks of the reasoning that an answer is in from its beginning; None where it is in none."""
        is_first = self.reasoning is ReasoningParser.THINK_FIRST and not tags.closes(prompt)
        return tags.opened(prompt) or (tags.pairs[0] if is_first else None)

    def _tags(self, prompt: str, calls: CallParser | None) -> ThinkTags | None:
        tags = TAGS.get(self.reasoning)
        if tags is None:
            return None
        opened = self._opened(tags, prompt)
        has_title = opened is not None and tags.has_title(prompt, opened)
        return ThinkTags(
            tags, opened=opened, has_title=has_title, calls=None if calls is None else calls.ends_reasoning
        )


def _shows_calls(template: ChatTemplate, form: ToolCallParser) -> bool:
    """Return whether a template without tools writes calls of a form with marks, as DeepSeek's published ones do."""
    is_marked = form in FORMATS and isinstance(FORMATS[form].shape, Marks)
    return is_marked and template.reads("tool_calls", has_tools=True)


def choose_syntax(template: ChatTemplate | None, calls: ToolCallParser, reasoning: ReasoningParser) -> AnswerSyntax:
    """The formats that flags name, or that a chat template shows where a flag is `auto`.

    Raises SettingsError for a format of calls that no prompt explains, as the template has no place for tools, and for
    gpt-oss's channels with another model's calls.
    """
    source, tool_source = (template.source, template.tool_source) if template is not None else ("", "")
    own = next((form for form, it in FORMATS.items() if it.is_in(tool_source)), ToolCallParser.AUTO)
    has_place = template is not None and template.reads("tools", has_tools=True)
    if template is not None and not has_place and calls in (ToolCallParser.AUTO, own):
        has_place = _shows_calls(template, own)
    if not has_place and calls not in (ToolCallParser.AUTO, ToolCallParser.HERMES):
        raise SettingsError(
            f"--tool-call-parser {calls.value}: this model's chat template has no place for tools; they are described "
            "in the system's message, to call as hermes"
        )
    if calls is ToolCallParser.AUTO:
        calls = own
        if has_place and calls is ToolCallParser.AUTO:
            other = next((name for name, sign in _SIGNS_OF_OTHERS if sign in tool_source), "")
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
        both = f"{source}\n{tool_source}"
        found = (parser for parser, texts in _SIGNS_OF_REASONING if all(text in both for text in texts))
        reasoning = next(found, ReasoningParser.NONE)
    return AnswerSyntax(calls, reasoning, has_tool_template=has_place)
