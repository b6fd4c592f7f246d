"""The sampling kernels (in Triton's interpreter, or on the GPU) against the torch ops that specify them."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.sampling.draw import Chunks
from kernels.sampling.penalties import RowPenalties, apply_penalties, apply_penalties_torch, penalty_tensors
from kernels.sampling.sampling import (
    RowSampling,
    SampleResult,
    SamplingTensors,
    greedy,
    sample,
    sample_torch,
    sampling_tensors,
)

Choose = Callable[[Tensor, SamplingTensors], SampleResult]
VOCAB = 5000  # two blocks, the second one not full


def logits_of(rows: int, vocab: int, scale: float, device: torch.device, seed: int = 0) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale).to(device)


def random_rows(count: int, vocab: int, seed: int) -> list[RowSampling]:
    rng = random.Random(seed)
    return [
        RowSampling(
            temperature=rng.choice([0.3, 1.0, 1.0, 2.0]),
            top_k=rng.choice([None, 1, 2, 50, vocab // 2]),
            top_p=rng.choice([1.0, 0.01, 0.5, 0.9, 0.999]),
            min_p=rng.choice([0.0, 0.0, 0.01, 0.5]),
            seed=rng.getrandbits(63) - 2**62,
            position=rng.getrandbits(20),
        )
        for _ in range(count)
    ]


def draw_both(logits: Tensor, rows: list[RowSampling]) -> tuple[SampleResult, SampleResult]:
    tensors = sampling_tensors(rows, logits.shape[1], logits.device)
    return sample(logits.clone(), tensors), sample_torch(logits.clone(), tensors)


# Small scales put all tokens into a few bins of the histogram, so that thresholds are found exactly or not at all.
@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_the_kernels_draw_the_tokens_of_the_torch_ops(scale: float, device: torch.device) -> None:
    rows = random_rows(4, VOCAB, seed=int(scale * 100))
    by_kernel, by_torch = draw_both(logits_of(4, VOCAB, scale, device), rows)
    assert by_kernel.token_ids.tolist() == by_torch.token_ids.tolist()


def test_ties_at_a_threshold_stay_as_they_do_in_the_torch_ops(device: torch.device) -> None:
    coarse = logits_of(4, VOCAB, 1.0, device).mul(4).round().div(4)  # some 30 values, hundreds of tokens each
    rows = [RowSampling(1.0, top_k=700, seed=1), RowSampling(1.0, top_p=0.5, seed=2), *random_rows(2, VOCAB, 3)]
    by_kernel, by_torch = draw_both(coarse, rows)
    assert by_kernel.token_ids.tolist() == by_torch.token_ids.tolist()


def test_a_token_outside_of_the_limits_is_never_drawn(device: torch.device) -> None:
    """Give each row one token that may be drawn: 20 near equals compete with it in the same bin."""
    logits = torch.zeros(3, 40, device=device)
    logits[:, 20:] = -50.0
    logits[:, 7] = 1e-6
    limits = [RowSampling(top_k=1), RowSampling(top_p=1e-9), RowSampling(min_p=1.0)]
    for seed in range(2):
        rows = [RowSampling(1.0, row.top_k, row.top_p, row.min_p, seed) for row in limits]
        result = sample(logits.clone(), sampling_tensors(rows, 40, device))
        assert result.token_ids.tolist() == [7, 7, 7]


def test_rows_without_limits_are_drawn_in_two_passes_alike(device: torch.device) -> None:
    rows = [RowSampling(1.0, seed=4), RowSampling(0.0), RowSampling(2.5, seed=-5, position=9)]
    by_kernel, by_torch = draw_both(logits_of(3, VOCAB, 2.0, device), rows)
    assert by_kernel.token_ids.tolist() == by_torch.token_ids.tolist()


def test_greedy_takes_the_first_of_equals(device: torch.device) -> None:
    logits = logits_of(3, VOCAB, 1.0, device)
    logits[0, [4999, 4500, 4096]] = 9.0
    logits[1, [17, 4096]] = 9.0
    assert greedy(logits).token_ids.tolist() == [4096, 17, logits[2].argmax().item()]


def test_greedy_reads_other_float_types(device: torch.device) -> None:
    logits = logits_of(2, 300, 1.0, device).half()
    assert greedy(logits).token_ids.tolist() == logits.float().argmax(-1).tolist()


@pytest.mark.parametrize("choose", [sample, sample_torch])
@pytest.mark.parametrize("row", [RowSampling(0), RowSampling(1), RowSampling(1, top_k=2, top_p=0.5, min_p=0.1)])
def test_only_a_row_with_a_bad_number_is_reported(row: RowSampling, choose: Choose, device: torch.device) -> None:
    logits = logits_of(5, 60, 1.0, device)
    logits[1, 17], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    result = choose(logits, sampling_tensors([row] * 5, 60, device))
    assert result.is_finite.tolist() == [True, False, False, False, True]
    assert ((result.token_ids >= 0) & (result.token_ids < 60)).all()


def test_penalties_change_the_logits_that_the_torch_ops_change(device: torch.device) -> None:
    penalties = RowPenalties([1, 2, 2, 4097], [2, 2, 4999], repetition=1.3, presence=0.25, frequency=0.1)
    rows = [RowSampling(0), RowSampling(0, penalties=penalties), RowSampling(0, penalties=RowPenalties([], [], 2.0))]
    logits = logits_of(3, VOCAB, 1.0, device)
    expected = logits.clone()
    for token, count in ((1, 0), (2, 2), (4097, 0), (4999, 1)):
        value = logits[1, token].item()
        expected[1, token] = (value / 1.3 if value > 0 else value * 1.3) - 0.1 * count - 0.25 * (count > 0)
    sample(logits, sampling_tensors(rows, VOCAB, device))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_long_histories_are_penalised_as_the_torch_ops_do(device: torch.device) -> None:
    """More tokens than one program looks at, most of them several times, so that programs share tokens."""
    generator = random.Random(0)
    penalties = {
        row: RowPenalties(generator.choices(range(300), k=700), generator.choices(range(400), k=900), 1.3, 0.25, 0.1)
        for row in (0, 2)
    }
    logits = logits_of(3, 600, 1.0, device)
    expected = logits.clone()
    tensors = penalty_tensors(penalties, device)
    apply_penalties_torch(expected, tensors)
    apply_penalties(logits, tensors)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_an_empty_batch_draws_nothing(device: torch.device) -> None:
    assert greedy(torch.empty(0, 8, device=device)).token_ids.shape == (0,)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 33])
def test_what_a_chunk_writes_is_aligned_for_any_number_of_rows(num_rows: int) -> None:
    parts = Chunks(torch.zeros(num_rows, VOCAB))
    written = (parts.values, parts.other_values, parts.best, parts.ids, parts.other_ids, parts.best_ids)
    assert {tensor.data_ptr() % 16 for tensor in written} == {0}
    assert all(tensor.numel() >= num_rows * parts.num_splits for tensor in written)
