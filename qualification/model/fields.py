"""Reading config.json: every field is checked, and a wrong one is named with what was expected and what was found."""

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

_MAX_SHOWN_CHARS = 200  # of a value in a message
MAX_INTEGER = 2**31 - 1  # of a size in config.json


class ModelConfigError(ValueError):
    """config.json lacks a field, or holds a value that is wrong or not supported."""


class Fields:
    """The fields of one JSON object. A field that is null counts as missing. Every method raises ModelConfigError."""

    def __init__(self, values: Mapping[str, object], source: str, written: Mapping[str, str] | None = None) -> None:
        self._values = values
        self.source = source  # the file, for messages
        self._written = written or {}  # name -> how the file has it, where that is another one

    def named(self, **written: str) -> "Fields":
        """The same fields, some read by the names of other families: name=how the file has it, as messages do."""
        others = {name: it for name, it in self._values.items() if name not in written}
        found = {name: self._values[it] for name, it in written.items() if it in self._values}
        return Fields({**others, **found}, self.source, {**self._written, **written})

    def or_else(self, **missing: object) -> "Fields":
        """The same fields, and for those that are missing or null what the family's class in transformers has."""
        given = {name: value for name, value in self._values.items() if value is not None or name not in missing}
        return Fields({**missing, **given}, self.source, self._written)

    def where_absent(self, **absent: object) -> "Fields":
        """The same fields, and what the class has for those that are absent; null stays, where the class reads it."""
        return Fields({**absent, **self._values}, self.source, self._written)

    def changed(self, **others: object) -> "Fields":
        """The same fields, with others in the place of those of the same names."""
        return Fields({**self._values, **others}, self.source, self._written)

    def refuse(self, name: str, expected: str) -> NoReturn:
        found = repr(self._values[name])[:_MAX_SHOWN_CHARS] if name in self._values else "nothing"
        raise ModelConfigError(f"{self.source}: {self._written.get(name, name)} must be {expected}, found {found}")

    def integer(self, name: str, default: int | None = None, *, most: int = MAX_INTEGER) -> int:
        """A positive integer up to `most`."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(name, "a positive integer")
        self._check_size(name, value, most)
        return value

    def integers(self, name: str, length: int, missing: int, *, most: int = MAX_INTEGER) -> tuple[int, ...]:
        """That many positive integers up to `most`: a list of them, or one for all; `missing` where there is none."""
        value = self._value(name, missing)
        values: list[Any] = value if isinstance(value, list) else [value] * length
        if len(values) != length or not all(type(item) is int and item >= 1 for item in values):
            self.refuse(name, f"a positive integer, or a list of {length}")
        self._check_size(name, max(values), most)
        return tuple(values)

    def integer_or_none(self, name: str, missing: int | None) -> int | None:
        """A positive integer, None where the field is null, `missing` where there is none."""
        return self.integer(name) if self.has(name) else None if name in self._values else missing

    def count(self, name: str, default: int) -> int:
        """An integer from 0 on."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.refuse(name, "an integer from 0 on")
        self._check_size(name, value, MAX_INTEGER)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value: Any = self._value(name, default)
        if not _is_positive(value):
            self.refuse(name, "a positive number")
        return float(value)

    def number_or_none(self, name: str, missing: float | None) -> float | None:
        """A positive number, None where the field is null, `missing` where there is none."""
        return self.number(name) if self.has(name) else None if name in self._values else missing

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of that many positive numbers."""
        value = self._value(name, None)
        if not isinstance(value, list) or len(value) != length or not all(_is_positive(item) for item in value):
            self.refuse(name, f"a list of {length} positive numbers")
        return tuple(map(float, value))

    def indices(self, name: str, length: int) -> frozenset[int]:
        """A list of integers in [0, length), empty where there is none."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < length for item in value):
            self.refuse(name, f"a list of integers in [0, {length})")
        return frozenset(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return the ids of a field that is None, one id or a list of ids below vocab_size."""
        value = self._value(name, None)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size for token in ids):
            self.refuse(name, f"a token id below vocab_size ({vocab_size}) or a list of them")
        return tuple(ids)

    def choice(self, name: str, supported: tuple[str, ...], default: str | None = None) -> str:
        """One of the supported strings."""
        value = self._value(name, default)
        if value not in supported:
            self.refuse(name, f"one of {', '.join(supported)}")
        return str(value)

    def choices(self, name: str, supported: tuple[str, ...], length: int) -> tuple[str, ...]:
        """A list of that many of the supported strings."""
        value = self._value(name, None)
        if not isinstance(value, list) or len(value) != length or any(item not in supported for item in value):
            self.refuse(name, f"a list of {length} of {', '.join(supported)}")
        return tuple(value)

    def absent(self, name: str, why: str) -> None:
        """Refuse a field that would change the model in a way that is not implemented."""
        if self._value(name, None) is not None:
            self.refuse(name, f"absent ({why})")

    def only(self, *names: str) -> None:
        """Refuse every field but these."""
        for name in self._values.keys() - set(names):
            self.refuse(name, f"absent (only {' and '.join(names)} are read here)")

    def has(self, name: str) -> bool:
        return self._value(name, None) is not None

    def given(self, name: str) -> object:
        """Return the value as it is, None where there is none: for a kind of value that no other method takes."""
        return self._value(name, None)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all fields, in their order."""
        return tuple(self._values)

    @property
    def is_empty(self) -> bool:
        return not self._values

    def section(self, name: str) -> "Fields | None":
        """An object within this one."""
        value = self._value(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return Fields(value, f"{self.source}, {name}")

    def sections(self, name: str, length: int) -> "list[Fields]":
        """A list of that many objects within this one."""
        values = self._value(name, None)
        if not isinstance(values, list) or len(values) != length or not all(isinstance(it, dict) for it in values):
            self.refuse(name, f"a list of {length} objects")
        return [Fields(value, f"{self.source}, {name}[{index}]") for index, value in enumerate(values)]

    def _check_size(self, name: str, value: int, most: int) -> None:
        if value > most:
            self.refuse(name, f"at most {most}")

    def _value(self, name: str, default: object) -> object:
        value = self._values.get(name)
        return default if value is None else value


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
