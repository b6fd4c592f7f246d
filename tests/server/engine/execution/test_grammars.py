"""A real engine on the demo model: what its answers are under grammars, and how they end."""

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from qualification.decision.decision import Policy
from server.engine.scheduling.engine import Engine
from server.errors import InvalidGrammar
from server.grammar.compiled import byte_tokenizer, compiled
from server.grammar.schema import schema_text
from server.protocol.messages import FinishReason, Fork, Grammar, GrammarKind, TokenDelta
from server.settings import DeviceChoice, Settings
from server.text.tokenizer import Tokenizer
from support.engine.built_engine import built_engine
from support.engine.graph_session import Session

DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{2,40}")
STOP_ID = 0
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(Settings().model))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    cache = str(tmp_path_factory.mktemp("cache"))
    settings = Settings(device=DeviceChoice.CPU, on_unproven=Policy.DEGRADE, cache_dir=cache, max_num_seqs=4)
    return built_engine(settings).engine


@pytest.fixture
def session(engine: Engine) -> Session:
    return Session(engine)


def end(session: Session, name: str) -> TokenDelta:
    ends = [delta for output in session.outputs for delta in output.deltas if delta.request_id == name]
    return next(delta for delta in ends if delta.finish_reason is not None)


def test_answers_match_their_grammars(session: Session, tokenizer: Tokenizer) -> None:
    """One of them has no grammar: its tokens are those that it has alone."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    prompt = tokenizer.encode(PROMPT)
    session.submit("alone", prompt, max_tokens=30)
    session.drain()
    session.submit("free", prompt, max_tokens=30)
    session.submit("json", prompt, grammar=Grammar(GrammarKind.JSON_SCHEMA, schema_text(schema, "s")), max_tokens=200)
    session.submit("regex", prompt, grammar=DIGITS, temperature=1.0, max_tokens=200)
    session.submit("lark", prompt, grammar=Grammar(GrammarKind.LARK, 'start: "yes" | "no"'), max_tokens=200)
    session.drain()
    assert session.tokens("free") == session.tokens("alone")
    assert json.loads(tokenizer.decode(session.tokens("json"))).keys() == {"name", "age"}
    assert tokenizer.decode(session.tokens("regex")).isdigit()
    assert tokenizer.decode(session.tokens("lark")) in ("yes", "no")
    assert end(session, "json").finish_reason is FinishReason.COMPLETE
    assert end(session, "lark").finish_reason is FinishReason.COMPLETE


@pytest.mark.parametrize(
    ("sampling", "length", "reason"),
    [
        ({"grammar": DIGITS, "min_tokens": 12}, 12, FinishReason.STOP),  # counted in tokens, here a digit
        ({"grammar": DIGITS}, 2, FinishReason.STOP),
        ({"grammar": DIGITS, "ignore_eos": True}, 40, FinishReason.COMPLETE),
        ({"grammar": DIGITS, "ignore_eos": True, "min_tokens": 50}, 40, FinishReason.COMPLETE),
        ({"grammar": Grammar(GrammarKind.REGEX, "[0-9]{3}"), "min_tokens": 50}, 3, FinishReason.COMPLETE),
        ({"grammar": DIGITS, "max_tokens": 1}, 1, FinishReason.LENGTH),
    ],
)
def test_end_of_a_grammar_beside_other_limits(
    session: Session, tokenizer: Tokenizer, sampling: dict[str, Any], length: int, reason: FinishReason
) -> None:
    """The model would end each answer at once: its end token is by far the likeliest."""
    digits = [token_id for digit in "0123456789" for token_id in tokenizer.encode(digit, add_special_tokens=False)]
    assert len(digits) == 10
    bias = (*[(token_id, 50.0) for token_id in digits], (STOP_ID, 90.0))
    session.submit("r", tokenizer.encode(PROMPT), **{"max_tokens": 100, "logit_bias": bias, **sampling})
    session.drain()
    tokens = session.tokens("r")
    assert set(tokens) <= {*digits, STOP_ID}
    assert len(tokenizer.decode(tokens)) == length
    assert end(session, "r").finish_reason is reason


def test_stop_token_that_the_grammar_needs_ends_nothing(session: Session, tokenizer: Tokenizer) -> None:
    """Banned by min_tokens it would leave nothing."""
    (digit,) = tokenizer.encode("7", add_special_tokens=False)
    session.submit(
        "r", tokenizer.encode(PROMPT), grammar=Grammar(GrammarKind.REGEX, "7{5}"), min_tokens=3, stop_token_ids=(digit,)
    )
    session.drain()
    assert session.tokens("r") == [digit] * 3  # the third may end it
    assert end(session, "r").finish_reason is FinishReason.STOP


def test_each_of_n_answers_has_its_own_place_in_the_grammar(session: Session, tokenizer: Tokenizer) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{3}-[a-z]{4}!")
    forks = [Fork(f"r{index}", index) for index in range(1, 6)]  # more than run at once
    session.submit("r0", tokenizer.encode(PROMPT), grammar=grammar, temperature=1.5, seed=0, max_tokens=50, forks=forks)
    session.drain()
    texts = [tokenizer.decode(session.tokens(f"r{index}")) for index in range(6)]
    for index, text in enumerate(texts):
        assert re.fullmatch("[0-9]{3}-[a-z]{4}!", text), text
        assert end(session, f"r{index}").finish_reason is FinishReason.COMPLETE
    assert len(set(texts)) > 1


def limits_of(tokenizer: Tokenizer) -> dict[str, list[Any]]:
    """Values of fields that limit which tokens an answer may have; the first of each limits nothing."""
    ids = {text: tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("a", "b", "the", " the", "7")}
    grammars = [Grammar(GrammarKind.REGEX, "[ab]{2}"), Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')]
    grammars += [Grammar(GrammarKind.LARK, 'start: "the"'), Grammar(GrammarKind.REGEX, "7{1,9}")]
    return {
        "grammar": [None, *grammars],
        "allowed_token_ids": [(), (5,), ids["a"] + ids["7"], (*ids["a"], STOP_ID), ids["the"]],
        "bad_words": [(), (ids["the"],), (ids["a"],), (ids["7"] * 2,)],
        "logit_bias": [(), tuple((token_id, -100.0) for token_id in range(300))],
        "min_tokens": [0, 3],
        "stop_token_ids": [(), ids["a"], ids["7"]],
        "ignore_eos": [False, True],
        "temperature": [0.0, 1.0],
    }


def test_limits_that_leave_no_token_are_the_requests_fault(session: Session, tokenizer: Tokenizer) -> None:
    """Pairs of limits and random combinations of them, with up to three answers each."""
    limits, rng = limits_of(tokenizer), random.Random(1)
    pairs: list[dict[str, Any]] = []
    for (first, values), (second, others) in itertools.combinations(limits.items(), 2):
        pairs += [{first: value, second: other} for value in values[1:] for other in others[1:]]
    cases = rng.sample(pairs, 40) + [{name: rng.choice(values) for name, values in limits.items()} for _ in range(40)]
    for index, case in enumerate(cases):
        forks = [Fork(f"{index}.{number}", number) for number in range(rng.choice((1, 1, 1, 3)))]
        session.submit(f"{index}", tokenizer.encode(PROMPT), max_tokens=5, seed=7, forks=forks, **case)
    session.drain()
    ends = [delta for output in session.outputs for delta in output.deltas if delta.finish_reason is not None]
    assert {delta.error_code for delta in ends} == {None, "invalid_value"}
    assert session.total("num_nonfinite") == 0
    for delta in ends:
        case = cases[int(delta.request_id.partition(".")[0])]
        tokens, allowed = session.tokens(delta.request_id), case.get("allowed_token_ids")
        assert not allowed or {*tokens} <= {*allowed}
        assert not any(contains(tokens, word) for word in case.get("bad_words", ()))
        if delta.error_code is None:
            assert len(tokens) >= case.get("min_tokens", 0) or delta.finish_reason is FinishReason.COMPLETE
        else:
            assert delta.error_message is not None
            assert "token" in delta.error_message
    exhausted = [delta for delta in ends if "no token is left" in (delta.error_message or "")]
    assert len(exhausted) > 10


def contains(tokens: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(tokens[at : at + len(word)]) == word for at in range(len(tokens) - len(word) + 1))


def test_grammar_that_fails_in_the_engine_ends_its_answer_alone(session: Session, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    session.submit("bad", prompt, grammar=Grammar(GrammarKind.REGEX, "(unclosed"))
    session.submit("costly", prompt, grammar=Grammar(GrammarKind.REGEX, r"(\w{0,1000}\d{0,1000}){0,1000}x"))
    session.submit("free", prompt, max_tokens=5)
    session.drain()
    assert end(session, "bad").error_code == "invalid_grammar"
    assert end(session, "costly").error_code == "invalid_grammar"
    assert end(session, "free").finish_reason is FinishReason.LENGTH


def test_cancelled_request_whose_grammar_compiles_ends(session: Session, tokenizer: Tokenizer) -> None:
    session.submit("r", tokenizer.encode(PROMPT), grammar=DIGITS)
    session.engine.cancel("r")
    session.drain()
    assert end(session, "r").finish_reason is FinishReason.CANCELLED
    assert session.engine.num_waiting == 0


@pytest.mark.parametrize("text", ["(unclosed", "[^\\s\\S]", "(?=a)a"])
def test_grammar_that_no_text_matches_is_refused(text: str) -> None:
    with pytest.raises(InvalidGrammar):
        compiled(byte_tokenizer(), Grammar(GrammarKind.REGEX, text))
