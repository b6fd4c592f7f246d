"""Texts of grammars as requests give them: llguidance's dialect of Lark, or GBNF."""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from server.errors import InvalidValue, UnsupportedField
from server.grammar.schema import OPTIONS, schema_text

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w-]*[ \t]*::=", re.MULTILINE)
# A temperature of one rule's tokens, which llguidance reads and leaves to whoever samples.
_RULE_TEMPERATURE = re.compile(r"^[ \t]*[?!]?\w+\[[^\]\n]*\btemperature\s*=", re.MULTILINE)
_SCHEMA = "%json"
# The beginning of a schema; before that what may spell one: a literal, a regular expression, a comment.
_TOKEN = re.compile(rf'"(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*|{_SCHEMA}\b\s*')


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is in the syntax of llama.cpp."""
    return _GBNF_RULE.search(text) is not None


def check_rules(text: str, param: str) -> None:
    """Raise UnsupportedField for a rule with a temperature of its own."""
    if _RULE_TEMPERATURE.search(text):
        message = (
            f"{param}: the temperature of a rule is not implemented; leave it out, and send the field temperature."
        )
        raise UnsupportedField(message, param=param)


def bind_schemas(text: str, param: str) -> str:
    """Return a grammar in Lark whose schemas (`%json`) bind as those of all other fields do.

    Raises InvalidValue for one that is no JSON, UnsupportedField for a keyword that would not bind the answer.
    """
    found, done, at = [], 0, 0
    while (token := _TOKEN.search(text, at)) is not None:
        at = token.end()
        if token[0].startswith(_SCHEMA):
            try:
                schema, end = _DECODER.raw_decode(text, at)
                found += [text[done:at], _bound(schema, param)]
            except (ValueError, RecursionError) as error:
                line = text.count("\n", 0, at) + 1
                what = "JSON" if isinstance(error, ValueError) else "a schema that is nested less deep"
                raise InvalidValue(
                    f"{param}: {what} must stand behind {_SCHEMA} in line {line}.", param=param
                ) from error
            done = at = end
    return "".join([*found, text[done:]])


def _bound(schema: Any, param: str) -> str:
    """Return the text of a schema; it may have llguidance's options, as guidance writes them."""
    if not isinstance(schema, dict) or OPTIONS not in schema:
        return schema_text(schema, param)
    rest = {name: value for name, value in schema.items() if name != OPTIONS}
    options = schema[OPTIONS]
    return schema_text(rest, param, options=options if isinstance(options, Mapping) else {})


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)


_DECODER = json.JSONDecoder(parse_constant=_no_number)
