"""Log probabilities of prompts: against transformers', however the prompt is cut, and in bounded slices."""

from pathlib import Path

import pytest
import torch
from test_engine import Session, build
from tiny_llama import NAN_TOKEN, TinyLlama
from transformers import LlamaForCausalLM

from server.engine.execution.sampling import score_rows, wants_scores
from server.engine.scheduling.sequence import Batch, Sequence
from server.protocol.messages import FinishReason, SamplingParams, TokenDelta, TokenScores

SCORED = SamplingParams(max_tokens=1, temperature=0.0, scored=2)


@pytest.fixture(scope="module")
def expected(tiny_llama: TinyLlama) -> list[torch.Tensor]:
    """Log probabilities [tokens, vocab] after each token of each prompt."""
    model = LlamaForCausalLM.from_pretrained(tiny_llama.folder).eval()
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in tiny_llama.prompts]


def last_delta(session: Session, name: str) -> TokenDelta:
    return [delta for output in session.outputs for delta in output.deltas if delta.request_id == name][-1]


def check(scores: tuple[TokenScores, ...], tokens: list[int], expected: torch.Tensor) -> None:
    logprobs = [value for part in scores for value in part.logprobs]
    assert [part.position for part in scores] == [
        1 + sum(len(it.logprobs) for it in scores[:i]) for i in range(len(scores))
    ]
    assert len(logprobs) == len(tokens) - 1
    wanted = expected.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=2e-4, rtol=1e-4)
    top = expected.topk(2)
    assert [ids for part in scores for ids in part.top_ids] == top.indices.tolist()
    found = torch.tensor([values for part in scores for values in part.top_logprobs])
    torch.testing.assert_close(found, top.values, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 11}, {"kv_cache_tokens": 144, "page_size": 8}], ids=str
)
def test_scores_equal_those_of_transformers_whole_in_chunks_and_after_a_preemption(
    tiny_llama: TinyLlama, expected: list[torch.Tensor], tmp_path: Path, settings: dict[str, int]
) -> None:
    session = Session(build(tiny_llama, tmp_path, **settings))
    for index, prompt in enumerate(tiny_llama.prompts):
        session.submit(f"r{index}", prompt, SCORED)
        session.submit(f"other{index}", prompt)  # shares the batches, and is not scored
    session.drain()
    for index, prompt in enumerate(tiny_llama.prompts):
        delta = last_delta(session, f"r{index}")
        assert delta.token_ids == tiny_llama.greedy[index][:1]
        check(delta.scores, [*prompt, *delta.token_ids], expected[index])
        assert session.tokens(f"other{index}") == tiny_llama.greedy[index]
        assert last_delta(session, f"other{index}").scores == ()


def test_a_prompt_that_is_known_is_scored_whole_again(
    tiny_llama: TinyLlama, expected: list[torch.Tensor], tmp_path: Path
) -> None:
    session = Session(build(tiny_llama, tmp_path, page_size=8))
    session.submit("known", tiny_llama.prompts[5])
    session.drain()
    session.submit("again", tiny_llama.prompts[5], SCORED)
    session.drain()
    delta = last_delta(session, "again")
    check(delta.scores, [*tiny_llama.prompts[5], *delta.token_ids], expected[5])


def test_a_prompt_without_finite_logits_fails_alone(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    session = Session(build(tiny_llama, tmp_path))
    session.submit("bad", [5, NAN_TOKEN, 6], SCORED)
    session.submit("good", tiny_llama.prompts[2], SCORED)
    session.drain()
    assert last_delta(session, "bad").finish_reason is FinishReason.ERROR
    assert last_delta(session, "good").finish_reason is FinishReason.LENGTH


def scored_batch(num_tokens: int) -> Batch:
    seq = Sequence("a", list(range(num_tokens)), num_tokens, SCORED, seed=0, submitted_at=0.0)
    return Batch((seq,), (num_tokens,), (num_tokens,), (), (0,), num_prefill=1, num_extend=0)


def test_rows_go_through_the_head_in_slices_of_bounded_size() -> None:
    hidden, sizes = torch.randn(50, 7), []

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(rows.shape[0])
        return rows.repeat(1, 10)

    whole = score_rows(lambda rows: rows.repeat(1, 10), hidden, scored_batch(50), [3])
    sliced = score_rows(logits_of, hidden, scored_batch(50), [3], max_logits=70 * 8)
    assert max(sizes) == 8
    assert sum(sizes) == 50
    assert sliced[0].logprobs == pytest.approx(whole[0].logprobs)


def test_only_prompts_that_ask_for_it_are_scored() -> None:
    assert wants_scores(scored_batch(3))
    seq = Sequence("a", [1, 2], 2, SamplingParams(max_tokens=1), seed=0, submitted_at=0.0)
    assert not wants_scores(Batch((seq,), (2,), (2,), (), (0,), num_prefill=1, num_extend=0))
