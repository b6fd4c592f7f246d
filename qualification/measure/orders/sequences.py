"""Sequences whose rows come again in every batch of attention, and neighbours of any length and content beside them.

Positions of a sequence are computed by prefill, by chunks and by decode from the same queries, keys and values, so that
all phases and all lengths of a batch must give the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.indexed import Index, with_index
from kernels.system.device import torch_dtype
from kernels.vocabulary.path import RunAttention
from kernels.vocabulary.shape import AttentionShape, Mask
from kernels.vocabulary.value_shape import indexer_of, value_dim_of, values_of
from qualification.measure.inputs.attention_inputs import longest_lengths
from qualification.measure.inputs.guard import guarded

_PERIOD = 23  # keys, whose sum the next ones take back
# How much they leave of it, by columns in turn: nothing but roundings, and sums that 16 bits hold well.
_RESTS = (0.0, 2.0**-11, 2.0**-8, 2.0**-5)
# Tokens of sequences: whole pairs of periods, within each of the shorter buckets and beyond two parts of 1,024 keys.
_LENGTHS = (4 * _PERIOD, 20 * _PERIOD, 46 * _PERIOD, 98 * _PERIOD)
_WHOLE_UP_TO, _WHOLE_UP_TO_CPU = 98 * _PERIOD, 2048  # tokens: of longer sequences some rows alone are kept
_EDGES = (1, 16, 64, 128, 256, 512, 640, 1024, 2048)  # keys: of pages, tiles and parts
_NEIGHBOUR_PAGES = 24
_SEED = 109
_NOT_WRITTEN = -(2**30)  # stands in a choice that is not written yet


class Content(Enum):
    """The numbers of a neighbour: queries, keys and values."""

    ORDINARY = "ordinary"
    NAN = "NaN"
    HUGE = "huge"
    ZERO = "zero"


@dataclass(frozen=True, slots=True)
class Part:
    """The last `queries` of the first `keys` tokens of a sequence of the pool, or of a neighbour."""

    of: int | Content  # the sequence, by its number of tokens
    keys: int
    queries: int


class Pool:
    """The sequences of one class of shapes: the same for every phase, bucket and page size."""

    def __init__(self, shape: AttentionShape, device: torch.device, *, seed: int) -> None:
        self.shape = shape
        self.value_dim = value_dim_of(shape)
        values = values_of(shape)
        self.is_latent = values is not None and values.is_latent
        self.indexer = indexer_of(shape)
        # Numbers of a token that a path reads behind its key: an indexer's, where the layer has one of its own.
        self.key_dim = shape.head_dim + (0 if self.indexer is None else self.indexer.dim)
        self.device = device
        self._seed = seed
        is_cpu = device.type == "cpu"
        bucket = shape.context_bucket
        longest = longest_lengths(shape, is_cpu=is_cpu).keys
        last = bucket.lo + 1 if is_cpu else longest
        # A CPU's paths, in parts of few keys, need no more of them to be in another order.
        wanted = _LENGTHS[:2] if is_cpu else _LENGTHS
        self.lengths = tuple(sorted({it for it in wanted if it <= longest} | {last}))
        self.longest = last
        self._dtype, self._kv_dtype = torch_dtype(shape.dtype), torch_dtype(shape.kv_dtype)
        self._rows = {length: self._made(length) for length in self.lengths}
        self._indices = {} if self.indexer is None else {length: self._made_index(length) for length in self.lengths}
        self._random = torch.Generator(device).manual_seed(seed + _SEED)
        sinks = torch.randn(shape.num_heads, generator=self._random, device=device) if shape.sinks else None
        self._flags = AttentionFlags(
            scale=shape.head_dim**-0.5, causal=shape.mask is not Mask.FULL, window=shape.window,
            softcap=shape.softcap, sinks=sinks,
        )  # fmt: skip
        self._pages = None if shape.page_size is None else _Pages(self, shape.page_size)

    def some_rows(self, length: int) -> list[int]:
        """Return positions of a sequence that every phase computes: edges of tiles, where sums cancel, and the last."""
        edges = {0, *(edge + step for edge in _EDGES for step in (-1, 0)), length // 2, length - 2, length - 1}
        if self.is_kept(length):
            edges |= set(range(2 * _PERIOD - 1, length, 2 * _PERIOD))
        else:
            edges = {length // 2, length - 2, length - 1}
        if self.shape.window is not None and self.is_kept(length):
            edges |= {self.shape.window + step for step in (-1, 0, 1)}
        return sorted(edge for edge in edges if 0 <= edge < length)

    def is_kept(self, length: int) -> bool:
        """Return whether all rows of the sequence are compared, not `some_rows` alone."""
        return length <= (_WHOLE_UP_TO_CPU if self.device.type == "cpu" else _WHOLE_UP_TO)

    def run(self, run: RunAttention, parts: Sequence[Part]) -> Tensor:
        """Return the output [queries of all parts, heads, head_dim] of one call on a batch of these parts."""
        queries = self._between_nan([self._queries(part) for part in parts], self._dtype)
        ends = _cumulative([part.queries for part in parts], self.device)
        longest = max(part.queries for part in parts), max(part.keys for part in parts)
        if self._pages is None:
            packed = [self._keys(part) for part in parts]
            keys, values = (self._between_nan([it[index] for it in packed], self._dtype) for index in (0, 1))
            values = keys[..., : self.value_dim] if self.is_latent else values
            batch = AttentionBatch(ends, *longest, cu_seqlens_k=ends)
        else:
            keys, values = self._pages.keys, self._pages.values
            values = keys[..., : self.value_dim] if self.is_latent else values
            table = self._pages.table([(part.of, part.keys) for part in parts])
            lengths = torch.tensor([part.keys for part in parts], dtype=torch.int32, device=self.device)
            batch = AttentionBatch(ends, *longest, page_table=table, context_lens=lengths)
        out = queries.new_empty(*queries.shape[:2], values.shape[-1])
        flags = self._flags_of(parts)
        run(queries, keys, values, batch, flags if self.indexer is None else with_index(flags, self._index(parts)), out)
        return out

    def _made(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """(queries, keys, values) of a sequence. Each second period of keys repeats the one before, its values negated.

        What one period adds the next takes back, but for a rest: another order of the sum then changes more bits. Of
        latents every second number is so, and 0 in the queries.
        """
        random = torch.Generator(self.device).manual_seed(self._seed + _SEED + length)
        shape = self.shape

        def randn(heads: int, dim: int) -> Tensor:
            return torch.randn(length, heads, dim, generator=random, device=self.device)

        queries, keys = randn(shape.num_heads, shape.head_dim), randn(shape.num_kv_heads, shape.head_dim)
        values, rest = (randn(shape.num_kv_heads, self.value_dim) for _ in range(2))
        values = values.to(self._dtype).float()  # rounded before they are negated
        place = torch.arange(length, device=self.device)
        twin = place[(place // _PERIOD) % 2 == 1]
        keys[twin] = keys[twin - _PERIOD]
        column = torch.arange(self.value_dim, device=self.device)
        rests = torch.tensor(_RESTS, device=self.device)[(column // 2 if self.is_latent else column) % len(_RESTS)]
        values[twin] = rests * rest[twin] - values[twin - _PERIOD]
        if self.is_latent:
            odd = column[column % 2 == 1]
            keys[..., odd], queries[..., odd] = values[..., odd], 0.0
            values = keys[..., : self.value_dim]
        if self.key_dim > shape.head_dim:
            keys = torch.cat([keys, randn(shape.num_kv_heads, self.key_dim - shape.head_dim)], dim=2)
        return queries.to(self._dtype), keys.to(self._dtype), values.to(self._dtype)

    def _made_index(self, length: int) -> Index:
        """Return what chooses a sequence's keys; of a choice that is given the first keys and the latest ones."""
        indexer, random = self.indexer, torch.Generator(self.device).manual_seed(self._seed + _SEED - length)
        assert indexer is not None, "the shape has one"
        place = torch.arange(indexer.num_keys, device=self.device)
        position = torch.arange(length, device=self.device)[:, None]
        skipped = (position + 1 - indexer.num_keys).clamp(min=0)
        chosen = torch.where(place < indexer.num_keys // 2, place, place + skipped)
        chosen = chosen.masked_fill(chosen > position, -1).int()
        if not indexer.heads:
            return Index(chosen)
        queries = torch.randn(length, indexer.heads, indexer.dim, generator=random, device=self.device)
        weights = torch.randn(length, indexer.heads, generator=random, device=self.device)
        return Index(chosen, queries.to(self._dtype), weights)

    def _index(self, parts: Sequence[Part]) -> Index:
        """Return what chooses the keys of a batch's queries: neighbours' are those of the longest sequence, and NaN."""
        found = []
        for part in parts:
            of = self._indices[part.of if isinstance(part.of, int) else self.lengths[-1]]
            rows = of.rows(slice(part.keys - part.queries, part.keys))
            if part.of is Content.NAN and rows.queries is not None:
                rows = Index(rows.chosen, rows.queries * torch.nan, rows.weights)
            found.append(rows)
        chosen = torch.cat([it.chosen for it in found])
        if found[0].queries is None:
            return Index(chosen)
        queries = self._between_nan([it.queries for it in found if it.queries is not None], self._dtype)
        weights = torch.cat([it.weights for it in found if it.weights is not None])
        return Index(torch.full_like(chosen, _NOT_WRITTEN), queries, weights)

    def sequence(self, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, kv_heads, head_dim] of a sequence."""
        return self._rows[length][1:]

    def content(self, content: Content, *sizes: int) -> Tensor:
        """Return a neighbour's numbers, in the model's dtype."""
        largest = torch.finfo(self._dtype).max
        found = torch.randn(*sizes, generator=self._random, device=self.device)
        if content is Content.NAN:
            found[:] = torch.nan
        elif content is Content.HUGE:
            found = found.sign() * largest
        elif content is Content.ZERO:
            found[:] = 0
        return found.to(self._dtype)

    def _queries(self, part: Part) -> Tensor:
        if isinstance(part.of, Content):
            return self.content(part.of, part.queries, self.shape.num_heads, self.shape.head_dim)
        return self._rows[part.of][0][part.keys - part.queries : part.keys]

    def _keys(self, part: Part) -> tuple[Tensor, Tensor]:
        if isinstance(part.of, Content):
            sizes = part.keys, self.shape.num_kv_heads
            keys, values = (self.content(part.of, *sizes, dim) for dim in (self.key_dim, self.value_dim))
            return keys, values
        keys, values = self.sequence(part.of)
        return keys[: part.keys], values[: part.keys]

    def _between_nan(self, rows: list[Tensor], dtype: torch.dtype) -> Tensor:
        whole = torch.cat(rows)
        like = torch.empty(0, *whole.shape[1:], dtype=dtype, device=self.device)
        _, view = guarded(whole.shape[0], like, 0.0, torch.nan)
        return view.copy_(whole)

    def _flags_of(self, parts: Sequence[Part]) -> AttentionFlags:
        """Where images are possible, neighbours have one over their first half, and sequences of the pool none."""
        if self.shape.mask is not Mask.SPANS:
            return self._flags
        rows = []
        for part in parts:
            half = part.keys // 2 if isinstance(part.of, Content) else 0
            first = part.keys - part.queries
            rows += [(0, half) if first + row < half else (0, 0) for row in range(part.queries)]
        spans = torch.tensor(rows, dtype=torch.int32, device=self.device).reshape(-1, 2)
        flags = self._flags
        return AttentionFlags(flags.scale, flags.causal, flags.window, flags.softcap, flags.sinks, spans)


class _Pages:
    """Scattered pages of all sequences and of neighbours, which share a few. Page 0 is spare, and all NaN."""

    def __init__(self, pool: Pool, size: int) -> None:
        self._device = pool.device
        shape, kv_dtype = pool.shape, torch_dtype(pool.shape.kv_dtype)
        counts = {length: -(-length // size) for length in pool.lengths}
        total = sum(counts.values()) + _NEIGHBOUR_PAGES * len(Content) + 1
        random = torch.Generator(pool.device).manual_seed(_SEED)
        numbers = torch.randperm(total - 1, generator=random, device=pool.device).int() + 1
        sizes, dims = (total, size, shape.num_kv_heads), (pool.key_dim, pool.value_dim)
        self.keys, self.values = (
            torch.full((*sizes, dim), torch.nan, dtype=kv_dtype, device=pool.device) for dim in dims
        )
        self._pages: dict[int | Content, Tensor] = {}
        used = 0
        for of in (*pool.lengths, *Content):
            count = counts[of] if isinstance(of, int) else _NEIGHBOUR_PAGES
            pages = self._pages[of] = numbers[used : used + count]
            used += count
            slots = (pages.long()[:, None] * size + torch.arange(size, device=pool.device)).flatten()
            filled = slots[:of] if isinstance(of, int) else slots
            rows = filled.numel(), shape.num_kv_heads
            parts = pool.sequence(of) if isinstance(of, int) else tuple(pool.content(of, *rows, dim) for dim in dims)
            for store, part in zip((self.keys, self.values), parts, strict=True):
                store.flatten(0, 1)[filled] = part.to(kv_dtype)
        self._size = size

    def table(self, sequences: Sequence[tuple[int | Content, int]]) -> Tensor:
        """Page numbers [sequences, pages of the longest + 3]; behind a sequence's last page stands the spare one."""
        counts = [-(-keys // self._size) for _, keys in sequences]
        table = torch.zeros(len(sequences), max(counts) + 3, dtype=torch.int32, device=self._device)
        for row, ((of, _), count) in enumerate(zip(sequences, counts, strict=True)):
            pages = self._pages[of]
            repeats = 1 if isinstance(of, int) else -(-count // pages.numel())
            table[row, :count] = pages.repeat(repeats)[:count]
        return table


def _cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
