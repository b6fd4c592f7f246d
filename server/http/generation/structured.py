"""The grammar that a request's fields ask for: OpenAI's, vLLM's older and newer ones, and SGLang's."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from server.edge.redact import plain_name, redacted
from server.errors import InvalidJson, InvalidValue, UnknownField, UnsupportedField
from server.grammar.requested import choice_grammar, json_grammar, lark_grammar, regex_grammar
from server.http.common.json_body import parse_json
from server.protocol.messages import Grammar

_ANY_OBJECT = {"type": "object"}
# Fields of others that hold one thing each, by its name in structured_outputs: vLLM's older ones and SGLang's.
SINGLE_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
_FORMAT = "response_format"
_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
# vLLM's options of structured_outputs that are not implemented, with the value that asks for nothing.
_NEUTRAL = {
    "disable_additional_properties": False,
    "disable_any_whitespace": False,
    "disable_fallback": False,
    "whitespace_pattern": None,
    "structural_tag": None,
}


def grammar_of(
    response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None, single: Mapping[str, Any]
) -> Grammar | None:
    """Return the one grammar that is asked for; None where none is.

    single  those of SINGLE_FIELDS that are given, by their names
    Raises InvalidValue where there are several different ones, or a value is of a wrong type, UnsupportedField for a
    keyword of a schema that would not bind the answer.
    """
    asked: list[Grammar] = []
    if response_format is not None:
        asked += _of_format(response_format)
    if structured is not None:
        asked += _of_structured(structured)
    asked += [_MAKERS[SINGLE_FIELDS[name]](value, name) for name, value in single.items()]
    if not asked:
        return None
    first, *others = asked
    # guidance's client sends one grammar as guided_grammar and as structured_outputs, for older and newer vLLM
    second = next((it for it in others if msgspec.structs.replace(it, param=first.param) != first), None)
    if second is not None:
        message = f"{first.param} and {second.param} both say what the answer must match; send one."
        raise InvalidValue(message, param=second.param)
    return first


def is_of_format(grammar: Grammar) -> bool:
    """Return whether a grammar is what `response_format` asks for."""
    return grammar.param.partition(".")[0] == _FORMAT


def _of_format(given: Mapping[str, Any]) -> list[Grammar]:
    fields = _without_nulls(given)
    kind = fields.get("type")
    if kind not in _FORMATS:
        raise InvalidValue(
            f"response_format.type must be {' or '.join(_FORMATS)}, got {redacted(kind)}.", param="response_format.type"
        )
    _check_names(fields, ("type", "json_schema") if kind == "json_schema" else ("type",), "response_format")
    if kind == "text":
        return []
    if kind == "json_object":
        return [json_grammar(_ANY_OBJECT, _FORMAT)]
    wanted = _without_nulls(_object(fields.get("json_schema"), "response_format.json_schema"))
    _check_names(wanted, _SCHEMA_FIELDS, "response_format.json_schema")
    param = "response_format.json_schema.schema"
    return [json_grammar(_schema(wanted.get("schema", {}), param), param)]


def _of_structured(fields: Mapping[str, Any]) -> list[Grammar]:
    given = _without_nulls(fields)
    for name, neutral in _NEUTRAL.items():
        if name in given and given.pop(name) != neutral:
            param = f"structured_outputs.{name}"
            raise UnsupportedField(f"The field {param!r} is not implemented.", param=param)
    if given.get("json_object") is False:
        del given["json_object"]
    _check_names(given, tuple(_MAKERS), "structured_outputs")
    if not given:
        raise InvalidValue("structured_outputs asks for nothing.", param="structured_outputs")
    return [_MAKERS[name](value, f"structured_outputs.{name}") for name, value in given.items()]


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _of_object(value: object, param: str) -> Grammar:
    if value is not True:
        raise InvalidValue(f"{param} must be true or false, got {redacted(value)}.", param=param)
    return json_grammar(_ANY_OBJECT, param)


def _of_json(value: object, param: str) -> Grammar:
    if isinstance(value, str):  # as vLLM takes it, too
        try:
            value = parse_json(_text(value, param).encode())
        except InvalidJson as error:
            raise InvalidValue(f"{param} must be a JSON schema: {error.message}", param=param) from error
    return json_grammar(_schema(value, param), param)


def _of_regex(value: object, param: str) -> Grammar:
    return regex_grammar(_text(value, param), param)


def _of_grammar(value: object, param: str) -> Grammar:
    return lark_grammar(_text(value, param), param)


def _of_choice(value: object, param: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(it, str) and it for it in value):
        raise InvalidValue(f"{param} must be an array of strings that are not empty.", param=param)
    return choice_grammar([_text(it, param) for it in value], param)


_MAKERS: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": _of_json,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
    "json_object": _of_object,
}


def _schema(value: object, param: str) -> object:
    if not isinstance(value, dict | bool):
        raise InvalidValue(f"{param} must be a JSON schema, got {redacted(value)}.", param=param)
    return value


def _object(value: object, param: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValue(f"{param} must be an object, got {redacted(value)}.", param=param)
    return value


def _text(value: object, param: str) -> str:
    if not isinstance(value, str) or not value or not _is_utf8(value):
        raise InvalidValue(
            f"{param} must be a string of UTF-8 text that is not empty, got {redacted(value)}.", param=param
        )
    return value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_names(fields: Mapping[str, Any], known: tuple[str, ...], param: str) -> None:
    for name, value in fields.items():
        if name not in known and value is not None:
            field = f"{param}.{plain_name(name)}"
            raise UnknownField(f"The field {field!r} is unknown.", param=field)
