"""Batches for attention tests: packed and paged, with NaN in every place that no kernel may read."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.reference.compare import Errors, compare
from kernels.vocabulary.path import RunAttention

FIXED_SEEDS = range(20)  # of random batches; more come from `fresh_seeds`
POISON_PAGE = 2**30  # far outside any pool: reading it is a crash
NAN = float("nan")


def fresh_seeds(seconds: float = 15.0) -> Iterator[int]:
    """Yield new random seeds for some time, at least one."""
    deadline = time.monotonic() + seconds
    while True:
        yield random.SystemRandom().randrange(2**32)
        if time.monotonic() > deadline:
            return


@dataclass(frozen=True, slots=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    batch: AttentionBatch


def edges(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def packed(
    query_lens: Sequence[int],
    device: torch.device,
    *,
    key_lens: Sequence[int] | None = None,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float16,
) -> Inputs:
    """Packed sequences; key rows past the last sequence are NaN. heads = (query heads, key heads)."""
    key_lens = query_lens if key_lens is None else key_lens
    q = torch.randn(sum(query_lens), heads[0], head_dim, device=device).to(dtype)
    k, v = torch.randn(2, sum(key_lens) + 70, heads[1], head_dim, device=device).to(dtype)
    k[sum(key_lens) :], v[sum(key_lens) :] = NAN, NAN
    batch = AttentionBatch(
        edges(query_lens, device), max(query_lens), max(key_lens), cu_seqlens_k=edges(key_lens, device)
    )
    return Inputs(q, k, v, batch)


def paged(
    query_lens: Sequence[int],
    contexts: Sequence[int],
    device: torch.device,
    *,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float16,
    page_size: int = 16,
) -> Inputs:
    """Contexts in shuffled pages; unused slots are NaN and the tails of the page table poisoned."""
    num_pages = [-(-context // page_size) for context in contexts]
    pool = sum(num_pages) + 3
    k, v = torch.randn(2, pool, page_size, heads[1], head_dim, device=device).to(dtype)
    numbers = torch.randperm(pool)
    table = torch.full((len(contexts), max(num_pages) + 2), POISON_PAGE, dtype=torch.int32)
    is_used = torch.zeros(pool, page_size, dtype=torch.bool)
    for sequence, context in enumerate(contexts):
        of_sequence, numbers = numbers[: num_pages[sequence]], numbers[num_pages[sequence] :]
        table[sequence, : num_pages[sequence]] = of_sequence
        is_used[of_sequence] = (torch.arange(num_pages[sequence] * page_size) < context).view(-1, page_size)
    unused = ~is_used[:, :, None, None].to(device)
    # At once: a page after the other took some thousand launches a batch.
    k, v = (pages.masked_fill_(unused, NAN) for pages in (k, v))
    batch = AttentionBatch(
        edges(query_lens, device),
        max(query_lens),
        max(contexts),
        page_table=table.to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
    )
    return Inputs(torch.randn(sum(query_lens), heads[0], head_dim, device=device).to(dtype), k, v, batch)


def flags_for(inputs: Inputs, *names: str, window: int | None = None, causal: bool = True) -> AttentionFlags:
    """Flags with the values a model would have; names among softcap, sinks and spans."""
    q = inputs.q
    flags = AttentionFlags(q.shape[2] ** -0.5, causal, window)
    if "softcap" in names:
        flags = replace(flags, softcap=2.0)  # small, so that most scores feel it
    if "sinks" in names:
        flags = replace(flags, sinks=torch.randn(q.shape[1], device=q.device))
    if "spans" in names:
        lo = torch.randint(0, inputs.batch.max_context, (q.shape[0],), device=q.device, dtype=torch.int32)
        length = torch.randint(0, 40, (q.shape[0],), device=q.device, dtype=torch.int32)
        flags = replace(flags, spans=torch.stack([lo, lo + length], dim=1).contiguous())
    return flags


def attend(run: RunAttention, inputs: Inputs, flags: AttentionFlags) -> Tensor:
    """Run a path into an output full of NaN."""
    out = torch.full_like(inputs.q[..., : inputs.v.shape[-1]], NAN)
    run(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)
    return out


def errors_of(run: RunAttention, inputs: Inputs, flags: AttentionFlags) -> Errors:
    return compare(attend(run, inputs, flags), inputs.q, inputs.k, inputs.v, inputs.batch, flags)


def assert_right(run: RunAttention, inputs: Inputs, flags: AttentionFlags) -> None:
    """Assert the relative rule and the absolute cap (the inputs have unit variance)."""
    errors = errors_of(run, inputs, flags)
    assert errors.is_within_rule, errors
