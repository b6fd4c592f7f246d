"""Sampling by torch ops against straightforward numpy and exact counting, on vocabularies small enough to compare sets.

test_draw.py holds the kernels against the same ops.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.sampling.gumbel import gumbel_noise
from kernels.sampling.penalties import RowPenalties
from kernels.sampling.sampling import (
    RowSampling,
    SampleResult,
    SamplingTensors,
    keep_likely,
    sample,
    sample_torch,
    sampling_tensors,
)

CPU = torch.device("cpu")
Autotuner = Callable[[Tensor, SamplingTensors], SampleResult]


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def choose(logits: Tensor, *rows: RowSampling) -> list[int]:
    result = sample_torch(logits.clone(), sampling_tensors(rows, logits.shape[1], CPU))
    assert result.is_finite.all()
    ids: list[int] = result.token_ids.tolist()
    return ids


def support_of(logits: Tensor, *rows: RowSampling) -> list[set[int]]:
    tensors = sampling_tensors(rows, logits.shape[1], CPU)
    scores = logits - logits.amax(-1, keepdim=True)
    scores = scores / tensors.temperature
    if tensors.is_filtered:
        keep_likely(scores, tensors)
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in scores]


def reference_support(logits: np.ndarray, row: RowSampling) -> set[int]:
    """Top-k, then top-p, then min-p, one token at a time, in float64. Without ties."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / row.temperature)
    ranks = [int(token) for token in np.argsort(-weights)[: row.top_k]]
    kept, mass = set(), 0.0
    for token in ranks:
        if row.top_p < 1 and mass / weights[ranks].sum() >= row.top_p:
            break
        kept.add(token)
        mass += weights[token]
    return {token for token in kept if weights[token] >= row.min_p * weights.max()}


