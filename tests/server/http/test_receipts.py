"""Answers with a signed receipt: on every route, whole and streamed, and what is in it."""

import json
import logging
from base64 import b64decode
from collections.abc import Iterator
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import msgspec
import openai
import pytest

from qualification.canary.golden import SCHEMA, Golden, GoldenPrompt, load_golden, save_golden
from qualification.canary.receipts import LONGEST_PROMPT, judge_receipts, record_receipts
from qualification.canary.verdict import Outcome, Stage, Verdict
from qualification.common.exit_code import ExitCode
from qualification.load.discovery import client_of
from qualification.receipt.content import Content, digest_of_ids, digest_of_text
from qualification.receipt.given import Compared, check_given
from qualification.receipt.keys import public_key_of_text
from qualification.receipt.replay import ReplayServer, body_of
from qualification.receipt.signed import (
    Receipt,
    ReceiptError,
    check_consistent,
    check_signature,
    parse_receipt,
    receipt_of,
)
from qualification.receipt.verify import verify
from server.http.common.receipt_schema import SignedReceipt
from server.protocol.messages import AttestationReport, Grammar, LayersReport, LayersStatus, SamplingParams, ServedPath
from server.settings import ReasoningParser, ReceiptMode
from support.api.edge_fakes import END, READY, Script, Served, saying, served, with_model
from support.api.running_api import Running

USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 16},
}
CALLS = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
LOOK = {"name": "look", "parameters": {"type": "object"}}
DIGESTS = {"weights": "ab" * 32, "tokenizer": "cd" * 32}
PATHS = {"sdpa.math": ServedPath("0123abcd", None), "sdpa.cpu": ServedPath("4567cdef", "keys512")}


def serving(folder: Path, script: Script = saying("Hel", "lo"), **settings: object) -> Served:  # noqa: B008
    it = served(folder, script, **settings)
    layers = LayersReport(LayersStatus.PROVEN, "", at=11.5)
    it.engine.ready = msgspec.structs.replace(READY, paths=PATHS, layers=layers)
    it.engine.attestations.put(AttestationReport("start", "match", 12.5, 0.1, [], [], id="0af1"))
    return Served(with_model(it.services, digests=DIGESTS), it.engine)


def checked(it: Served, given: object) -> Receipt:
    """The receipt, whose form is the document's and whose signature is of a key that /version lists."""
    SignedReceipt.model_validate(given, strict=False)
    receipt = receipt_of(given)
    listed = it.get("/version").json()["receipt_keys"]
    check_signature(receipt, [public_key_of_text(key["public_key"]) for key in listed])
    check_consistent(receipt.content)
    return receipt


