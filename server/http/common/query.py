"""The query of a path: what stands behind its question mark, each name known or refused."""

from collections.abc import Collection
from typing import Any

from fastapi import Request

from server.errors import InvalidValue, UnknownField


class Query:
    """Parameters of a request. Every method raises InvalidValue for a value that is none of those it may be."""

    def __init__(self, request: Request, known: Collection[str]) -> None:
        """Raises UnknownField for a name that is not among `known`."""
        self._params = request.query_params
        for name in self._params:
            if name not in known:
                message = f"The parameter {name[:64]!a} is unknown here; there are {', '.join(sorted(known))}."
                raise UnknownField(message, param=name[:64])

    def text(self, name: str) -> str | None:
        values = self._params.getlist(name)
        if len(values) > 1:
            raise InvalidValue(f"{name}: one value is taken, {len(values)} were sent.", param=name)
        return values[0] if values else None

    def choice(self, name: str, allowed: Collection[str]) -> str | None:
        """Return the value, one of `allowed`."""
        value = self.text(name)
        if value is not None:
            _check_choice(name, value, allowed)
        return value

    def choices(self, name: str, allowed: Collection[str]) -> list[str]:
        """Return all values of a name that may come several times."""
        values = self._params.getlist(name)
        for value in values:
            _check_choice(name, value, allowed)
        return values

    def number(self, name: str, *, maximum: int, default: int) -> int:
        """Return a number from 1 to `maximum`."""
        value = self.text(name)
        if value is None:
            return default
        number = int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0
        if not 1 <= number <= maximum:
            message = f"{name}: must be a whole number from 1 to {maximum}, not {value[:32]!a}."
            raise InvalidValue(message, param=name)
        return number


def _check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise InvalidValue(f"{name}: must be {' or '.join(sorted(allowed))}, not {value[:32]!a}.", param=name)


def parameter(name: str, description: str, schema: dict[str, Any], *, place: str = "query") -> dict[str, Any]:
    """A parameter as the document has it; `place` is "query" or "header"."""
    return {"name": name, "in": place, "required": False, "description": description, "schema": schema}
