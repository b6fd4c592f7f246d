"""The launches of `sampling.py`: the token of each row in two or four passes over the logits, without sorting them.

Top-k and top-p are thresholds on a row's scores, the logits less their maximum over the temperature. A histogram of the
scores bounds a threshold to a few bins, a second one of these bins to a small part of them. Gumbel-max needs no more,
most of the time: the best token above the bounds wins unless one between them beats it, and only then does
`finish_kernel` decide for that token by what is above it: how many tokens, and how much weight (if need be, in fp64).

Bounds are made of sums in any order and may differ from one batch to another; what is decided by them does not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.calls.launch import is_interpreted
from kernels.calls.processors import num_processors
from kernels.sampling.draw_kernels import (
    best_kernel,
    bracket_kernel,
    count_kernel,
    draw_kernel,
    finish_kernel,
    greedy_kernel,
    narrow_kernel,
    refine_kernel,
)

# Tokens a program looks at at once, and programs a processor: with 4096 and 4 draws of 1, 128 and 256 rows take 3-15 %
# longer, of 32 rows 1 % longer to 2 % shorter (H200, 128,256 tokens).
BLOCK = 2048
MAX_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 8
# 128 bins of 1/8 are narrow enough for 64 sub-bins of those in question to leave 0.5% of a row's weight uncertain; the
# cost of tl.histogram is that of its bins (one H200: 1024 bins took four times as long).
BINS = {"NUM_BINS": 128, "BINS_PER_UNIT": 8}
SUB_BINS = 64


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Parameters of drawing the tokens of R rows, on the device.

    temperature        [R, 1] fp32, 0 is greedy
    top_k              [R, 1] int64, at least 1, at most the vocabulary
    top_p, log_min_p   [R, 1] fp32
    seeds, positions   [R] int64
    is_ranked          whether any row has top-k or top-p
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    seeds: Tensor
    positions: Tensor
    is_ranked: bool


class Chunks:
    """A batch of logits cut into chunks, and what the kernels write of each chunk."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.num_rows, self.vocab = logits.shape
        num_blocks = -(-self.vocab // BLOCK)
        wanted = _PROGRAMS_PER_PROCESSOR * num_processors(logits.device) // max(self.num_rows, 1)
        self.chunk = -(-num_blocks // min(max(wanted, 1), MAX_SPLITS)) * BLOCK
        self.num_splits = -(-self.vocab // self.chunk)
        self.grid = (self.num_rows, self.num_splits)
        self.values, self.other_values, self.best = self._new(torch.float32, 3)
        self.ids, self.other_ids, self.best_ids = self._new(torch.int32, 3)
        self.token_ids = logits.new_empty(self.num_rows, dtype=torch.int64)
        self.is_finite = logits.new_empty(self.num_rows, dtype=torch.bool)

    def _new(self, dtype: torch.dtype, count: int) -> tuple[Tensor, ...]:
        """One value a chunk each, 16 bytes aligned: Triton compiles again for an address that is not."""
        size = -(-self.num_rows * self.num_splits // 4) * 4
        return self.logits.new_empty(count, size, dtype=dtype).unbind()


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row of logits [R, V], int64, and whether it could be chosen, bool."""
    chunks = Chunks(logits)
    if chunks.num_rows > 0:
        _find_best(chunks)
        greedy_kernel[(chunks.num_rows,)](
            chunks.best, chunks.best_ids, chunks.token_ids, chunks.is_finite, chunks.num_splits, MAX_SPLITS, num_warps=1
        )
    return chunks.token_ids, chunks.is_finite


def draw_tokens(logits: Tensor, limits: RowLimits) -> tuple[Tensor, Tensor]:
    """Draw the likeliest token with noise that a row's limits leave. Returns as `greedy_tokens`."""
    chunks = Chunks(logits)
    if chunks.num_rows == 0:
        return chunks.token_ids, chunks.is_finite
    _find_best(chunks)
    bounds = logits.new_empty(chunks.num_rows, 4, dtype=torch.float32)  # not read where no row is ranked
    if limits.is_ranked:
        _find_bounds(chunks, limits, bounds)
    found = (chunks.best, chunks.best_ids, bounds, chunks.values, chunks.ids, chunks.other_values, chunks.other_ids)
    how = (
        limits.temperature, limits.top_k, limits.top_p, limits.log_min_p, limits.seeds, limits.positions
    )  # fmt: skip
    options = {"MAX_SPLITS": MAX_SPLITS, "FAST": not is_interpreted()}
    stride, vocab, num_splits = logits.stride(0), chunks.vocab, chunks.num_splits
    draw_kernel[chunks.grid](
        logits, *found, *how, stride, vocab, chunks.chunk, num_splits, BLOCK=BLOCK, **options, num_warps=8
    )
    finish_kernel[(chunks.num_rows,)](
        logits, *found, *how, chunks.token_ids, chunks.is_finite, stride, vocab, num_splits,
        BLOCK=BLOCK, **options, num_warps=8,
    )  # fmt: skip
    return chunks.token_ids, chunks.is_finite


def _find_best(chunks: Chunks) -> None:
    best_kernel[chunks.grid](
        chunks.logits, chunks.best, chunks.best_ids, chunks.logits.stride(0), chunks.vocab, chunks.chunk,
        chunks.num_splits, BLOCK, num_warps=8,
    )  # fmt: skip


def _find_bounds(chunks: Chunks, limits: RowLimits, bounds: Tensor) -> None:
    """Fill `bounds` [R, 4] for rows with top-k or top-p, as `narrow_kernel` says."""
    num_rows, num_bins = chunks.num_rows, BINS["NUM_BINS"]
    sums = chunks.logits.new_zeros(num_rows * (num_bins + 2 * SUB_BINS + 3), dtype=torch.int32)
    counts, sub_counts, masses = torch.split(sums, [num_rows * num_bins, num_rows * 2 * SUB_BINS, num_rows * 3])
    masses = masses.view(torch.float32)
    bracket = sums.new_empty(num_rows, 3)
    best, ranks = (chunks.best, chunks.best_ids), (limits.top_k, limits.top_p)
    place = (chunks.logits.stride(0), chunks.vocab, chunks.chunk, chunks.num_splits, MAX_SPLITS)
    count_kernel[chunks.grid](
        chunks.logits, *best, counts, masses, limits.temperature, *ranks, *place, **BINS, BLOCK=BLOCK, num_warps=4
    )
    bracket_kernel[(num_rows,)](counts, masses, bracket, *ranks, chunks.vocab, **BINS, num_warps=4)
    refine_kernel[chunks.grid](
        chunks.logits, *best, bracket, sub_counts, masses, limits.temperature, *ranks, *place,
        **BINS, SUB_BINS=SUB_BINS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    narrow_kernel[(num_rows,)](
        counts, sub_counts, masses, bracket, bounds, *ranks, chunks.vocab, **BINS, SUB_BINS=SUB_BINS, num_warps=4
    )
