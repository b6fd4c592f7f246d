"""Hostile inputs for one shape: the batches on which wrong kernels go wrong.

Around everything that a kernel may read lies NaN: before and behind queries, keys and values, in the unused slots of a
sequence's last page, in a spare page, and page tables name that spare page past a sequence's last one. Around the
output lies a mark that must not change, and the output itself starts as NaN.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.indexed import with_index
from kernels.fp8_cache import pages as fp8_pages
from kernels.system.device import torch_dtype
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.shape import AttentionShape, Mask, Phase
from kernels.vocabulary.value_shape import Indexer, indexer_of, value_dim_of, values_of
from qualification.measure.inputs.guard import guarded
from qualification.measure.inputs.index_inputs import index_of, index_sizes, small_integers

CPU_MAX_QUERY = 2048  # tokens; on a CPU longer buckets are tested at this length, or just inside if they start beyond
CPU_MAX_CONTEXT = 4096
_MAX_ROWS = 192  # rows of a case that are compared in fp64: the edges of every sequence, the rest drawn
# Elements that are compared in fp64 and, in decode, computed, where a shape has few heads or a small head dim: with
# fewer the mean signed error of 16 bits does not show an output that is off by 1e-3.
_MIN_ELEMENTS = 2**14
_FEW_COLUMNS = 64  # of an output row, over all heads: below, prompts and chunks too need more rows than they have
_MAX_SHORT = 1024  # tokens of the longest sequence in every case but `long`
_EDGES = (64, 128)  # tokens: the tiles that kernels commonly use


@dataclass(frozen=True, slots=True)
class Case:
    """One input. `rows` [n] int64, ascending, are compared with the oracle; the others only must be finite.

    near  the same numbers in a pool of few pages, of which the truth is computed; None: of this input itself
    """

    name: str
    seed: int
    q: Tensor
    k: Tensor
    v: Tensor
    batch: AttentionBatch
    flags: AttentionFlags
    rows: Tensor
    near: "Case | None" = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Queries and keys of one sequence."""

    queries: int
    keys: int


def longest_lengths(shape: AttentionShape, *, is_cpu: bool) -> Lengths:
    """The longest sequence that is tested: the buckets' upper edges (2x the lower without an end), on a CPU less."""
    keys = _longest(shape.context_bucket, CPU_MAX_CONTEXT if is_cpu else None)
    if shape.phase is Phase.DECODE:
        return Lengths(1, keys)
    if shape.phase is Phase.PREFILL:
        keys = _longest(shape.context_bucket, CPU_MAX_QUERY if is_cpu else None)
        return Lengths(keys, keys)
    queries = _longest(shape.query_bucket, CPU_MAX_QUERY if is_cpu else None)
    return Lengths(min(queries, keys), keys)


def cases(shape: AttentionShape, device: torch.device, *, seed: int) -> Iterator[Case]:
    """Every input for this shape, smallest first. Made one at a time, so that only one is in memory."""
    longest = longest_lengths(shape, is_cpu=device.type == "cpu")
    few = _few(shape, longest)
    yield _case("ragged", shape, _ragged(shape, longest), device, seed=seed)
    yield _case("large_logits", shape, few, device, seed=seed + 1, query_factor=30.0)
    yield _case("outlier_key", shape, few, device, seed=seed + 2, has_outlier=True)
    if (indexer := indexer_of(shape)) is not None:
        edges = _choice_edges(shape, longest, indexer)
        yield _case("choice_edges", shape, edges, device, seed=seed + 7)
        yield _case("tied_scores", shape, edges, device, seed=seed + 8, is_tied=True)
    if shape.window is not None and _MAX_SHORT < shape.window + 1 < longest.keys:
        yield _case("window_edges", shape, _window_edges(shape, longest), device, seed=seed + 3)
    if shape.phase is Phase.DECODE or shape.num_heads * shape.head_dim < _FEW_COLUMNS:
        yield _case("many_rows", shape, _many_rows(shape, longest), device, seed=seed + 6)
    yield long_case(shape, device, seed=seed + 4)


