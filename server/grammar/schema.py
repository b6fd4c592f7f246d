"""JSON schemas of requests: which keywords bind an answer, and which are refused by name because they would not."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from server.errors import UnsupportedField
from server.grammar.numbers import InexactNumber, bind_numbers, has_long_multiple
from server.grammar.patterns import quotable

# What the library checks while an answer is written.
_BINDING = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        "type",
        "$ref",
    ]
)
# What says something about a schema and nothing about an answer. Names that begin with x- are of this kind, too.
_ANNOTATIONS = frozenset(
    [
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$schema",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
    ]
)
_FORMATS = frozenset(["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"])
OPTIONS = "x-guidance"  # by which a schema would change how it is read
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # items: a list up to draft 2019-09
# What says which other fields an object has, or that it has them.
_OPEN = ("additionalProperties", "patternProperties", "minProperties", "enum", "const")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
_SINGLE = ("additionalItems", "additionalProperties", "items")

# Annotations of JSON schema 2020-12 that the library does not read.
_LEFT_OUT = ("$dynamicAnchor", "$vocabulary", "contentEncoding", "contentMediaType", "contentSchema")

# Days that the library takes and that there are: of leap years 29 February too.
_YEAR = r"(\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})"
_LEAP_YEAR = r"(\d{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = rf"({_YEAR}-((0[13-9]|1[0-2])-\d{{2}}|02-([01]\d|2[0-8]))|{_LEAP_YEAR}-02-29)"
# Seconds that there are: a 60th only where days of UTC end. The library takes one in every minute.
_SECOND = r"((\d{2}:){2}[0-5]\d|23:59:60(\.\d+)?([Zz]|[+-]00:00)$)"
_TIMES = {"date": f"^{_DAY}$", "date-time": f"^{_DAY}[Tt ]{_SECOND}", "time": f"^{_SECOND}"}
_MOST_HOSTNAME = (
    253  # characters (RFC 1035, without the length bytes and the dot of the root); the library has no limit
)

_INEXACT = (
    "the answer would not keep its digits; whole numbers up to 9007199254740992 and decimals of 15 digits are kept, "
    "longer ones need the type string"
)
_LONG_MULTIPLE = "a common multiple of all of them is longer than 32 bits"

# Between two tokens of JSON: a space, or a new line and its indent. Weak models that may write more write little else.
WHITESPACE = r"\x20|\n(\x20{0,16}|\t{0,4})"
_OF_ALL: Mapping[str, Any] = {"whitespace_pattern": WHITESPACE}


def schema_text(schema: object, param: str, *, options: Mapping[str, Any] = _OF_ALL) -> str:
    """Return a schema with the options by which the library reads it. `param`: the field it is of.

    Raises UnsupportedField for a keyword or a format that would not bind the answer, and for an integer that the
    library would change.
    """
    schema = _changed(schema, _drop_neutral)
    for part, path in _parts(schema, ()):
        for name in part:
            is_extension = name.startswith("x-") and name != OPTIONS
            if name not in _BINDING and name not in _ANNOTATIONS and not is_extension:
                raise UnsupportedField(_refusal(f"the keyword '{_plain(name)}'", path, param), param=param)
        form = part.get("format")
        if isinstance(form, str) and form not in _FORMATS and _may_be_text(part.get("type")):
            raise UnsupportedField(_refusal(f"the format '{_plain(form)}'", path, param), param=param)
        try:
            bind_numbers(dict(part))
        except InexactNumber as error:
            what = f"the number {_plain(error.text)}"
            raise UnsupportedField(_refusal(what, path, param, _INEXACT), param=param) from error
    if _may_intersect(schema) and has_long_multiple([part.get("multipleOf") for part, _ in _parts(schema, ())]):
        raise UnsupportedField(_refusal("the keyword 'multipleOf'", (), param, _LONG_MULTIPLE), param=param)
    if schema is True:
        schema = {}
    if _may_close(schema):
        schema = _changed(schema, _close)
    schema = _changed(_changed(_changed(schema, _bind_patterns), _limit_format), bind_numbers)
    return json.dumps({OPTIONS: options, **schema} if isinstance(schema, dict) else schema)


def _may_intersect(schema: object) -> bool:
    """Return whether two schemas may bind one number: `multipleOf` of them becomes a common multiple."""
    parts = [part for part, _ in _parts(schema, ())]
    return any("allOf" in part or ("multipleOf" in part and part.keys() & {"anyOf", "oneOf", "$ref"}) for part in parts)


def _may_close(schema: object) -> bool:
    """Return whether an object of the schema may be closed: not where another schema could bind the object, too."""
    parts = [part for part, _ in _parts(schema, ())]
    composed = [part for part in parts if "anyOf" in part or "$ref" in part]
    return not any(name in part for part in parts for name in ("allOf", "oneOf")) and not any(
        name in part for part in composed for name in ("properties", "required", *_OPEN)
    )


def _changed(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """A copy of the schema in which `change` has changed every schema within it, the inner ones first."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in _LISTS:
        if isinstance(inner := schema.get(name), list):
            found[name] = [_changed(part, change) for part in inner]
    for name in _NAMED:
        if isinstance(inner := schema.get(name), dict):
            found[name] = {key: _changed(part, change) for key, part in inner.items()}
    for name in _SINGLE:
        if isinstance(inner := schema.get(name), dict):
            found[name] = _changed(inner, change)
    change(found)
    return found


