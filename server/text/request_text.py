"""Texts of a request inside a prompt: a str that remembers which of its characters a request wrote.

A chat template works on them as on any other str: same length, comparisons, pieces and JSON. What joins, cuts or
changes them remembers their characters; what is not known in detail counts wholly as the request's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from typing import Any, SupportsIndex

from markupsafe import Markup

Span = tuple[int, int]  # half-open interval of characters


class RequestText(str):
    """A str, and the spans of it that a request wrote, in order and apart. The template wrote the rest."""

    __slots__ = ("spans",)
    spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: Iterable[Span] | None = None) -> "RequestText":
        """`spans` None: the request wrote all of it."""
        made = super().__new__(cls, str.__str__(text))
        made.spans = (((0, len(text)),) if text else ()) if spans is None else tuple(spans)
        return made

    def template_runs(self) -> Iterator[Span]:
        """Yield the spans between the request's, none of them empty."""
        edges = [0, *(edge for span in self.spans for edge in span), len(self)]
        return ((start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end)

    def __str__(self) -> "RequestText":
        return self

    def __add__(self, other: str) -> "RequestText":
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "RequestText":
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> "RequestText":
        return joined((self,) * index(times))

    __rmul__ = __mul__

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> "RequestText":
        if not isinstance(key, slice):
            place = index(key)
            return self._cut(place + len(self) if place < 0 else place, super().__getitem__(place))
        start, stop, step = key.indices(len(self))
        if step == 1:
            return self._cut(start, super().__getitem__(key))
        return joined([self[i] for i in range(start, stop, step)])

    def _cut(self, start: int, piece: str) -> "RequestText":
        """`piece`, which stands at `start`."""
        end = start + len(piece)
        return RequestText(
            piece, ((max(a, start) - start, min(b, end) - start) for a, b in self.spans if a < end and b > start)
        )

    def _in_turn(self, pieces: Iterable[str]) -> list[str]:
        """`pieces`, which stand one behind the other."""
        found: list[str] = []
        place = 0
        for piece in pieces:
            place = str.find(self, piece, place)
            found.append(self._cut(place, piece))
            place += len(piece)
        return found

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces = super().split(sep, maxsplit)
        return self._in_turn(pieces) if sep is None else self._separated(pieces, len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces = super().rsplit(sep, maxsplit)
        return self._in_turn(pieces) if sep is None else self._separated(pieces, len(sep))

    def _separated(self, pieces: Sequence[str], gap: int) -> list[str]:
        found: list[str] = []
        place = 0
        for piece in pieces:
            found.append(self._cut(place, piece))
            place += len(piece) + gap
        return found

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole, shown = super().splitlines(True), super().splitlines(keepends)
        ends = [0]
        for line in whole:
            ends.append(ends[-1] + len(line))
        return [self._cut(start, line) for start, line in zip(ends, shown, strict=False)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        first, second, third = self._separated(super().partition(sep), 0)
        return first, second, third

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        first, second, third = self._separated(super().rpartition(sep), 0)
        return first, second, third

    def lstrip(self, chars: str | None = None) -> "RequestText":
        kept = super().lstrip(chars)
        return self._cut(len(self) - len(kept), kept)

    def rstrip(self, chars: str | None = None) -> "RequestText":
        return self._cut(0, super().rstrip(chars))

    def strip(self, chars: str | None = None) -> "RequestText":
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> "RequestText":
        return self[len(prefix) :] if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> "RequestText":
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> "RequestText":
        return replaced(self, old, new, index(count))

    def join(self, texts: Iterable[str]) -> "RequestText":
        return joined(texts, self)


def _changed(name: str) -> Callable[..., str]:
    """A method of str whose text has the request's characters where the old one had them, if its length is the same."""
    change = getattr(str, name)

    def method(self: RequestText, *args: Any) -> RequestText:
        text = change(self, *args)
        return RequestText(text, self.spans if len(text) == len(self) else None)

    return method


def _made(name: str) -> Callable[..., str]:
    """A method of str whose text counts wholly as the request's."""
    make = getattr(str, name)
    return lambda self, *args, **kwargs: RequestText(make(self, *args, **kwargs))


for _name in ("capitalize", "casefold", "lower", "swapcase", "title", "upper"):
    setattr(RequestText, _name, _changed(_name))
for _name in ("center", "expandtabs", "ljust", "rjust", "zfill"):
    setattr(RequestText, _name, _made(_name))


class RequestMarkup(Markup):
    """A request's text that a template calls safe: jinja escapes the HTML of what is joined with it."""

    spans: tuple[Span, ...]

    def __new__(cls, text: Any = "", encoding: str | None = None, errors: str = "strict") -> "RequestMarkup":
        made = super().__new__(cls, text) if encoding is None else super().__new__(cls, text, encoding, errors)
        made.spans = text.spans if isinstance(text, RequestText | RequestMarkup) else ((0, len(made)),)
        return made

    def __str__(self) -> str:
        return RequestText(self, self.spans)


def is_of_request(value: Any) -> bool:
    """Return whether a text of a request is in the value, however deep."""
    if isinstance(value, dict):
        return any(is_of_request(key) or is_of_request(item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(is_of_request, value))
    return isinstance(value, RequestText | RequestMarkup)


def of_request(value: Any) -> Any:
    """Return the value, a str of it as one that a request wrote."""
    if not isinstance(value, str) or is_of_request(value):
        return value
    return RequestMarkup(value) if isinstance(value, Markup) else RequestText(value)


def added(left: str, right: str) -> str:
    """`left + right`, of which one is of a request: markup escapes the other, as it does in jinja."""
    if not isinstance(left, Markup) and not isinstance(right, Markup):
        return joined((left, right))
    return RequestMarkup(joined((_escaped(left), _escaped(right))))


def _escaped(text: str) -> str:
    escaped = str.__str__(Markup.escape(text))
    return RequestText(escaped, _spans(text) if len(escaped) == len(text) or not _spans(text) else None)


def joined(texts: Iterable[str], separator: str = "") -> RequestText:
    """Join texts as str.join does."""
    spans: list[Span] = []
    pieces: list[str] = []
    length = 0
    for text in texts:
        for piece in (separator, text) if pieces else (text,):
            for start, end in _spans(piece):
                if spans and spans[-1][1] == start + length:
                    spans[-1] = (spans[-1][0], end + length)
                else:
                    spans.append((start + length, end + length))
            pieces.append(piece)
            length += len(piece)
    return RequestText("".join(pieces), spans)


def replaced(text: str, old: str, new: str, count: int = -1) -> RequestText:
    """`text.replace(old, new, count)`, of texts of which one is of a request."""
    if not old:
        return RequestText(str.replace(text, old, new, count))
    return joined(text.split(old, count), new)


def _spans(text: str) -> tuple[Span, ...]:
    return text.spans if isinstance(text, RequestText | RequestMarkup) else ()