def long_case(shape: AttentionShape, device: torch.device, *, seed: int, num_seqs: int = 1) -> Case:
    """`num_seqs` sequences of the longest tested length. Alone it is what is timed."""
    longest = longest_lengths(shape, is_cpu=device.type == "cpu")
    return _case("long", shape, [longest] * num_seqs, device, seed=seed)


def few_case(shape: AttentionShape, device: torch.device, *, seed: int) -> Case:
    """Two short sequences."""
    return _case("few", shape, _few(shape, longest_lengths(shape, is_cpu=device.type == "cpu")), device, seed=seed)


def many_case(shape: AttentionShape, device: torch.device, *, seed: int, num_seqs: int, num_tokens: int) -> Case:
    """`num_seqs` prompts of `num_tokens` each: an output of so many tiles that few of their rows are drawn."""
    return _case("many", shape, [Lengths(num_tokens, num_tokens)] * num_seqs, device, seed=seed)


def _longest(bucket: Bucket, cap: int | None) -> int:
    hi = bucket.hi if bucket.hi is not None else 2 * bucket.lo
    return hi if cap is None else min(hi, max(cap, bucket.lo + 1))


def _edges(shape: AttentionShape, limit: int) -> list[int]:
    """Lengths on and beside every border up to `limit`: tiles, pages, the window, and the limit itself."""
    borders = {*_EDGES, limit, *((shape.page_size,) if shape.page_size else ())}
    if shape.window is not None:
        borders |= {shape.window}
    if (indexer := indexer_of(shape)) is not None:
        borders |= {indexer.num_keys}
    lengths = {1, 2, *(border + step for border in borders for step in (-1, 0, 1))}
    return sorted(length for length in lengths if 1 <= length <= limit)


def _ragged(shape: AttentionShape, longest: Lengths) -> list[Lengths]:
    """Short sequences of awkward lengths, long ones first and last, and one that is empty."""
    keys = _edges(shape, min(longest.keys, _MAX_SHORT))
    if shape.phase is Phase.PREFILL:
        sequences = [Lengths(length, length) for length in keys]
    elif shape.phase is Phase.DECODE:
        sequences = [Lengths(1, length) for length in keys]
    else:
        queries = _edges(shape, min(longest.queries, 130))
        # The strides are coprime to most list lengths, so that every edge of queries meets several of keys.
        sequences = [Lengths(min(queries[(7 * n) % len(queries)], length), length) for n, length in enumerate(keys)]
    middle = len(sequences) // 2
    return [sequences[-1], *sequences[:middle], Lengths(0, 0), *sequences[middle:]]


