"""Checks of grammars in processes of their own: verdicts, limits, and what hostile ones cost."""

import asyncio
import itertools
import re
from collections.abc import Iterator
from datetime import date

import pytest

from server.errors import InvalidGrammar
from server.grammar.checker import MAX_GRAMMAR_BYTES, GrammarChecker
from server.grammar.compiled import byte_tokenizer, compiled
from server.grammar.requested import choice_grammar, json_grammar, lark_grammar, regex_grammar
from server.protocol.messages import Grammar

MANY_PROPERTIES = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(2000)}}


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    made.close()


def reason(checker: GrammarChecker, grammar: Grammar) -> str:
    with pytest.raises(InvalidGrammar) as caught:
        asyncio.run(checker.check(grammar))
    assert caught.value.param == grammar.param
    return caught.value.message


def test_grammars_of_each_kind_pass(checker: GrammarChecker) -> None:
    for grammar in (
        json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}}, "p"),
        json_grammar(True, "p"),
        regex_grammar(r"\d{3}-\w+", "p"),
        choice_grammar(['a "b"', "ü\n", "c"], "p"),
        lark_grammar('start: "a" | start "b"', "p"),
        lark_grammar('root ::= "yes" | "no" [0-9]+', "p"),
    ):
        asyncio.run(checker.check(grammar))


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (regex_grammar("(unclosed", "p"), "unclosed group"),
        (regex_grammar("(?=a)b", "p"), "look-around"),
        (json_grammar({"$ref": "#"}, "p"), "no text matches"),
        (json_grammar(False, "p"), "schema is false"),
        (json_grammar({"type": "text"}, "p"), "Invalid type"),
        (json_grammar({"$ref": "http://localhost/x"}, "p"), "not present in a registry"),
        (json_grammar({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "p"), "oneOf"),
        (lark_grammar("start: other", "p"), "other"),
        (lark_grammar("root ::= (", "p"), "GBNF"),
        (regex_grammar("a" * (MAX_GRAMMAR_BYTES + 1), "p"), f"may have {MAX_GRAMMAR_BYTES} bytes"),
    ],
)
def test_grammar_that_cannot_bind_is_refused_with_the_reason(
    checker: GrammarChecker, grammar: Grammar, expected: str
) -> None:
    assert expected in reason(checker, grammar)


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"),
    [
        (r'root ::= "caf\u00e9"', ("café",), ("cafe", "caf")),
        (r'root ::= "caf\xe9" "\U0001F600"', ("café😀",), ("café",)),
        (r"root ::= [\U0001F600-\U0001F64F]+", ("😀", "🙏😀"), ("🚀", "")),
        (r"root ::= [\u0430-\u044f]{2,3}", ("да", "нет"), ("d", "д")),
        (r'root ::= "\u0022\u005c\x5C" [\u005d\x2d\u005E]', ('"\\\\]', '"\\\\-', '"\\\\^'), ('"\\\\a',)),
        (r'root ::= [^\x00-\x1f\u0022\\] "\\u0041\n"', ("a\\u0041\n",), ('"\\u0041\n', "aA\n")),
        ('root ::= "é" [я-ё]?  # "\\u00e9\n', ("é",), ("e",)),
    ],
)
def test_escapes_of_gbnf_stand_for_their_characters(
    grammar: str, taken: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    matcher = compiled(byte_tokenizer(), lark_grammar(grammar, "p"))
    for text in (*taken, *refused):
        copy = matcher.deep_copy()
        assert (copy.consume_tokens([*text.encode()]) and copy.is_accepting()) is (text in taken), text


@pytest.mark.parametrize("escape", [r"\ud83d", r"\U00110000", r"\UFFFFFFFF"])
def test_escape_of_no_character_is_named(escape: str) -> None:
    with pytest.raises(InvalidGrammar, match=re.escape(escape)):
        compiled(byte_tokenizer(), lark_grammar(f'root ::= "a{escape}"', "p"))


def test_dates_are_days_that_there_are() -> None:
    matcher = compiled(byte_tokenizer(), json_grammar({"type": "string", "format": "date"}, "p"))
    for year, month, day in itertools.product((0, 4, 1900, 2000, 2023, 9999), range(14), (0, 1, 28, 29, 30, 31, 32)):
        text = f"{year:04}-{month:02}-{day:02}"
        try:
            is_day = str(date.fromisoformat(text)) == text
        except ValueError:
            is_day = False
        copy = matcher.deep_copy()
        assert (copy.consume_tokens([*f'"{text}"'.encode()]) and copy.is_accepting()) is is_day, text


def test_grammar_that_takes_too_long_ends_its_process_only(checker: GrammarChecker) -> None:
    asyncio.run(checker.check(choice_grammar(["a"], "p")))
    checker.time_limit_s = 1e-4  # too short for 2,000 properties on any machine
    assert "longer than 0.0001 s" in reason(checker, json_grammar(MANY_PROPERTIES, "p"))
    checker.time_limit_s = 30.0
    asyncio.run(checker.check(choice_grammar(["a", "b"], "p")))


def test_event_loop_turns_while_a_grammar_is_checked(checker: GrammarChecker) -> None:
    async def num_turns() -> int:
        check = asyncio.create_task(checker.check(json_grammar(MANY_PROPERTIES, "p")))
        check.add_done_callback(lambda done: done.exception())  # whether it passes depends on the machine
        turns = 0
        while not check.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    assert asyncio.run(num_turns()) > 10  # one, if the loop were held until the verdict