def last_object(response: httpx2.Response) -> dict[str, Any]:
    """The body, or the last event of a stream that is an object."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else response.json()
    return found


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_an_answer_has_its_receipt_at_its_end(folder: Path, route: str, is_stream: bool) -> None:
    it = serving(folder)
    body = BODIES[route] | {"receipt": True, "stream": is_stream, "temperature": 0.5}
    response = it.post(route, body)
    receipt = checked(it, last_object(response)["receipt"])
    assert response.text.count('"receipt"') == 1
    kept = parse_receipt(response.content)  # as a file of the whole answer, or of all events
    compared = Compared.NOTHING if is_stream else Compared.ALL
    assert (kept.signed, check_given(kept)) == (receipt.signed, compared)
    assert response.headers.get("x-hallmark-receipt") == (None if is_stream else f"sha256:{receipt.digest}")
    assert it.value("receipts_total") == 1
    content = receipt.content
    [(_, prompt_ids, sampling)] = it.engine.submitted
    [prompt], [answer] = content.prompts, content.answers
    assert (prompt.token_ids, answer.token_ids) == (prompt_ids, [*b"Hello", END])
    assert prompt.text_digest == digest_of_text(bytes(prompt_ids).decode())
    assert answer.text_digest == digest_of_text("Hello")
    assert (answer.finish_reason, answer.is_cut, answer.logprobs) == ("stop", False, None)
    assert answer.sampling.seed == str(sampling.seed)
    assert answer.sampling.temperature == "0.5"
    assert (content.route, content.model, content.server_version) == (route, "tiny", "1.2.3")
    assert (content.weights_digest, content.tokenizer_digest) == (DIGESTS["weights"], DIGESTS["tokenizer"])
    assert (content.matrix_digest, content.fingerprint) == ("abc123", READY.fingerprint)
    decisions = [(it.phase, it.path, it.status, it.order, it.source_digest) for it in content.decisions]
    assert decisions == [
        ("prefill", "sdpa.math", "provisional", None, "0123abcd"),
        ("decode", "sdpa.cpu", "proven", "keys512", "4567cdef"),
    ]
    assert content.attestation is not None
    assert (content.attestation.result, content.attestation.at) == ("match", 12)
    assert content.layers is not None
    assert (content.layers.result, content.layers.at) == ("proven", 11)
    assert not content.reproducible


@pytest.mark.parametrize("route", BODIES)
def test_an_altered_text_is_not_the_receipts(folder: Path, route: str) -> None:
    text = serving(folder).post(route, BODIES[route] | {"receipt": True}).text
    assert check_given(parse_receipt(text.encode())) is Compared.ALL
    with pytest.raises(ReceiptError, match="another text than choice 0"):
        check_given(parse_receipt(text.replace('"Hello"', '"Hallo"').encode()))
    alone = json.dumps(json.loads(text)["receipt"]).encode()
    assert check_given(parse_receipt(alone)) is Compared.NOTHING


def test_an_echo_is_told_from_the_answer(folder: Path) -> None:
    body = {"prompt": ["the prompt", "other"], "echo": True, "receipt": True}
    text = serving(folder).post("/v1/completions", body).text
    assert check_given(parse_receipt(text.encode())) is Compared.ALL
    with pytest.raises(ReceiptError, match="another text than choice 1"):
        check_given(parse_receipt(text.replace("otherHello", "othorHello").encode()))


@pytest.mark.parametrize(
    "fields", [{"prompt": [[97, 98], [99]]}, {"prompt": ["abc", "de"], "truncate_prompt_tokens": 1}]
)
def test_an_echo_of_what_has_no_text_of_its_own_is_told_too(folder: Path, fields: dict[str, object]) -> None:
    text = serving(folder).post("/v1/completions", {"echo": True, "receipt": True, **fields}).text
    assert check_given(parse_receipt(text.encode())) is Compared.ALL
    with pytest.raises(ReceiptError, match="another text than choice 0"):
        check_given(parse_receipt(text.replace("Hello", "Hallo").encode()))


def test_altered_calls_and_reasoning_are_not_the_receipts(folder: Path) -> None:
    it = serving(folder, saying("<think>so", "</think>", CALLS), reasoning_parser=ReasoningParser.THINK)
    tool = {"type": "function", "function": LOOK}
    text = it.post("/v1/chat/completions", {"messages": USER, "tools": [tool], "receipt": True}).text
    receipt = parse_receipt(text.encode())
    [answer] = receipt.content.answers
    assert None not in (answer.reasoning_digest, answer.calls_digest)
    assert check_given(receipt) is Compared.ALL
    for before, after, what in (("look", "kill", "call"), ('"so"', '"no"', "reasoning")):
        with pytest.raises(ReceiptError, match=f"another {what} than"):
            check_given(parse_receipt(text.replace(before, after).encode()))


def test_altered_calls_and_reasoning_of_a_response_are_not_the_receipts(folder: Path) -> None:
    it = serving(folder, saying("<think>so", "</think>", CALLS), reasoning_parser=ReasoningParser.THINK)
    body = {"input": "Hi", "tools": [{"type": "function", **LOOK}], "receipt": True, "store": False}
    text = it.post("/v1/responses", body).text
    assert check_given(parse_receipt(text.encode())) is Compared.ALL
    for before, after, what in ((r"\"it\"", r"\"me\"", "call"), ('"so"', '"no"', "reasoning")):
        assert before in text
        with pytest.raises(ReceiptError, match=f"another {what} than"):
            check_given(parse_receipt(text.replace(before, after).encode()))


def test_altered_thinking_is_not_the_receipts_and_calls_of_a_message_are_not_compared(folder: Path) -> None:
    it = serving(folder, saying("<think>so", "</think>", CALLS), reasoning_parser=ReasoningParser.THINK)
    tool = {"name": "look", "input_schema": {"type": "object"}}
    body = BODIES["/v1/messages"] | {"tools": [tool], "receipt": True, "thinking": {"type": "adaptive"}}
    text = it.post("/v1/messages", body).text
    assert check_given(parse_receipt(text.encode())) is Compared.TEXTS
    with pytest.raises(ReceiptError, match="another reasoning than"):
        check_given(parse_receipt(text.replace('"so"', '"no"').encode()))
    without = {**json.loads(text), "content": [{"type": "thinking", "thinking": "so", "signature": ""}]}
    with pytest.raises(ReceiptError, match="another call than"):
        check_given(parse_receipt(json.dumps(without).encode()))


@pytest.mark.parametrize("route", BODIES)
def test_an_answer_has_no_receipt_unasked(folder: Path, route: str) -> None:
    response = serving(folder).post(route, BODIES[route])
    assert "receipt" not in response.text
    assert "x-hallmark-receipt" not in response.headers


def test_receipts_come_always_where_the_server_says_so(folder: Path) -> None:
    it = serving(folder, receipts=ReceiptMode.ALWAYS)
    with Running(it) as running, httpx2.Client(base_url=running.url) as client:
        whole = client.post("/v1/completions", json={"prompt": "abc", "echo": True, "max_tokens": 0})
        assert "receipt" not in whole.json()  # it has no answer
        streamed = client.post("/v1/completions", json={"prompt": "abc", "stream": True})  # goes past the framework
        options = {"stream": True, "stream_options": {"include_usage": True}}
        counted = client.post("/v1/completions", json={"prompt": "abc", **options})
    assert counted.text.count('"receipt"') == 1
    assert last_object(counted)["usage"]["completion_tokens"] == 6  # the receipt is beside it
    assert receipt_of(last_object(counted)["receipt"]).content.answers[0].num_tokens == 6
    content = receipt_of(last_object(streamed)["receipt"]).content
    assert content.answers[0].token_ids == [*b"Hello", END]
    assert content.answers[0].text_digest == digest_of_text("Hello")


def test_a_receipt_that_cannot_be_given_is_refused_by_name(folder: Path) -> None:
    it = serving(folder, receipts=ReceiptMode.OFF)
    error = it.post("/v1/completions", {"prompt": "abc", "receipt": True}).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_field", "receipt")
    assert it.get("/version").json()["receipt_keys"] == []
    body = {"prompt": "abc", "echo": True, "max_tokens": 0, "receipt": True}
    error = serving(folder).post("/v1/completions", body).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "receipt")


def test_each_choice_has_its_own_seed_and_tokens(folder: Path) -> None:
    counts = count()
    it = serving(folder, lambda _: saying("abc"[next(counts)])([]))
    body = {"prompt": ["one", [1, 2]], "receipt": True, "seed": 2**63 - 1, "logprobs": 1}
    content = checked(it, it.post("/v1/completions", body).json()["receipt"]).content
    assert [(one.num_tokens, one.text_digest) for one in content.prompts] == [(3, digest_of_text("one")), (2, None)]
    assert [(one.prompt, one.token_ids) for one in content.answers] == [(0, [97, END]), (1, [98, END])]
    assert content.answers[0].logprobs is not None
    it = serving(folder)
    content = checked(
        it, it.post("/v1/completions", {"prompt": "ab", "n": 3, "receipt": True}).json()["receipt"]
    ).content
    seeds = [one.sampling.seed for one in content.answers]
    assert seeds == [str(sampling.seed) for _, _, sampling in it.engine.submitted]
    assert len(set(seeds)) == 3


def test_digests_alone_repeat_nothing_of_a_request(folder: Path) -> None:
    it = serving(folder, receipt_token_ids=False)
    asked = {
        "prompt": "abc",
        "receipt": True,
        "stop": "halt",
        "logprobs": 1,
        "logit_bias": {"99": -3},
        "bad_words": ["lo"],
    }
    response = it.post("/v1/completions", asked | {"guided_regex": "Hello"})
    content = checked(it, response.json()["receipt"]).content
    [prompt], [answer] = content.prompts, content.answers
    assert prompt.token_ids_digest == sha256(b"a\0\0\0b\0\0\0c\0\0\0").hexdigest()
    assert answer.token_ids_digest == digest_of_ids([*b"Hello", END])
    nothing = (prompt.token_ids, answer.token_ids, answer.logprobs, answer.sampling.seed, answer.sampling.bindings)
    assert nothing == (None,) * 5
    assert "halt" not in json.dumps(response.json()["receipt"])


def test_receipts_leave_no_text_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    serving(folder).post("/v1/completions", {"prompt": "secret-prompt", "receipt": True, "stop": "secret-stop"})
    texts = [record.getMessage() + repr(record.__dict__) for record in caplog.records]
    assert texts
    assert not [text for text in texts if "secret-" in text]


def test_official_clients_read_the_receipt(folder: Path) -> None:
    it = serving(folder)
    with (
        Running(it) as running,
        openai.OpenAI(api_key="none", base_url=f"{running.url}/v1", max_retries=0) as ours,
        anthropic.Anthropic(api_key="none", base_url=running.url, max_retries=0) as theirs,
    ):
        extra = {"extra_body": {"receipt": True}}
        chat: Any = {"model": "tiny", "messages": USER, **extra}
        found: list[Any] = [ours.chat.completions.create(**chat).receipt]  # type: ignore[attr-defined]
        found.append([*ours.chat.completions.create(**chat, stream=True)][-1].receipt)
        found.append([*ours.completions.create(model="tiny", prompt="abc", stream=True, **extra)][-1].receipt)  # type: ignore[call-overload]
        found.append(ours.responses.create(model="tiny", input="Hi", **extra).receipt)  # type: ignore[call-overload]
        found.append([*ours.responses.create(model="tiny", input="Hi", stream=True, **extra)][-1].receipt)  # type: ignore[call-overload]
        message: Any = {"model": "tiny", "messages": USER, "max_tokens": 16, **extra}
        found.append(theirs.messages.create(**message).receipt)
        found.append([*theirs.messages.create(**message, stream=True)][-1].receipt)
    for given in found:
        assert checked(it, given).content.answers[0].text_digest == digest_of_text("Hello")


# --- an answer that is computed again ---


def engine_sampling(it: Served) -> SamplingParams:
    return it.engine.submitted[-1][2]


def test_a_replay_asks_for_exactly_what_was_sampled(folder: Path) -> None:
    it = serving(folder)
    asked = {
        "prompt": "abc", "receipt": True, "temperature": 0.3, "top_p": 0.9, "top_k": 17, "min_p": 0.05, "max_tokens": 6,
        "min_tokens": 2, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": -0.2,
        "stop_token_ids": [5], "ignore_eos": True, "logit_bias": {"7": 1.5, "9": -0.1}, "bad_words": ["xyz", "q"],
        "allowed_token_ids": [1, 2, 3], "logprobs": 3, "stop": "never", "priority": 4,
        "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }  # fmt: skip
    receipt = receipt_of(it.post("/v1/completions", asked).json()["receipt"])
    before = engine_sampling(it)
    assert before.seed is not None
    response = it.post("/v1/completions", body_of(receipt.content, 0))
    assert response.status_code == 200, response.text
    after = engine_sampling(it)
    assert before.grammar is not None
    assert after.grammar == msgspec.structs.replace(before.grammar, param="exact_sampling.grammar")
    assert after == msgspec.structs.replace(before, grammar=after.grammar, logprobs=0)
    assert it.engine.salts[-1] != it.engine.salts[-2]


def test_a_grammar_of_tool_calls_can_be_sent_again(folder: Path) -> None:
    it = serving(folder)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": USER, "tools": [tool], "tool_choice": "required", "receipt": True}
    content = receipt_of(it.post("/v1/chat/completions", body).json()["receipt"]).content
    before = engine_sampling(it).grammar
    assert it.post("/v1/completions", body_of(content, 0)).status_code == 200
    after = engine_sampling(it).grammar
    assert isinstance(before, Grammar)
    assert isinstance(after, Grammar)
    assert (after.kind, after.text, after.tokens, after.before) == (
        before.kind,
        before.text,
        before.tokens,
        before.before,
    )


def test_exact_sampling_that_cannot_be_followed_is_refused(folder: Path) -> None:
    it = serving(folder)
    for exact, param in (
        ({"bad_words": [[257]]}, "exact_sampling.bad_words"),
        ({"bad_words": [[]]}, "exact_sampling.bad_words[0]"),
        ({"grammar": {"kind": "regex", "text": "a", "tokens": [300]}}, "exact_sampling.grammar"),
        ({"grammar": {"kind": "lark", "text": "start: /(/"}}, "exact_sampling.grammar"),
        ({"grammar": {"kind": "lark", "text": "{", "before": {"text": "before: /a/"}}}, "exact_sampling.grammar"),
        ({"grammar": {"kind": "other", "text": "a"}}, "exact_sampling.grammar.kind"),
        ({"grammar": {"kind": "regex", "text": "a", "more": 1}}, "exact_sampling.grammar.more"),
    ):
        error = it.post("/v1/completions", {"prompt": "abc", "exact_sampling": exact}).json()["error"]
        assert error["param"] == param
    both = {"prompt": "abc", "guided_regex": "b", "exact_sampling": {"grammar": {"kind": "regex", "text": "a"}}}
    assert "send one" in it.post("/v1/completions", both).json()["error"]["message"]


@pytest.fixture
def answered(folder: Path) -> Iterator[tuple[Served, Running, Receipt]]:
    """A reproducible server that has given a receipt with log probabilities."""
    it = serving(folder, reproducible=True)
    it.engine.ready = msgspec.structs.replace(READY, paths={name: ServedPath("00ff", "one") for name in PATHS})
    given = it.post("/v1/completions", {"prompt": "abc", "receipt": True, "logprobs": 0, "temperature": 0.5}).json()
    with Running(it) as running:
        yield it, running, receipt_of(given["receipt"])


def verified(running: Running, receipt: Receipt) -> tuple[ExitCode, list[str]]:
    lines: list[str] = []
    with client_of(running.url, timeout_s=30) as client:
        server = ReplayServer(client, client)
        code = verify(receipt, server.keys(), server, lines.append)
    name = "UNSERVABLE" if code == 2 else code.name
    assert lines[-1] == f"verdict: {name} (exit {code.value})"
    return code, lines


def test_an_equal_answer_passes(answered: tuple[Served, Running, Receipt]) -> None:
    _, running, receipt = answered
    code, lines = verified(running, receipt)
    assert (code, len(lines)) == (ExitCode.PASS, 3)
    assert lines[1] == "replay: PASS: 1 answer, 6 tokens and 6 log probabilities are equal"


DECISION = "decode sdpa.cpu (proven; order one, sources 00ff)"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("Hep", "lo"), ["replay: FAIL: answer 0 differs from its token 2 on: token 108 in the receipt, token 112 now",
            f"    computed by {DECISION} in the receipt", f"    computed by {DECISION} now"]),
        (("Hel",), ["replay: FAIL: answer 0 differs from its token 3 on: token 108 in the receipt, token 256 now"]),
    ],
)  # fmt: skip
def test_another_answer_fails_with_both_decisions(
    answered: tuple[Served, Running, Receipt], texts: tuple[str, ...], said: list[str]
) -> None:
    it, running, receipt = answered
    it.engine.script = saying(*texts)
    code, lines = verified(running, receipt)
    assert (code, lines[1 : 1 + len(said)]) == (ExitCode.NUMERICS, said)


def test_without_a_promise_a_difference_decides_nothing(
    answered: tuple[Served, Running, Receipt], folder: Path
) -> None:
    _, _, receipt = answered
    content = msgspec.structs.replace(receipt.content, reproducible=False)
    it = serving(folder, saying("Hep"))
    with Running(it) as running:
        code, lines = verified_content(running, content, it)
    assert code is ExitCode.INCONCLUSIVE
    assert "without --reproducible" in lines[1]


def verified_content(running: Running, content: Content, it: Served) -> tuple[ExitCode, list[str]]:
    """Verify a content that the server's own key signs."""
    assert it.services.receipts is not None
    keys = it.services.receipts.keys
    signed = msgspec.json.encode(content, order="sorted")
    return verified(running, Receipt(content, signed, keys.key_id, keys.sign(signed)))


