"""Grammars as llguidance compiles them, with its limits: for the check of a request, and for the engine."""

import re

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from server.errors import InvalidGrammar
from server.protocol.messages import Grammar, GrammarKind

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w-]*[ \t]*::=", re.MULTILINE)
_MAX_MESSAGE = 300  # characters
# What one token of one answer may cost: about 7 ms for the lexer, 1 ms for the parser, and 20 MB of states in all.
_LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=20_000, verbose_errors=False
)


def compiled(tokens: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    """Compile a grammar for a tokenizer; releases the interpreter's lock. Raises InvalidGrammar."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        text = llguidance.LLMatcher.grammar_from_json_schema(grammar.text)
    elif grammar.kind is GrammarKind.REGEX:
        text = llguidance.LLMatcher.grammar_from_regex(grammar.text)
    else:
        text = llguidance.LLMatcher.grammar_from_lark(_lark(grammar.text))
    matcher = llguidance.LLMatcher(tokens, text, limits=_LIMITS, log_level=0)
    check(matcher)
    matcher.compute_bitmask()  # fails where no text matches at all; its states are shared by all copies
    check(matcher)
    return matcher


def _lark(text: str) -> str:
    """Return a grammar in Lark's syntax. Raises InvalidGrammar for GBNF that is malformed."""
    if not _GBNF_RULE.search(text):
        return text
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the library raises nothing more exact
        raise InvalidGrammar("The GBNF grammar is malformed.") from error


def check(matcher: llguidance.LLMatcher) -> None:
    """Raise InvalidGrammar where a matcher can go no further."""
    if not matcher.is_error():
        return
    found = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:_MAX_MESSAGE]
    reason = "no text matches it" if "NoExtension" in found else found.encode("ascii", "backslashreplace").decode()
    raise InvalidGrammar(f"The grammar cannot be followed: {reason}.")


class ByteTokens:
    """A tokenizer whose tokens are the 256 bytes and an end: enough to check a grammar without a model."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return [*(text if isinstance(text, bytes) else text.encode())]


def byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()), slices=[])
