"""Values of arguments that a model has written as bare text, by the JSON schema of the tool; as vLLM reads them."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from server.text.answer.texts.literals import literal_json

_ALIASES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("arr", "list", "sequence"), "array"),
    "bool": "boolean",
    "dict": "object",
}
_WORDS = frozenset({"title", "description", "default", "examples"})  # about a schema: a reference's own win
_STRING = frozenset({"string"})
_OTHER_TYPES = frozenset({"null", "boolean", "integer", "number", "array", "object"})
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")  # as JSON has it
_MAX_SCHEMA_DEPTH = 32
_MAX_INLINED = 2000  # parts of a schema; what has more keeps its references


def inlined(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema whose `$ref`s within itself are replaced by what they name; recursive ones are left."""
    if "$defs" not in schema and "definitions" not in schema:
        return schema
    try:
        found = _Inlined(schema).of(schema, ())
    except RecursionError:
        return schema
    assert isinstance(found, dict)
    return {name: value for name, value in found.items() if name not in ("$defs", "definitions")} | (
        {name: schema[name] for name in ("$defs", "definitions") if name in schema and _has_ref(found)}
    )


class _Inlined:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _MAX_INLINED

    def of(self, part: Any, within: tuple[str, ...]) -> Any:
        """A part with what its references name. `within`: the references that it stands in."""
        if isinstance(part, list):
            return [self.of(it, within) for it in part]
        if not isinstance(part, Mapping):
            return part
        self._num_left -= 1
        name = part.get("$ref")
        if isinstance(name, str) and name not in within and self._num_left > 0:
            target = self._target(name)
            beside = {key: value for key, value in part.items() if key != "$ref"}
            if isinstance(target, Mapping) and not target.keys() & beside.keys() - _WORDS:
                return {**self.of(target, (*within, name)), **self.of(beside, within)}
        return {
            key: value if key in ("$defs", "definitions") else self.of(value, within) for key, value in part.items()
        }

    def _target(self, name: str) -> Any:
        steps = name.removeprefix("#/").split("/") if name.startswith("#/") else [name]
        found: Any = self._root
        for step in steps:
            found = found.get(step) if isinstance(found, Mapping) else None
        return found


def _has_ref(part: Any) -> bool:
    inner = part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
    return (isinstance(part, Mapping) and "$ref" in part) or any(map(_has_ref, inner))


def types_of(schema: object, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; a string where it does not say."""
    found = frozenset(_types(schema, depth))
    return found or frozenset({"string"})


def types_beside(schema: object, *, is_string: bool) -> frozenset[str]:
    """The types that a schema allows to a value of which the model says whether it is a string; any if it says none."""
    said = frozenset(_types(schema, 0))
    if not said:
        return _STRING if is_string else _OTHER_TYPES
    return (said & _STRING if is_string else said - _STRING) or said


def _types(schema: object, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH:
        return
    kind = schema.get("type")
    for name in [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else ():
        if isinstance(name, str):
            lower = name.strip().lower()
            yield _ALIASES.get(lower, lower)
    values = schema.get("enum")
    for value in values if isinstance(values, list) else ():
        yield _type_of(value)
    for choice in ("anyOf", "oneOf", "allOf"):
        schemas = schema.get(choice)
        for inner in schemas if isinstance(schemas, list) else ():
            yield from types_of(inner, depth + 1)


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON of a bare text: of the first type that fits it, else a string."""
    lower = text.strip().lower()
    if "null" in types and (text.lower() == "null" or (lower == "none" and "string" not in types)):
        return "null"
    if "integer" in types:
        try:
            return str(int(text))
        except ValueError:
            pass
    if "number" in types:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            if _NUMBER.fullmatch(text.strip()):
                return text.strip()  # with all of its digits: a float holds 17
            return json.dumps(number if number != int(number) else int(number))
    if "boolean" in types and lower in ("true", "1", "false", "0"):
        return "true" if lower in ("true", "1") else "false"
    if "string" in types and not types & {"object", "array"}:
        return json.dumps(text, ensure_ascii=False)
    value = _parsed(text)
    if value is _NOTHING and types & {"object", "array"} and lower.startswith(("{", "[", "(")):
        literal = literal_json(text)  # Seed-OSS's template writes them as Python does
        if literal is not None and _parsed(literal) is not _NOTHING:
            return literal
    is_wanted = value is not _NOTHING and ("string" not in types or isinstance(value, dict | list))
    return text.strip() if is_wanted else json.dumps(text, ensure_ascii=False)


_NOTHING = object()


def _parsed(text: str) -> Any:
    """The value of a JSON text, `_NOTHING` for any other and for numbers that JSON does not have."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return _NOTHING


def is_json(text: str) -> bool:
    """Return whether a text is JSON, which has no NaN and no Infinity."""
    try:
        json_value(text)
    except (ValueError, RecursionError):
        return False
    return True


def json_value(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, and RecursionError where it is nested too deeply."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number
