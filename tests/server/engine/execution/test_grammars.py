"""A real engine on the demo model: what its answers are under grammars, and how they end."""

import json
from pathlib import Path

import pytest
from built_engine import built_engine
from graph_session import Session

from qualification.decision.decision import Policy
from server.engine.scheduling.engine import Engine
from server.errors import InvalidGrammar
from server.grammar.compiled import byte_tokenizer, compiled
from server.grammar.schema import schema_text
from server.protocol.messages import FinishReason, Grammar, GrammarKind, TokenDelta
from server.settings import DeviceChoice, Settings
from server.text.tokenizer import Tokenizer

DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{2,40}")
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
        ({"grammar": DIGITS, "min_tokens": 12}, range(12, 41), FinishReason.STOP),  # counted in tokens, here a digit
        ({"grammar": DIGITS, "ignore_eos": True}, range(40, 41), FinishReason.COMPLETE),
        ({"grammar": Grammar(GrammarKind.REGEX, "[0-9]{3}"), "min_tokens": 50}, range(3, 4), FinishReason.COMPLETE),
        ({"grammar": DIGITS, "max_tokens": 1}, range(1, 4), FinishReason.LENGTH),
        ({"grammar": DIGITS, "repetition_penalty": 5.0}, range(2, 41), FinishReason.STOP),
    ],
)
def test_end_of_a_grammar_beside_other_limits(
    session: Session, tokenizer: Tokenizer, sampling: dict[str, object], length: range, reason: FinishReason
) -> None:
    session.submit("r", tokenizer.encode(PROMPT), **{"max_tokens": 100, "temperature": 1.5, "seed": 3, **sampling})
    session.drain()
    text = tokenizer.decode(session.tokens("r"))
    assert text.isdigit()
    assert len(text) in length
    assert end(session, "r").finish_reason in {reason, FinishReason.COMPLETE}


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
