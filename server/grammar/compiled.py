"""Grammars as llguidance compiles them, with its limits: for the check of a request, and for the engine."""

import json
import re
import sys
from collections.abc import Sequence

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from server.errors import InvalidGrammar
from server.grammar.lark import is_gbnf
from server.protocol.messages import Grammar, GrammarKind

# An escape in a literal or a class of GBNF; other ones are as long as their first character.
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_ANSWER = "answer"
_MAX_MESSAGE = 300  # characters
# What one token of one answer may cost: about 7 ms for the lexer, 1 ms for the parser, and 20 MB of states in all.
_LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=20_000, verbose_errors=False
)


def compiled(
    tokens: llguidance.LLTokenizer, grammar: Grammar, token_ids: Sequence[int] | None = None
) -> llguidance.LLMatcher:
    """Compile a grammar for a tokenizer; releases the interpreter's lock. Raises InvalidGrammar.

    token_ids  in place of the grammar's own special tokens, for a tokenizer without them
    """
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        text = llguidance.LLMatcher.grammar_from_json_schema(grammar.text)
    elif grammar.kind is GrammarKind.REGEX:
        text = llguidance.LLMatcher.grammar_from_regex(grammar.text)
    else:
        text = llguidance.LLMatcher.grammar_from_lark(_with_tokens(grammar, token_ids))
    if grammar.before is not None:
        text = _behind(_with_tokens(grammar.before, token_ids), text)
    matcher = llguidance.LLMatcher(tokens, text, limits=_LIMITS, log_level=0)
    check(matcher)
    matcher.compute_bitmask()  # fails where no text matches at all; its states are shared by all copies
    check(matcher)
    return matcher


def _with_tokens(grammar: Grammar, token_ids: Sequence[int] | None) -> str:
    """Return the text of a grammar in Lark with the special tokens that it names."""
    ids = grammar.tokens if token_ids is None else token_ids[: len(grammar.tokens)]
    return _lark(grammar.text) + "".join(f"\ntoken_{index}: <[{token_id}]>" for index, token_id in enumerate(ids))


def _behind(before: str, answer: str) -> str:
    """Return the grammar of an answer behind the text of the rule `before`."""
    parts = json.loads(answer)["grammars"] if answer.lstrip().startswith("{") else [{"lark_grammar": answer}]
    parts[0]["name"] = _ANSWER
    return json.dumps({"grammars": [{"lark_grammar": f"start: before @{_ANSWER}\n{before}"}, *parts]})


def _lark(text: str) -> str:
    """Return a grammar in Lark's syntax. Raises InvalidGrammar for GBNF that is malformed."""
    if not is_gbnf(text):
        return text
    try:
        return str(gbnf_to_lark(_GBNF_ESCAPE.sub(_character, text)))
    except InvalidGrammar:
        raise
    except Exception as error:  # the library raises nothing more exact
        raise InvalidGrammar("The GBNF grammar is malformed.") from error


def _character(escape: re.Match[str]) -> str:
    r"""Return what an escape stands for, as \x41 where it could mean something to a class or a literal.

    llguidance 1.9.1 drops the zeros of \u00e9 and \U0001F600, so that its own lexer refuses them.
    """
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code > sys.maxunicode or 0xD800 <= code < 0xE000:
        raise InvalidGrammar(f"The GBNF grammar has {escape[0]}, which is no character.")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def check(matcher: llguidance.LLMatcher) -> None:
    """Raise InvalidGrammar where a matcher can go no further."""
    if not matcher.is_error():
        return
    found = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:_MAX_MESSAGE]
    reason = "no text matches it" if "NoExtension" in found else found.encode("ascii", "backslashreplace").decode()
    raise InvalidGrammar(f"The grammar cannot be followed: {reason}.")


class ByteTokens:
    """A tokenizer whose tokens are the 256 bytes, an end, and some special tokens: enough to check a grammar without
    a model.
    """

    eos_token_id = 256
    bos_token_id = None
    others = tuple(range(257, 257 + 32))  # no form of calls and no reasoning has more marks
    tokens = (*(bytes([value]) for value in range(256)), b"<end>", *(b"<%d>" % value for value in others))
    special_token_ids = (256, *others)

    def __call__(self, text: bytes | str) -> list[int]:
        return [*(text if isinstance(text, bytes) else text.encode())]


def byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()), slices=[])
