"""Log probabilities of prompts and answers: against transformers', however they are computed, and in bounded slices."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import LlamaForCausalLM

from server.engine.execution.sampling import score_prompts, wants_prompt_scores
from server.engine.scheduling.sequence import Batch, Sequence
from server.protocol.messages import FinishReason, SamplingParams, TokenDelta, TokenScores
from support.engine.graph_session import Session
from support.engine.llama_engine import session_of
from support.models.tiny_llama import NAN_TOKEN, TinyLlama

SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3)
# Scores are of the logits as the model gives them, whatever is done to choose a token.
CHANGED = SamplingParams(
    max_tokens=12,
    temperature=0.7,
    top_k=9,
    seed=3,
    logprobs=0,
    prompt_logprobs=4,
    repetition_penalty=1.4,
    frequency_penalty=0.5,
    logit_bias=((7, 2.5), (9, -100.0)),
    bad_words=((4,), (5, 6)),
    min_tokens=5,
)
CUT = [
    ({}, GREEDY), ({"max_num_batched_tokens": 11}, CHANGED), ({"kv_cache_tokens": 144, "page_size": 8}, CHANGED)
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_llama: TinyLlama) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_llama.folder).eval()


def expected(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Log probabilities [tokens, vocab] after each of the tokens."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return found


def deltas(session: Session, name: str) -> list[TokenDelta]:
    return [delta for output in session.outputs for delta in output.deltas if delta.request_id == name]


def check(model: LlamaForCausalLM, session: Session, name: str, prompt: list[int], sampling: SamplingParams) -> None:
    """Hold every score of a request against transformers'; each token's comes with the token."""
    tokens = [*prompt, *session.tokens(name)]
    wanted = expected(model, tokens)
    scores = [part for delta in deltas(session, name) for part in delta.scores]
    first = 1 if sampling.prompt_logprobs is not None else len(prompt)
    last = len(tokens) if sampling.logprobs is not None else len(prompt)
    assert [part.position + i for part in scores for i in range(len(part))] == list(range(first, last))
    for delta in deltas(session, name)[1:]:
        assert [*map(len, delta.scores)] == [1] * (sampling.logprobs is not None)
    for part in filter(len, scores):
        num_top = sampling.prompt_logprobs if part.position < len(prompt) else sampling.logprobs
        before = wanted[part.position - 1 : part.position - 1 + len(part)]
        own = before.gather(1, torch.tensor(tokens[part.position :][: len(part)])[:, None])
        logprobs, ranks, ids, values = zip(*part.rows(), strict=True)
        torch.testing.assert_close(torch.tensor(logprobs), own.squeeze(1), atol=1e-4, rtol=0)
        assert [*ranks] == (before >= own).sum(1).tolist()
        top = before.topk(num_top or 0)
        assert [*map(list, ids)] == top.indices.tolist()
        found = torch.tensor(values, dtype=torch.float32)
        torch.testing.assert_close(found.flatten(), top.values.flatten(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("settings", "sampling"), CUT, ids=str)
def test_scores_equal_those_of_transformers(
    tiny_llama: TinyLlama, model: LlamaForCausalLM, tmp_path: Path, settings: dict[str, int], sampling: SamplingParams
) -> None:
    session = session_of(tiny_llama, tmp_path, **settings)
    session.submit("alone", tiny_llama.prompts[5], sampling)
    session.drain()
    for index, prompt in enumerate(tiny_llama.prompts):
        session.submit(f"r{index}", prompt, sampling)
        session.submit(f"other{index}", prompt)  # shares the batches, and is not scored
    session.drain()
    check(model, session, "alone", tiny_llama.prompts[5], sampling)
    for index, prompt in enumerate(tiny_llama.prompts):
        check(model, session, f"r{index}", prompt, sampling)
        assert session.tokens(f"other{index}") == tiny_llama.greedy[index]
        assert not any(delta.scores for delta in deltas(session, f"other{index}"))
    assert session.tokens("alone") == session.tokens("r5")


def test_a_known_prompt_is_scored_whole(tiny_llama: TinyLlama, model: LlamaForCausalLM, tmp_path: Path) -> None:
    session = session_of(tiny_llama, tmp_path, page_size=8)
    prompt = tiny_llama.prompts[5]
    for name, sampling in (("known", GREEDY), ("hit", GREEDY), ("whole", CHANGED)):
        session.submit(name, prompt, sampling)
        session.drain()
        check(model, session, name, prompt, sampling)
    cached = [delta.times.num_cached_tokens for delta in deltas(session, "hit") if delta.times is not None]
    assert cached == [(len(prompt) - 1) // 8 * 8]


def test_a_prompt_without_finite_logits_fails_alone(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    session = session_of(tiny_llama, tmp_path)
    session.submit("bad", [5, NAN_TOKEN, 6], CHANGED)
    session.submit("good", tiny_llama.prompts[2], CHANGED)
    session.drain()
    assert deltas(session, "bad")[-1].finish_reason is FinishReason.ERROR
    assert deltas(session, "good")[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_only_allowed_tokens_are_chosen_and_no_bad_word(
    tiny_llama: TinyLlama, tmp_path: Path, temperature: float
) -> None:
    session = session_of(tiny_llama, tmp_path)
    own = SamplingParams(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True)
    limits = {"allowed_token_ids": (7, 8, 9, 11, 12), "bad_words": ((11,), (7, 8), (8, 7), (9, 9, 9))}
    session.submit("limited", [5, 6, 7], msgspec.structs.replace(own, **limits))
    session.submit("biased", [5, 6, 7], msgspec.structs.replace(own, logit_bias=((21, 100.0),)))
    session.drain()
    text = session.tokens("limited")
    assert set(text) <= {7, 8, 9, 12}
    assert len(set(text)) > 1
    assert not {(7, 8), (8, 7)} & set(pairwise(text))
    assert (9, 9, 9) not in set(zip(text, text[1:], text[2:], strict=False))
    assert set(session.tokens("biased")) == {21}


def test_a_request_that_leaves_no_token_is_refused(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    session = session_of(tiny_llama, tmp_path)
    none_left = SamplingParams(4, min_tokens=2, allowed_token_ids=(7, 8), bad_words=((3, 8),), stop_token_ids=(7,))
    session.submit("none", [5], none_left)
    session.drain()
    assert deltas(session, "none")[-1].error_code == "invalid_value"


def scored_batch(num_tokens: int) -> Batch:
    seq = Sequence("a", list(range(num_tokens)), num_tokens, SCORED, seed=0, submitted_at=0.0)
    return Batch((seq,), (num_tokens,), (num_tokens,), (), (0,), num_prefill=1, num_extend=0)


def test_rows_go_through_the_head_in_slices_of_bounded_size() -> None:
    hidden, sizes = torch.randn(50, 7), []

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(rows.shape[0])
        return rows.repeat(1, 10)

    whole: dict[int, TokenScores] = score_prompts(lambda rows: rows.repeat(1, 10), hidden, scored_batch(50))
    sliced = score_prompts(logits_of, hidden, scored_batch(50), max_logits=70 * 8)
    assert max(sizes) == 8
    assert sum(sizes) == 49  # the last one's successor is no part of the prompt
    assert [row[0] for row in sliced[0].rows()] == pytest.approx([row[0] for row in whole[0].rows()])


def test_only_prompts_that_ask_for_it_are_scored() -> None:
    assert wants_prompt_scores(scored_batch(3))
    seq = Sequence("a", [1, 2], 2, SamplingParams(max_tokens=1), seed=0, submitted_at=0.0)
    assert not wants_prompt_scores(Batch((seq,), (2,), (2,), (), (0,), num_prefill=1, num_extend=0))