def _many_rows(shape: AttentionShape, longest: Lengths) -> list[Lengths]:
    """Short sequences, of as many query rows as the mean signed error needs."""
    most = 1 if shape.phase is Phase.DECODE else min(64, longest.queries)
    num_rows = max(64, _MIN_ELEMENTS // (shape.num_heads * shape.head_dim))
    keys = [min(longest.keys, 32 + 37 * index % 99) for index in range(-(-num_rows // most))]
    return [Lengths(length if shape.phase is Phase.PREFILL else min(most, length), length) for length in keys]


def _few(shape: AttentionShape, longest: Lengths) -> list[Lengths]:
    keys = min(longest.keys, _MAX_SHORT // 2)
    if shape.phase is Phase.DECODE:
        return [Lengths(1, keys), Lengths(1, max(1, keys // 3))]
    queries = keys if shape.phase is Phase.PREFILL else min(longest.queries, keys, 100)
    return [Lengths(queries, keys), Lengths(max(1, queries // 3), max(1, keys // (3 if queries == keys else 2)))]


def _window_edges(shape: AttentionShape, longest: Lengths) -> list[Lengths]:
    """A window too long for the ragged case: contexts on both sides of it."""
    assert shape.window is not None
    keys = [shape.window + step for step in (-1, 0, 1, 65) if shape.window + step <= longest.keys]
    if shape.phase is Phase.PREFILL:
        return [Lengths(keys[-1], keys[-1])]
    return [Lengths(1 if shape.phase is Phase.DECODE else min(longest.queries, 65), length) for length in keys]


def _choice_edges(shape: AttentionShape, longest: Lengths, indexer: Indexer) -> list[Lengths]:
    """Contexts on both sides of the most keys that a query attends to, and up to four times as many."""
    keys = {min(indexer.num_keys + step, longest.keys) for step in (-1, 0, 1, 67, 3 * indexer.num_keys)}
    lengths = sorted(keys, reverse=True)
    if shape.phase is Phase.PREFILL:
        return [Lengths(it, it) for it in lengths[:2]]
    return [Lengths(1 if shape.phase is Phase.DECODE else min(longest.queries, 65, it), it) for it in lengths]


def _case(
    name: str,
    shape: AttentionShape,
    lengths: list[Lengths],
    device: torch.device,
    *,
    seed: int,
    query_factor: float = 1.0,
    has_outlier: bool = False,
    is_tied: bool = False,
) -> Case:
    generator = torch.Generator(device).manual_seed(seed)
    num_queries = sum(length.queries for length in lengths)
    q = _normal(num_queries, shape.num_heads, shape, generator)
    q *= query_factor
    num_keys = [length.keys for length in lengths]
    keys = _normal(sum(num_keys), shape.num_kv_heads, shape, generator)
    indexer = indexer_of(shape)
    if indexer is not None:
        of_indexer = small_integers(sum(num_keys), 1, index_sizes(indexer)[1], generator, keys)
        keys = _beside(keys, of_indexer)
    values = _normal(sum(num_keys), shape.num_kv_heads, shape, generator, value_dim_of(shape))
    if shape.kv_dtype is FP8:  # what no scale is like its neighbour's in
        for part, spread in ((keys, 0.5), (values, 2.0)):
            factors = torch.randn(*part.shape[:2], 1, generator=generator, device=device)
            part.mul_(factors.mul_(spread).exp2_())
    if has_outlier:
        for end, count in zip(accumulate(num_keys), num_keys, strict=True):
            middle = end - count + count // 2
            keys[middle : middle + 1] *= 20.0
    if shape.page_size is None:
        k, v, batch = keys, values, _packed(num_keys, device)
    else:
        k, v, batch = _paged(shape, lengths, keys, values, generator)
    if (of_shape := values_of(shape)) is not None and of_shape.is_latent:
        v = k[..., : of_shape.dim]
    index_keys = k[..., shape.head_dim :]
    if indexer is not None and not indexer.heads:
        k = k[..., : shape.head_dim]
    # Kernels choose variants by these bounds, so even short sequences get the bounds of the shape's longest.
    longest = longest_lengths(shape, is_cpu=device.type == "cpu")
    batch = replace(batch, max_seqlen_q=longest.queries, max_context=longest.keys)
    flags = _flags(shape, lengths, generator)
    if indexer is not None:
        index = index_of(indexer, shape, num_queries, index_keys, batch, generator, is_tied=is_tied)
        flags = with_index(flags, index)
    return Case(
        name=name,
        seed=seed,
        q=q,
        k=k,
        v=v,
        batch=batch,
        flags=flags,
        rows=_rows(lengths, seed, device, max(_MAX_ROWS, _MIN_ELEMENTS // (shape.num_heads * shape.head_dim))),
    )


def _normal(
    rows: int, num_heads: int, shape: AttentionShape, generator: torch.Generator, dim: int | None = None
) -> Tensor:
    """[rows, num_heads, dim] of unit variance, NaN before and behind it in its storage; dim None: that of a key."""
    sizes = 0, num_heads, dim or shape.head_dim
    like = torch.empty(sizes, dtype=torch_dtype(shape.dtype), device=generator.device)
    _, view = guarded(rows, like, 0.0, math.nan)
    return view.normal_(generator=generator)


def _beside(keys: Tensor, others: Tensor) -> Tensor:
    """Return rows of both, one behind the other, NaN before and behind them in their storage."""
    joined = torch.cat((keys, others), dim=2)
    _, found = guarded(joined.shape[0], joined[:0], 0.0, math.nan)
    return found.copy_(joined)


def _packed(num_keys: list[int], device: torch.device) -> AttentionBatch:
    cu_seqlens = _cumulative(num_keys, device)
    return AttentionBatch(cu_seqlens, max(num_keys), max(num_keys), cu_seqlens_k=cu_seqlens)


def _paged(
    shape: AttentionShape, lengths: list[Lengths], keys: Tensor, values: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, AttentionBatch]:
    """Scattered pages; page 0 is the spare one, which is all NaN and fills every tail of the page table."""
    assert shape.page_size is not None
    device, size = generator.device, shape.page_size
    counts = [-(-length.keys // size) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator, device=device) + 1
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)
    places = torch.cat([torch.arange(count) for count in counts]).to(device)
    table = torch.zeros(len(lengths), max(counts) + 3, dtype=torch.int32, device=device)
    table[owners, places] = order.int()
    num_keys = torch.tensor([length.keys for length in lengths])
    positions = torch.cat([torch.arange(length.keys) for length in lengths]).to(device)
    slots = table[torch.repeat_interleave(torch.arange(len(lengths)), num_keys).to(device), positions // size]
    slots = slots.long() * size + positions % size
    pages = []
    for part in (keys, values):
        # Keys travel in the model's dtype and are stored in the cache's.
        dtype = torch_dtype(shape.kv_dtype)
        if shape.kv_dtype is FP8:
            store = fp8_pages.allocate(sum(counts) + 2, size, part.shape[1], part.shape[2], device)
            fp8_pages.memory_of(store).fill_(0xFF)  # NaN as e4m3, and as fp32
            fp8_pages.write(part, store, slots)
            pages.append(store)
            continue
        store = torch.full((sum(counts) + 2, size, *part.shape[1:]), math.nan, dtype=dtype, device=device)
        store.view(-1, *part.shape[1:])[slots] = part.to(dtype)
        pages.append(store)
    batch = AttentionBatch(
        _cumulative([length.queries for length in lengths], device),
        max(length.queries for length in lengths),
        max(length.keys for length in lengths),
        page_table=table,
        context_lens=num_keys.int().to(device),
    )
    return pages[0], pages[1], batch


def _flags(shape: AttentionShape, lengths: list[Lengths], generator: torch.Generator) -> AttentionFlags:
    sinks = torch.empty(shape.num_heads, dtype=torch.float32, device=generator.device) if shape.sinks else None
    return AttentionFlags(
        scale=_scale(shape),
        causal=shape.mask is not Mask.FULL,
        window=shape.window,
        softcap=shape.softcap,
        sinks=None if sinks is None else sinks.normal_(generator=generator),
        spans=_spans(lengths, generator.device) if shape.mask is Mask.SPANS else None,
    )


def _scale(shape: AttentionShape) -> float:
    """Return what scores are multiplied by: nothing that a kernel could take from the shape in place of what is given.

    Models have other scales than the root of head_dim. Queries of DeepSeek's have 128 numbers that are not rotated for
    a latent of 512, before they are absorbed.
    """
    values = values_of(shape)
    if values is not None and values.is_latent:
        return 1 / math.sqrt(values.dim / 4 + shape.head_dim - values.dim)
    return 0.9 / math.sqrt(shape.head_dim)


def _spans(lengths: list[Lengths], device: torch.device) -> Tensor:
    """Make one image in each sequence, over the third quarter of its positions, that starts and ends on no tile."""
    rows = []
    for length in lengths:
        lo, hi = length.keys // 2, length.keys * 3 // 4
        first = length.keys - length.queries
        rows += [(lo, hi) if lo <= first + row < hi else (0, 0) for row in range(length.queries)]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(-1, 2)


def _rows(lengths: list[Lengths], seed: int, device: torch.device, max_rows: int) -> Tensor:
    """The rows to compare: all of a small case; else each sequence's ends, tile edges, and rows drawn by the seed."""
    total = sum(length.queries for length in lengths)
    if total <= max_rows:
        return torch.arange(total, device=device)
    chosen: set[int] = set()
    for length, end in zip(lengths, accumulate(length.queries for length in lengths), strict=True):
        start = end - length.queries
        offsets = {0, 1, 63, 64, 127, 128, length.queries - 2, length.queries - 1}
        chosen |= {start + offset for offset in offsets if 0 <= offset < length.queries}
    generator = torch.Generator().manual_seed(seed)
    chosen |= set(torch.randint(total, (max(0, max_rows - len(chosen)),), generator=generator).tolist())
    return torch.tensor(sorted(chosen), dtype=torch.int64, device=device)


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
