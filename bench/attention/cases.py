"""The cases of a bench: a sweep over attention shapes and lengths, as data. Imports no torch."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from kernels.vocabulary.buckets import bucket_of
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Dtype, Phase, flops, hbm_bytes_tiled

FIXED = "fixed"
LOG_NORMAL = "log-normal"
_SIGMA = 1.0  # of the logarithm of lengths: most prompts are short, a few are very long
_MIX_CONTEXT = 4096  # tokens: the mean context of a decode batch of mixed lengths


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One batch to measure. Sequence i has queries[i] query tokens, the last of its keys[i] positions."""

    shape: AttentionShape
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    mix: str = FIXED

    @property
    def flops(self) -> int:
        return sum(flops(self.shape, m, n) for m, n in zip(self.queries, self.keys, strict=True))

    @property
    def num_bytes(self) -> int:
        """HBM bytes when everything is read or written once."""
        return sum(hbm_bytes_tiled(self.shape, m, n) for m, n in zip(self.queries, self.keys, strict=True))

    @property
    def is_equal_lengths(self) -> bool:
        return len({*self.queries}) == 1 and len({*self.keys}) == 1

    @property
    def is_square(self) -> bool:
        """True when every sequence has as many queries as keys."""
        return self.queries == self.keys

    @property
    def flag_text(self) -> str:
        """The flags, such as "window 1024 sinks"; empty for plain causal attention."""
        shape = self.shape
        flags = [f"window {shape.window}"] if shape.window is not None else []
        flags += [f"softcap {shape.softcap:g}"] if shape.softcap is not None else []
        return " ".join([*flags, *(["sinks"] if shape.sinks else [])])

    def __str__(self) -> str:
        """One line, such as "prefill bf16 d128 32:8 32x512"; queries over keys where they differ."""
        shape, m, n = self.shape, max(self.queries), max(self.keys)
        lengths = f"{m}" if self.is_square else f"{m}/{n}"
        heads = f"{shape.num_heads}:{shape.num_kv_heads}"
        size = f"{len(self.queries)}x{lengths}" if self.mix == FIXED else f"{len(self.queries)} up to {lengths}"
        parts = [shape.phase.value, shape.dtype.value, f"d{shape.head_dim}", heads, size, self.flag_text]
        return " ".join(parts).rstrip()


@dataclass(frozen=True, slots=True)
class Sweep:
    """Every combination of these is a case.

    heads         (query heads, KV heads); None: 32 over 8, above a head dim of 128 16 over 4
    lengths       of prefill: sequences of one length, as many as make `total_tokens`, at least one
    mixes         numbers of sequences of log-normal lengths: `total_tokens` of prefill; decode over a mean of 4096
    chunks        new tokens of extend, of one sequence, over each of `extend_contexts` tokens cached before
    batches       sequences of decode, over each of `decode_contexts` tokens, the new ones included
    queries       new tokens of each sequence of decode: with drafted ones more than one
    """

    dtype: Dtype
    phases: tuple[Phase, ...] = PLANNED_PHASES
    head_dims: tuple[int, ...] = (64, 128, 256)
    heads: tuple[tuple[int, int], ...] | None = None
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    total_tokens: int = 16384
    mixes: tuple[int, ...] = (8, 64)
    chunks: tuple[int, ...] = (512, 2048)
    extend_contexts: tuple[int, ...] = (8192, 32768)
    batches: tuple[int, ...] = (1, 8, 64, 256)
    decode_contexts: tuple[int, ...] = (1024, 4096, 32768)
    queries: tuple[int, ...] = (1,)
    windows: tuple[int | None, ...] = (None,)
    softcap: float | None = None
    sinks: bool = False
    page_size: int = 64
    seed: int = 0


def quick_sweep(dtype: Dtype) -> Sweep:
    """A few cases that take seconds on a CPU."""
    return Sweep(
        dtype=dtype,
        head_dims=(64,),
        heads=((4, 2),),
        lengths=(64, 128),
        total_tokens=128,
        mixes=(3,),
        chunks=(16,),
        extend_contexts=(64,),
        batches=(2,),
        decode_contexts=(64, 128),
        page_size=16,
    )


def cases_of(sweep: Sweep) -> list[BenchCase]:
    """Every case, phase by phase and head dim by head dim. Raises ValueError for heads or lengths that cannot be."""
    found: list[BenchCase] = []
    for phase, head_dim in product(sweep.phases, sweep.head_dims):
        for heads, window in product(_heads(sweep, head_dim), sweep.windows):
            for mix, queries, keys in _lengths(sweep, phase):
                shape = _shape(sweep, phase, head_dim, heads, window, (max(queries), max(keys)))
                found.append(BenchCase(shape, queries, keys, mix))
    return found


def log_normal_lengths(num_seqs: int, total: int, seed: int) -> tuple[int, ...]:
    """`num_seqs` lengths of at least 1 that sum to `total`, by the seed. Raises ValueError for too few."""
    if not 0 < num_seqs <= total:
        raise ValueError(f"{total} tokens cannot be {num_seqs} sequences")
    draw = random.Random(seed)
    weights = [draw.lognormvariate(0.0, _SIGMA) for _ in range(num_seqs)]
    scale = (total - num_seqs) / math.fsum(weights)
    lengths = [1 + int(weight * scale) for weight in weights]
    lengths[lengths.index(max(lengths))] += total - sum(lengths)
    return tuple(lengths)


def _heads(sweep: Sweep, head_dim: int) -> tuple[tuple[int, int], ...]:
    heads = sweep.heads if sweep.heads is not None else (((16, 4),) if head_dim > 128 else ((32, 8),))
    for num_heads, num_kv_heads in heads:
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads")
    return heads


def _lengths(sweep: Sweep, phase: Phase) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(mix, queries, keys) of every case of the phase."""
    if phase is Phase.PREFILL:
        for length in sweep.lengths:
            lengths = (length,) * max(1, sweep.total_tokens // length)
            yield FIXED, lengths, lengths
        for num_seqs in sweep.mixes:
            lengths = log_normal_lengths(num_seqs, sweep.total_tokens, sweep.seed)
            yield LOG_NORMAL, lengths, lengths
    elif phase is Phase.EXTEND:
        for chunk, context in product(sweep.chunks, sweep.extend_contexts):
            yield FIXED, (chunk,), (context + chunk,)
    else:
        for batch, context, queries in product(sweep.batches, sweep.decode_contexts, sweep.queries):
            yield FIXED, (queries,) * batch, (context,) * batch
        mean = min(_MIX_CONTEXT, max(sweep.decode_contexts, default=_MIX_CONTEXT))
        for num_seqs in sweep.mixes:
            yield LOG_NORMAL, (1,) * num_seqs, log_normal_lengths(num_seqs, num_seqs * mean, sweep.seed)


def _shape(
    sweep: Sweep,
    phase: Phase,
    head_dim: int,
    heads: tuple[int, int],
    window: int | None,
    longest: tuple[int, int],
) -> AttentionShape:
    return AttentionShape(
        phase=phase,
        dtype=sweep.dtype,
        kv_dtype=sweep.dtype,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        query_bucket=bucket_of(longest[0]),
        context_bucket=bucket_of(longest[1]),
        page_size=None if phase is Phase.PREFILL else sweep.page_size,
        window=window,
        softcap=sweep.softcap,
        sinks=sweep.sinks,
    )