@pytest.mark.parametrize(
    ("changes", "text", "code", "why"),
    [
        ({"weights_digest": "ef" * 32}, "lo", ExitCode.ENVIRONMENT, "weights: efefefefefef in the receipt, abab"),
        ({"model": "other"}, "lo", ExitCode.PASS, "model: other in the receipt, tiny now"),
        ({"matrix_digest": "f" * 64}, "lo", ExitCode.PASS, "matrix: ffffffffffff in the receipt, abc123 now"),
        ({"fingerprint": {"gpu": "H100"}}, "p", ExitCode.ENVIRONMENT, "gpu: H100 in the receipt, test now"),
        ({"server_version": "0.9"}, "p", ExitCode.ENVIRONMENT, "server version: 0.9 in the receipt, 1.2.3 now"),
        ({"matrix_digest": "f" * 64}, "p", ExitCode.NUMERICS, "matrix: ffffffffffff in the receipt, abc123 now"),
        ({"decisions": []}, "p", ExitCode.ENVIRONMENT, "computed by decode sdpa.cpu"),
        (
            {"settings": {"quantization": "fp8"}}, "p", ExitCode.ENVIRONMENT,
            "setting quantization: fp8 in the receipt, left out now",
        ),
        ({"version": 1, "settings": {}}, "p", ExitCode.NUMERICS, "its token 3"),
    ],
)  # fmt: skip
def test_what_has_changed_is_explained(
    answered: tuple[Served, Running, Receipt], changes: dict[str, Any], text: str, code: ExitCode, why: str
) -> None:
    it, running, receipt = answered
    it.engine.script = saying("Hel", text)
    found, lines = verified_content(running, msgspec.structs.replace(receipt.content, **changes), it)
    assert found is code, lines
    assert any(why in line for line in lines), lines


