"""Grammars of what a request asks its answer to match. `param`: the field that it asks by."""

import json

from server.grammar.checker import MAX_GRAMMAR_BYTES
from server.grammar.lark import bind_schemas, check_rules, is_gbnf
from server.grammar.schema import schema_text
from server.protocol.messages import Grammar, GrammarKind


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

    Raises UnsupportedField for a rule with a temperature of its own, and for a keyword of a schema within it (`%json`)
    that would not bind the answer; InvalidValue for a schema that is no JSON.
    """
    check_rules(text, param)
    if len(text) <= MAX_GRAMMAR_BYTES and not is_gbnf(text):  # a longer one is refused by its size
        text = bind_schemas(text, param)
    return Grammar(GrammarKind.LARK, text, param)