def _close(schema: dict[str, Any]) -> None:
    """Let objects have no other fields than those that the schema names, unless it says something about others.

    What it takes then it took before, too. As vLLM with xgrammar does it: clients leave `additionalProperties` out
    (LiteLLM removes it where it is false), and weak models go on inventing fields.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    is_named = (
        isinstance(properties, dict)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    )
    if is_named and not any(name in schema for name in _OPEN):
        schema["additionalProperties"] = False


def _limit_format(schema: dict[str, Any]) -> None:
    """Let texts of a format be none that the library takes beyond it: days, seconds and long names of hosts."""
    form = schema.get("format")
    if not isinstance(form, str) or not _may_be_text(schema.get("type")):
        return
    if form in _TIMES:
        if "pattern" not in schema:
            schema["pattern"] = _TIMES[form]
        elif isinstance(schema.get("allOf", []), list):
            schema["allOf"] = [*schema.get("allOf", []), {"pattern": _TIMES[form]}]
    most = schema.get("maxLength", _MOST_HOSTNAME)
    if form == "hostname" and isinstance(most, int | float):
        schema["maxLength"] = min(most, _MOST_HOSTNAME)


def _bind_patterns(schema: dict[str, Any]) -> None:
    """Write regular expressions as the library binds them."""
    pattern, named = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        schema["pattern"] = quotable(pattern)
    if isinstance(named, dict):
        schema["patternProperties"] = {quotable(name): inner for name, inner in named.items()}


def _drop_neutral(schema: dict[str, Any]) -> None:
    """Leave out keywords that the library does not read where every value passes them."""
    for name in [name for name, value in schema.items() if name in _LEFT_OUT or _is_neutral(name, value, schema)]:
        del schema[name]


def _is_neutral(name: str, value: object, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword with this value, beside the others of its schema, takes every value."""
    match name:
        case "propertyNames":  # names are strings
            return _takes_all(value) or (
                isinstance(value, dict) and _may_be_text(value.get("type")) and _takes_all({**value, "type": None})
            )
        case "uniqueItems" | "nullable" | "not" | "$recursiveAnchor":
            return value is False
        case "unevaluatedProperties" | "unevaluatedItems" | "then" | "else":
            return _takes_all(value) or (name in ("then", "else") and "if" not in schema)
        case "if":
            return _takes_all(schema.get("then", True)) and _takes_all(schema.get("else", True))
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(it == [] or _takes_all(it) for it in value.values())
        case "contains" | "minContains" | "maxContains":
            return "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema)
    return False


def _takes_all(schema: object) -> bool:
    """Return whether a schema visibly takes every value: it has annotations alone."""
    if not isinstance(schema, dict):
        return schema is True
    return all(name in _ANNOTATIONS or (name == "type" and value is None) for name, value in schema.items())


def _parts(schema: object, path: Sequence[str]) -> Iterator[tuple[Mapping[str, Any], Sequence[str]]]:
    """Every schema within a schema, itself first, and where it stands. What is no schema is the library's to refuse."""
    if not isinstance(schema, dict):
        return
    yield schema, path
    for name in _LISTS:
        if isinstance(found := schema.get(name), list):
            for index, part in enumerate(found):
                yield from _parts(part, (*path, name, str(index)))
    for name in _NAMED:
        if isinstance(found := schema.get(name), dict):
            for key, part in found.items():
                yield from _parts(part, (*path, name, key))
    for name in _SINGLE:
        yield from _parts(schema.get(name), (*path, name))


def _may_be_text(kind: object) -> bool:
    """Return whether a schema of this `type` takes strings, which alone the formats bind."""
    return kind is None or kind == "string" or (isinstance(kind, list) and "string" in kind)


def _refusal(what: str, path: Sequence[str], param: str, reason: str = "it would not bind the answer") -> str:
    where = "".join(f"/{_plain(step)}" for step in path[:8])
    return f"{param}: {what}{f' at {where}' if where else ''} is not supported: {reason}."


def _plain(name: str) -> str:
    """A name as a client gave it: short, and of what every encoding and log can carry."""
    return name[:40].encode("ascii", "backslashreplace").decode()