def test_a_prompt_that_does_not_fit_is_unservable(answered: tuple[Served, Running, Receipt]) -> None:
    it, running, receipt = answered
    long = [97] * 2000
    prompt = msgspec.structs.replace(
        receipt.content.prompts[0], num_tokens=len(long), token_ids=long, token_ids_digest=digest_of_ids(long)
    )
    code, lines = verified_content(running, msgspec.structs.replace(receipt.content, prompts=[prompt]), it)
    assert code is ExitCode.PERFORMANCE
    assert "the server does not serve its answer 0: /v1/completions answers 400: This model's maximum" in lines[1]


def test_digests_alone_are_inconclusive(folder: Path) -> None:
    it = serving(folder, receipt_token_ids=False)
    receipt = receipt_of(it.post("/v1/completions", {"prompt": "abc", "receipt": True}).json()["receipt"])
    with Running(it) as running:
        code, lines = verified(running, receipt)
    assert code is ExitCode.INCONCLUSIVE
    assert "holds digests only" in lines[1]


def test_an_old_key_verifies_after_a_rotation(answered: tuple[Served, Running, Receipt]) -> None:
    it, running, receipt = answered
    assert it.services.receipts is not None
    assert it.services.receipts.keys.rotate()
    code, lines = verified(running, receipt)
    assert code is ExitCode.PASS
    assert f"key {receipt.key_id} signed it" in lines[0]


