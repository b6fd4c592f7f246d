"""A call as a JSON object, `{"name": ..., "arguments": {...}}`, read while it grows."""

import json
from collections.abc import Callable, Iterator

from server.text.answer.deltas import ArgumentsText, CallStart, Delta
from server.text.answer.texts.values import is_json, json_value

_BLANK = " \t\n\r"


class CallObject:
    """Finds an object's end, its name, and the text of its arguments. `is_call` says whether all of it is right."""

    def __init__(
        self, argument_keys: tuple[str, ...], *, name_key: str = "name", may_lack_arguments: bool = False
    ) -> None:
        self._argument_keys = argument_keys
        self._name_key = name_key
        self._may_lack_arguments = may_lack_arguments
        self.is_wrong = False  # it begins like no object of names and values
        self.is_whole = False
        self.has_begun = False  # its start was given by `deltas`
        self._written: list[str] = []
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._string: list[str] = []  # the last one at the top, with its quotes
        self._key: str | None = None  # of the value that is read; None between values
        self._name: str | None = None
        self._has_arguments = False  # all of them
        self._new: list[str] = []  # text of the arguments, not given yet
        self._is_object: bool | None = None  # whether the arguments begin as one; others are given when they are whole
        self._given: list[str] = []  # text of the arguments that `deltas` has given
        self._blank = ""  # at its end

    @property
    def name(self) -> str | None:
        """The name of the call, as soon as all of it is written."""
        return self._name

    @property
    def is_in_string(self) -> bool:
        return self._in_string and not self.is_wrong

    @property
    def has_whole_arguments(self) -> bool:
        """Return whether all arguments were given, whatever the object lacks behind them."""
        return self.has_begun and is_json("".join(self._given))

    @property
    def written(self) -> str:
        return "".join(self._written)

    def feed(self, text: str) -> str:
        """Read on, and return what stands behind the object."""
        for i, char in enumerate(text):
            self._take(char)
            if self.is_wrong or self.is_whole:
                self._written.append(text[: i + 1])
                return text[i + 1 :]
        self._written.append(text)
        return ""

    def is_call(self) -> bool:
        """Return whether the object is whole, valid JSON, and has what a call needs."""
        if not self.is_whole:
            return False
        try:
            value = json_value(self.written)
            name = value[self._name_key]
            name.encode()
        except (ValueError, KeyError, AttributeError, RecursionError):
            return False
        return self._may_lack_arguments or any(key in value for key in self._argument_keys)

    def deltas(self, start: Callable[[str], CallStart], arguments: Callable[[str], ArgumentsText]) -> Iterator[Delta]:
        """Return what is certain: the start of the call once its name and arguments have begun, then the arguments."""
        has_arguments = self._has_arguments or (bool(self._is_object) and bool(self._new))
        if self._name is None or not (has_arguments or self.has_begun or (self.is_whole and self._may_lack_arguments)):
            return
        if not self.has_begun:
            self.has_begun = True
            yield start(self._name)
        text = "".join(self._new)
        self._new = []
        self._given.append(text)
        if text:
            yield arguments(text)
        elif self.is_whole and not self._has_arguments:
            self._given.append("{}")
            yield arguments("{}")

    def _take(self, char: str) -> None:
        if self._in_string:
            self._take_in_string(char)
        elif self._depth == 0:
            if char == "{":
                self._depth = 1
            elif char not in _BLANK:
                self.is_wrong = True
        elif char == '"':
            self._in_string = True
            if self._depth == 1:
                self._string = [char]
            self._argument(char)
        elif self._depth == 1:
            self._take_at_top(char)
        else:
            if char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            self._argument(char)

    def _take_in_string(self, char: str) -> None:
        if self._depth == 1:
            self._string.append(char)
        self._argument(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1 and self._key == self._name_key:
                self._name = _text(self._string)

    def _take_at_top(self, char: str) -> None:
        if char == ":" and self._key is None:
            self._key = _text(self._string)
            self._string = []
        elif char in ",}":
            if self._is_arguments:
                self._end_arguments()
                if self.is_wrong:
                    return
            self._key = None
            self._string = []
            if char == "}":
                self._depth = 0
                self.is_whole = True
        elif self._key is None:
            self.is_wrong |= char not in _BLANK  # a name must stand here, or a colon behind it
        else:
            if char in "{[":
                self._depth += 1
            self._argument(char)

    def _end_arguments(self) -> None:
        """Take arguments that are no object for what they mean: null for none, a string for the object in it."""
        self._has_arguments = True
        self._blank = ""
        if self._is_object:
            return
        try:
            value = json_value("".join(self._new))
            if value is None or (isinstance(value, str) and not value.strip()):
                self._new = ["{}"]
            elif isinstance(value, str) and isinstance(json_value(value), dict):
                value.encode()  # an escape may stand for half a surrogate pair
                self._new = [value.strip()]
            else:
                self.is_wrong = True
        except (ValueError, RecursionError):
            self.is_wrong = True
        if self.is_wrong:  # none of them is given
            self._has_arguments = False
            self._new = []

    @property
    def _is_arguments(self) -> bool:
        return self._key in self._argument_keys and not self._has_arguments

    def _argument(self, char: str) -> None:
        if not self._is_arguments:
            return
        if char in _BLANK and not self._in_string:
            if self._new or self.has_begun:
                self._blank += char
            return
        if self._is_object is None:
            self._is_object = char == "{"
        self._new.append(self._blank + char)
        self._blank = ""


def _text(string: list[str]) -> str | None:
    try:
        value = json.loads("".join(string))
        value.encode()
    except (ValueError, AttributeError):
        return None
    return str(value)
