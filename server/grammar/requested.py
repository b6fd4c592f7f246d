"""Grammars of what a request asks its answer to match. `param`: the field that it asks by."""

import json
import re

from server.errors import UnsupportedField
from server.grammar.schema import schema_text
from server.protocol.messages import Grammar, GrammarKind

# A temperature of one rule's tokens, which llguidance reads and leaves to whoever samples.
_RULE_TEMPERATURE = re.compile(r"^[ \t]*[?!]?\w+\[[^\]\n]*\btemperature\s*=", re.MULTILINE)


def json_grammar(schema: object, param: str) -> Grammar:
    """Return the grammar of JSON that a schema takes.

    Raises UnsupportedField for a keyword that would not bind the answer.
    """
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text(schema, param), param)


def regex_grammar(pattern: str, param: str) -> Grammar:
    """Return the grammar of a regular expression that the whole answer matches, in the syntax of Rust's regex."""
    return Grammar(GrammarKind.REGEX, pattern, param)


def choice_grammar(choices: list[str], param: str) -> Grammar:
    """Return the grammar of one of several texts."""
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(map(json.dumps, choices)), param)


def lark_grammar(text: str, param: str) -> Grammar:
    """Return the grammar of a text in llguidance's dialect of Lark, or in the GBNF of llama.cpp.

    Raises UnsupportedField for a rule with a temperature of its own.
    """
    if _RULE_TEMPERATURE.search(text):
        message = (
            f"{param}: the temperature of a rule is not implemented; leave it out, and send the field temperature."
        )
        raise UnsupportedField(message, param=param)
    return Grammar(GrammarKind.LARK, text, param)
