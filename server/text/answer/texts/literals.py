"""Python's literals as JSON: what models write that call tools as Python does.

JSON's own `true`, `false` and `null` are read, too, and a line break within a string. An unescaped quote within a
string is a part of it where no literal could end: chat templates write `'it's'`.
"""

import json
import math
import re
from collections.abc import Callable

_BLANK = re.compile(r"\s*")
_BARE = re.compile(r"[^\s,()\[\]{}:='\"]+")
_KEY = re.compile(r"[^\s,()\[\]{}='\"]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")  # as JSON has it
_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{1,3}|\n|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "/": "/"}
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_CLOSED = {"[": "]", "(": ")", "{": "}"}
_BEHIND = ",)]}:"  # what may stand behind a string
_MAX_DEPTH = 64


class NoLiteral(ValueError):
    """A text is no literal, or one that JSON has no value for."""


class Literals:
    """Reads literals from a text, from `at` on."""

    def __init__(self, text: str, at: int = 0) -> None:
        self._text = text
        self.at = at

    @property
    def is_at_end(self) -> bool:
        return self.at >= len(self._text)

    def takes(self, mark: str) -> bool:
        """Pass blanks, and the mark if it stands behind them."""
        self.at = _end_of(_BLANK, self._text, self.at)
        is_here = self._text.startswith(mark, self.at)
        self.at += len(mark) if is_here else 0
        return is_here

    def arguments(self, typed: Callable[[str, str], str]) -> str:
        """Return the JSON object of `KEY=VALUE, ...` up to a closing parenthesis. Raises NoLiteral.

        typed  makes of a key and the JSON of its value what is to stand there
        """
        fields: dict[str, str] = {}
        while not self.takes(")"):
            self.takes("")
            key = _KEY.match(self._text, self.at)
            if key is None:
                raise NoLiteral(self._text[self.at : self.at + 20])
            self.at = key.end()
            self._expect("=")
            fields[key[0]] = typed(key[0], self.value())
            if not self.takes(","):
                self._expect(")")
                break
        return _object(fields)

    def value(self, depth: int = 0) -> str:
        """Return the JSON of the literal that follows. Raises NoLiteral."""
        self.takes("")
        char = self._text[self.at : self.at + 1]
        if char in ("'", '"'):
            return json.dumps(self._string(char), ensure_ascii=False)
        if char in _CLOSED and depth < _MAX_DEPTH:
            self.at += 1
            return self._entries(depth) if char == "{" else self._items(_CLOSED[char], depth)
        bare = _BARE.match(self._text, self.at)
        if bare is None:
            raise NoLiteral(self._text[self.at : self.at + 20])
        self.at = bare.end()
        return _WORDS.get(bare[0]) or _number(bare[0])

    def _items(self, closing: str, depth: int) -> str:
        items: list[str] = []
        while not self.takes(closing):
            items.append(self.value(depth + 1))
            if not self.takes(","):
                self._expect(closing)
                break
        return f"[{', '.join(items)}]"

    def _entries(self, depth: int) -> str:
        fields: dict[str, str] = {}
        while not self.takes("}"):
            key = self.value(depth + 1)
            self._expect(":")
            fields[json.loads(key) if key.startswith('"') else key] = self.value(depth + 1)
            if not self.takes(","):
                self._expect("}")
                break
        return _object(fields)

    def _expect(self, mark: str) -> None:
        if not self.takes(mark):
            raise NoLiteral(self._text[self.at : self.at + 20])

    def _string(self, quote: str) -> str:
        end = end_of_string(self._text, self.at + 1, quote)
        if end is None:
            raise NoLiteral(self._text[self.at : self.at + 20])
        inside = self._text[self.at + 1 : end]
        self.at = end + 1
        return _unescaped(inside)


def end_of_string(text: str, at: int, quote: str) -> int | None:
    """Return where the closing quote stands, None where there is none. `at`: behind the opening quote."""
    for found in re.compile(rf"\\.|{quote}", re.DOTALL).finditer(text, at):
        if found[0] == quote:
            behind = _end_of(_BLANK, text, found.end())
            if behind >= len(text) or text[behind] in _BEHIND:
                return found.start()
    return None


def literal_json(text: str) -> str | None:
    """Return the JSON of a text that is one literal, None for any other."""
    reader = Literals(text)
    try:
        found = reader.value()
    except NoLiteral:
        return None
    reader.takes("")
    return found if reader.is_at_end else None


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _object(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in fields.items()) + "}"


def _number(text: str) -> str:
    """Return the JSON of a number, as it is written where JSON has it so. Raises NoLiteral."""
    try:
        number = float(text)
        if _NUMBER.fullmatch(text):
            return text
        if not math.isfinite(number):
            raise NoLiteral(text)
        return str(int(text)) if text.lstrip("+-").replace("_", "").isdigit() else repr(number)
    except ValueError as error:
        raise NoLiteral(text) from error


def _unescaped(text: str) -> str:
    """Return what a string's text means. Raises NoLiteral for half a surrogate pair, which UTF-8 has not."""
    if "\\" in text:
        text = _ESCAPE.sub(_meaning, text)
        text = _SURROGATES.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise NoLiteral("half a surrogate pair") from error
    return text


def _meaning(found: re.Match[str]) -> str:
    escape = found[1]
    if escape[0] in "uUx" and len(escape) > 1:
        code = int(escape[1:], 16)
        return chr(code) if code <= 0x10FFFF else found[0]
    if escape[0] in "01234567":
        return chr(int(escape, 8))
    return _ESCAPED.get(escape, escape if escape in "'\"\\" else found[0])