def frequencies(logits: Tensor, row: RowSampling, num_draws: int) -> np.ndarray:
    rows = [
        RowSampling(row.temperature, row.top_k, row.top_p, row.min_p, seed=n // 64, position=n % 64)
        for n in range(num_draws)
    ]
    ids = choose(logits.expand(num_draws, -1), *rows)
    return np.bincount(ids, minlength=logits.shape[-1])


def chi_square_limit(degrees: int) -> float:
    """The 99.9th percentile, by Wilson and Hilferty's approximation."""
    return float(degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3)


def test_greedy_rows_stay_greedy_beside_sampled_ones() -> None:
    logits = random_logits(6, 97)
    rows = [
        RowSampling(temperature=t, top_k=k, seed=9) for t, k in [(0, None), (2, 5), (0, 1), (1, None), (0, 7), (3, 2)]
    ]
    assert choose(logits, *rows)[::2] == logits.argmax(-1).tolist()[::2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = random_logits(1, 24, seed=3) / 3
    expected = torch.softmax(logits[0].double() / temperature, -1).numpy() * 20_000
    counts = frequencies(logits, RowSampling(temperature), 20_000)
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(23)


def test_draws_with_filters_follow_the_softmax_of_what_is_left() -> None:
    logits = random_logits(1, 40, seed=4) / 2
    row = RowSampling(1.3, top_k=20, top_p=0.9, min_p=0.02)
    support = sorted(reference_support(logits[0].numpy(), row))
    expected = torch.softmax(logits[0, support].double() / 1.3, -1).numpy() * 20_000
    counts = frequencies(logits, row, 20_000)
    assert counts.sum() == counts[support].sum()
    assert ((counts[support] - expected) ** 2 / expected).sum() < chi_square_limit(len(support) - 1)


def test_the_distribution_check_refuses_a_wrong_temperature() -> None:
    logits = random_logits(1, 24, seed=3) / 3
    expected = torch.softmax(logits[0].double(), -1).numpy() * 20_000
    counts = frequencies(logits, RowSampling(1.1), 20_000)
    assert ((counts - expected) ** 2 / expected).sum() > chi_square_limit(23)


def test_neighbouring_positions_and_seeds_draw_independently() -> None:
    noise = gumbel_noise(torch.arange(256), torch.arange(256).flip(0) % 16, 512).double()
    across_rows = torch.corrcoef(noise).fill_diagonal_(0).abs().max()
    across_tokens = torch.corrcoef(noise.T).fill_diagonal_(0).abs().max()
    # The largest of n correlations over m draws stays below sqrt(4 ln n / m) or so.
    assert across_rows < math.sqrt(4 * math.log(256**2 / 2) / 512)
    assert across_tokens < math.sqrt(4 * math.log(512**2 / 2) / 256)


def test_the_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(torch.tensor([11]), torch.tensor([5]), 200_000)[0].double().sort().values
    probabilities = torch.exp(-torch.exp(-noise))
    distance = (probabilities - (torch.arange(200_000) + 0.5) / 200_000).abs().max()
    assert distance < 1.95 / math.sqrt(200_000)  # Kolmogorov and Smirnov, 0.1%


def reference_noise(seed: int, position: int, token: int) -> float:
    """The hash over Python's integers. Seeds are promises: an upgrade must not change what a seed draws."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    low, high = seed % 2**32, seed % 2**64 >> 32
    first_key = mix(mix(mix(low) ^ high) ^ position)
    second_key = mix(mix(mix(high ^ 0x85EBCA6B) ^ low) ^ position)
    bits = mix(mix((token * 0x9E3779B9 + first_key) % 2**32) ^ second_key) % 2**31
    return -math.log(-math.log1p(-(bits + 0.5) / 2**31))


def test_the_noise_is_the_hash_of_seed_position_and_token() -> None:
    rows = [(0, 0), (42, 7), (-1, 131_071), (2**62 + 12_345, 2**20)]
    noise = gumbel_noise(torch.tensor([seed for seed, _ in rows]), torch.tensor([place for _, place in rows]), 300)
    expected = torch.tensor([[reference_noise(*row, token) for token in range(300)] for row in rows])
    torch.testing.assert_close(noise, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(2, 300),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.none() | st.integers(1, 400),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    other=st.sampled_from([RowSampling(), RowSampling(top_k=3), RowSampling(top_p=0.7), RowSampling(min_p=0.2)]),
)
def test_the_support_is_that_of_the_reference(
    seed: int, vocab: int, temperature: float, top_k: int | None, top_p: float, min_p: float, other: RowSampling
) -> None:
    logits = random_logits(3, vocab, seed)
    row = RowSampling(temperature, top_k, top_p, min_p)
    expected = [reference_support(logits[n].numpy(), r) for n, r in enumerate([row, other, row])]
    assert support_of(logits, row, other, row) == expected


TIED, UNLIKELY, FOUR = [2.0, 1.0, 1.0, 1.0, 0.0], [0.0, -60.0, -80.0], [3.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("logits", "rows", "support"),
    [
        # Tokens that tie with the last one kept stay.
        (TIED, [RowSampling(top_k=2)], [{0, 1, 2, 3}]),
        (TIED, [RowSampling(top_p=0.5)], [{0, 1, 2, 3}]),
        # A top-p of 1 keeps what is too unlikely to count.
        (UNLIKELY, [RowSampling(top_p=1.0, top_k=3)], [{0, 1, 2}]),
        (UNLIKELY, [RowSampling(), RowSampling(top_p=0.5)], [{0, 1, 2}, {0}]),
        # The limits are those of the row.
        (FOUR, [RowSampling(top_k=2), RowSampling()], [{0, 1}, {0, 1, 2, 3}]),
        (FOUR, [RowSampling(top_k=2), RowSampling(min_p=0.1)], [{0, 1}, {0, 1, 2}]),
    ],
)
def test_what_a_row_may_draw(logits: list[float], rows: list[RowSampling], support: list[set[int]]) -> None:
    assert support_of(torch.tensor([logits]).expand(len(rows), -1), *rows) == support


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    logits = random_logits(9, 501)
    rows = [
        RowSampling(
            temperature=0.0 if n == 4 else 0.5 + n / 4,
            top_k=None if n % 3 else 20 + n,
            top_p=1.0 if n % 2 else 0.8,
            min_p=0.01 * (n == 5),
            seed=1000 - n,
            position=n * n,
            penalties=RowPenalties([1, 2, 3], [n, n, 5], 1.3, 0.2, 0.4) if n in (2, 7) else None,
            banned_ids=[0, n] if n in (3, 7) else (),
        )
        for n in range(9)
    ]
    together = choose(logits, *rows)
    assert together == [choose(logits[n : n + 1], rows[n])[0] for n in range(9)]
    assert together[::-1] == choose(logits.flip(0), *rows[::-1])


def test_banned_tokens_are_never_chosen() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0]]).expand(3, -1)
    rows = [RowSampling(0, banned_ids=[0]), RowSampling(0.1, banned_ids=[0, 1]), RowSampling(0)]
    assert choose(logits, *rows) == [1, 2, 0]


@pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("choose_by", [sample, sample_torch])
def test_a_penalty_that_overflows_is_not_the_models_fault(choose_by: Autotuner, temperature: float) -> None:
    row = RowSampling(temperature, penalties=RowPenalties([1], [], repetition=1e-37))
    logits = torch.tensor([[90.0, 80.0, 1.0], [90.0, 80.0, math.inf], [90.0, math.nan, 1.0]])
    result = choose_by(logits, sampling_tensors([row] * 3, 3, CPU))
    assert result.is_finite.tolist() == [True, False, False]
    assert result.token_ids[0] == 1  # 80 / 1e-37 is beyond fp32: the largest of all


def test_a_bad_number_at_a_banned_token_is_reported() -> None:
    logits = torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [0.0, 1.0]])
    result = sample(logits, sampling_tensors([RowSampling(0, banned_ids=[0])] * 3, 2, CPU))
    assert result.is_finite.tolist() == [False, False, True]


@pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("choose_by", [sample, sample_torch])
@pytest.mark.parametrize("row", [RowSampling(0, banned_ids=[0, 1]), RowSampling(1, allowed_ids=[1], banned_ids=[1])])
def test_a_row_that_limits_leave_empty_is_exhausted(choose_by: Autotuner, row: RowSampling) -> None:
    """It is not the model's fault, unless the model gave no finite number either."""
    logits = torch.tensor([[1.0, 2.0], [1.0, math.nan], [-math.inf, -math.inf], [1.0, 2.0]])
    result = choose_by(logits, sampling_tensors([row] * 3 + [RowSampling(0)], 2, CPU))
    assert result.is_finite.tolist() == [False, False, False, True]
    assert result.is_exhausted.tolist() == [True, False, False, False]


def test_masked_out_tokens_are_no_reason_to_refuse_a_row() -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf]])
    assert choose(logits, RowSampling(1.0, seed=3)) == [1]
