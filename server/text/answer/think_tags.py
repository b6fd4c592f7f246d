"""Reasoning between two marks at the beginning of an answer, such as <think> and </think>."""

from collections.abc import Mapping
from dataclasses import dataclass

from server.settings import ReasoningParser
from server.text.answer.texts.cutting import cut

_THINK = ("<think>", "</think>")
_COHERE = ("<|START_THINKING|>", "<|END_THINKING|>")
# A mark, and the texts of which one follows it where it begins a call: that ends reasoning without the second mark.
CallSigns = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """Marks of a model's reasoning.

    pairs    what opens reasoning and what closes it; a model writes one of them, the first where nothing says which
    title    behind the opening mark, no part of the reasoning
    wrapped  around the answer behind reasoning, no part of it
    """

    pairs: tuple[tuple[str, str], ...] = (_THINK,)
    title: str = ""
    wrapped: tuple[str, str] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for pair in self.pairs for mark in pair)

    def closes(self, prompt: str) -> bool:
        """Return whether a prompt ends with a closed reasoning: the answer has none."""
        return prompt[-256:].rstrip().endswith(tuple(closing for _, closing in self.pairs))

    def opened(self, prompt: str) -> tuple[str, str] | None:
        """Return the marks of the reasoning that a prompt has begun, perhaps with its title; None where it has not."""
        written = prompt[-256:].rstrip()
        return next((it for it in self.pairs if written.endswith(it[0]) or self.has_title(prompt, it)), None)

    def last_of(self, said: str) -> str:
        """Return the last mark, with its title, of the reasoning that a text begins with; empty where it has none."""
        begun = said.lstrip()
        for opening, closing in self.pairs:
            if closing in begun:
                return closing
            if begun.startswith(opening):
                return opening + self.title
        return ""

    def has_title(self, prompt: str, pair: tuple[str, str]) -> bool:
        return bool(self.title) and prompt[-256:].rstrip().endswith(pair[0] + self.title.rstrip())


_TAGGED = ReasoningTags()
TAGS: Mapping[ReasoningParser, ReasoningTags] = {
    **dict.fromkeys(
        (
            *(ReasoningParser.THINK, ReasoningParser.THINK_FIRST, ReasoningParser.GLM45, ReasoningParser.MINIMAX_M2),
            *(ReasoningParser.NEMOTRON_V3, ReasoningParser.DEEPSEEK_V3, ReasoningParser.POOLSIDE_V1),
            ReasoningParser.STEP3P5,
        ),
        _TAGGED,
    ),
    ReasoningParser.KIMI_K2: ReasoningTags((_THINK, ("◁think▷", "◁/think▷"))),
    ReasoningParser.GRANITE: ReasoningTags(
        (
            _THINK,
            ("Here is my thought process:", "Here is my response:"),
            ("Here's my thought process:", "Here's my response:"),
        ),
        wrapped=("<response>", "</response>"),
    ),
    ReasoningParser.COHERE3: ReasoningTags((_COHERE,), wrapped=("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    ReasoningParser.COHERE4: ReasoningTags((_COHERE,), wrapped=("<|START_TEXT|>", "<|END_TEXT|>")),
    ReasoningParser.HUNYUAN_A13B: ReasoningTags(wrapped=("<answer>", "</answer>")),
    ReasoningParser.SEED_OSS: ReasoningTags((("<seed:think>", "</seed:think>"),)),
    ReasoningParser.HY_V3: ReasoningTags((("<think:opensource>", "</think:opensource>"), _THINK)),
    ReasoningParser.MISTRAL: ReasoningTags((("[THINK]", "[/THINK]"),)),
    ReasoningParser.GEMMA: ReasoningTags((("<|channel>", "<channel|>"),), title="thought\n"),
}


class ThinkTags:
    """Reads reasoning, and says what stands behind it."""

    def __init__(
        self,
        tags: ReasoningTags,
        *,
        opened: tuple[str, str] | None = None,
        has_title: bool = False,
        calls: CallSigns | None = None,
    ) -> None:
        """opened     the marks of the reasoning that the prompt has begun, whose first one the model may repeat
        has_title  the prompt has the title of the reasoning, too
        calls      what begins a call, which ends reasoning
        """
        self.marks = tags.marks
        self._pairs = tags.pairs if opened is None else (opened, *(it for it in tags.pairs if it != opened))
        self._end = self._pairs[0][1]
        self._title = "" if has_title else tags.title
        self._calls = calls or {}
        self._text = ""
        self._is_at_start = True
        self._is_at_title = bool(self._title)
        self.is_open = opened is not None
        self.has_ended = False  # there was reasoning

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """New reasoning, and new text behind it."""
        self._text += text
        if self._is_at_start:
            begun = self._text.lstrip()
            if not is_last and any(start.startswith(begun) and begun != start for start, _ in self._pairs):
                return "", ""
            self._is_at_start = False
            for start, end in self._pairs:
                if begun.startswith(start):
                    self.is_open, self._end = True, end
                    self._text = begun.removeprefix(start)
                    break
        if not self.is_open:
            text, self._text = self._text, ""
            return "", text
        if self._is_at_title:
            if not is_last and self._title.startswith(self._text) and self._text != self._title:
                return "", ""
            self._is_at_title = False
            self._text = self._text.removeprefix(self._title)
        reasoning, rest = self._reasoning(is_last=is_last)
        self.has_ended = not self.is_open
        return reasoning, rest

    def _reasoning(self, *, is_last: bool) -> tuple[str, str]:
        """Read on within the reasoning."""
        found = ""
        while True:
            text, mark, rest = cut(self._text, (self._end, *self._calls), is_last=is_last)
            found += text
            if mark is None:
                self._text = rest
                return found, ""
            behind = rest.lstrip()
            if mark == self._end or behind.startswith(self._calls[mark]):
                self.is_open = False
                self._text = ""
                return found, rest if mark == self._end else mark + rest
            if not is_last and any(begins.startswith(behind) for begins in self._calls[mark]):
                self._text = mark + rest
                return found, ""
            found += mark  # it is only named
            self._text = rest

    def finish(self) -> tuple[str, str]:
        return self.feed("", is_last=True)


class Unwrapped:
    """Takes away two marks around an answer, and blanks within them. Without the first one the text stays as it is."""

    def __init__(self, marks: tuple[str, str]) -> None:
        self._opening, self._closing = marks
        self._text = ""
        self._is_at_start = True
        self._is_wrapped = False
        self._blank = ""  # given only if the closing mark does not follow

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Return the new text within the marks, and behind them."""
        self._text += text
        if self._is_at_start:
            begun = self._text.lstrip()
            if not is_last and self._opening.startswith(begun) and begun != self._opening:
                return ""
            if begun.startswith(self._opening):
                self._text = begun.removeprefix(self._opening).lstrip()
                if not self._text and not is_last:
                    self._text = self._opening
                    return ""
                self._is_wrapped = True
            self._is_at_start = False
        if not self._is_wrapped:
            text, self._text = self._text, ""
            return text
        text, mark, self._text = cut(self._text, (self._closing,), is_last=is_last)
        body = text.rstrip()
        given = self._blank + body if body else ""
        self._blank = text[len(body) :] if body else self._blank + text
        if mark is None:
            return given + (self._blank if is_last else "")
        self._is_wrapped = False
        rest, self._text = self._text, ""
        return given + rest
