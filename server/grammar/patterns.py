r"""Regular expressions of JSON schemas, in a form that llguidance 1.9.1 writes rightly between the quotes of JSON.

Its own translation (derivre's `json_quote`) lets a class that has all control characters, or all but the line break,
take `\"` and `\\`, whether or not the class has `"` and `\`: `^[^"]*$` takes a text with quotes. Of a class without
U+0001 it lists each escape by itself, and is right.
"""

import re
from collections.abc import Iterator

_MARK = re.compile(r"\\[pP](\{[^}]*\}|.)|\\.|\[", re.DOTALL)
_EDGE = re.compile(r"\\.|[\[\]]", re.DOTALL)
# What a class begins with or has in it where it may have all control characters.
_WIDE = re.compile(r"\[\^|\\[xuUpP]|\[:|[\x00-\x1f]")
_LEFT_OUT = r"[{}--\x01]"


def quotable(pattern: str) -> str:
    """Return the pattern with U+0001 left out of each class that may have all control characters.

    One with brackets that are not closed is returned as it is: the library says what is wrong with it.
    """
    try:
        return "".join(_pieces(pattern))
    except _UnclosedClass:
        return pattern


class _UnclosedClass(Exception):
    """A bracket is not closed."""


def _pieces(pattern: str) -> Iterator[str]:
    done = 0
    while (mark := _MARK.search(pattern, done)) is not None:
        yield pattern[done : mark.start()]
        done = _end_of_class(pattern, mark.start()) if mark[0] == "[" else mark.end()
        text = pattern[mark.start() : done]
        is_class = mark[0] == "[" or mark[1] is not None
        yield _LEFT_OUT.format(text) if is_class and _WIDE.search(text) else text
    yield pattern[done:]


def _end_of_class(pattern: str, start: int) -> int:
    """The place behind the class that begins at `start`, which may have others in it. Raises _UnclosedClass."""
    depth, place = 1, _behind_opening(pattern, start)
    while (edge := _EDGE.search(pattern, place)) is not None:
        place = edge.end()
        if edge[0] == "[":
            depth, place = depth + 1, _behind_opening(pattern, edge.start())
        elif edge[0] == "]":
            depth -= 1
            if not depth:
                return place
    raise _UnclosedClass


def _behind_opening(pattern: str, start: int) -> int:
    """The place behind what opens a class, and behind a first `]`, which is a character of it."""
    place = start + 1
    if pattern.startswith("^", place):
        place += 1
    return place + 1 if pattern.startswith("]", place) else place