def test_golden_receipts_are_compared_to_the_bit(folder: Path, tmp_path: Path) -> None:
    prompts = [
        GoldenPrompt(f"le_128-{n}", "le_128", [97] * n, 6, "Hello", [], [], []) for n in (3, 5, LONGEST_PROMPT + 1)
    ]
    it = serving(folder, reproducible=True)
    silent: list[object] = []
    with Running(it) as running, client_of(running.url, timeout_s=30) as client:
        server = ReplayServer(client, client)
        receipts = record_receipts(server, prompts, lambda *what: silent.append(what))
        golden = Golden(SCHEMA, "tiny", "2026-11-28", None, {}, prompts, {}, {}, receipts)
        save_golden(tmp_path / "golden.json", golden)
        kept = load_golden(tmp_path / "golden.json").receipts
        contents = [receipt_of(receipt).content for receipt in kept]
        drawn = [(one.prompts[0].num_tokens, one.answers[0].sampling.seed is not None) for one in contents]
        assert drawn == [(3, False), (3, True), (5, False), (5, True)]

        def judged(max_model_len: int = 100) -> Verdict:
            return judge_receipts(kept, server, max_model_len=max_model_len, progress=lambda *_: None)

        assert judged().outcome is Outcome.PASS
        assert judged(4).outcome is Outcome.SKIPPED
        it.engine.script = saying("Hel", "p")
        verdict = judged()
        assert (verdict.stage, verdict.outcome) == (Stage.NUMERICS, Outcome.FAIL)
        assert "answer 0 differs from its token 3 on" in verdict.reasons[0]
        it.engine.ready = msgspec.structs.replace(READY, paths=PATHS, fingerprint={"gpu": "another"})
        assert (judged().stage, judged().outcome) == (Stage.ENVIRONMENT, Outcome.FAIL)


def test_without_a_promise_no_golden_receipt_is_recorded(folder: Path) -> None:
    with Running(serving(folder)) as running, client_of(running.url, timeout_s=30) as client:
        assert record_receipts(ReplayServer(client, client), [], lambda *_: None) == []


def test_logprobs_are_the_bits_of_the_answer(folder: Path) -> None:
    it = serving(folder)
    asked = {"messages": USER, "logprobs": True, "top_logprobs": 2, "receipt": True, "prompt_logprobs": 1}
    body = it.post("/v1/chat/completions", asked).json()
    [answer] = receipt_of(body["receipt"]).content.answers
    expected = [entry["logprob"] for entry in body["choices"][0]["logprobs"]["content"]]
    assert answer.logprobs is not None
    assert msgspec.json.decode(json.dumps(expected)) == [*memoryview(b64decode(answer.logprobs)).cast("f")]
