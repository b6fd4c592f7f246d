"""A CPU's paths with one order: a row's bits alone are those in any batch, and its numbers are right."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.experts.kinds import ClampedSwiglu, ExpertActivation
from kernels.experts.portable.eager import experts_eager
from kernels.experts.portable.tiles import run_experts_tiles
from kernels.experts.weights import ExpertWeights
from kernels.fused.activation import gated_torch
from kernels.fused.activation_kind import Activation
from kernels.fused.alike import gated_alike, sigmoid_alike
from kernels.linear.epilogue import Epilogue
from kernels.linear.ordered.tiles_path import run_linear_tiles
from kernels.linear.torch_path import run_torch
from kernels.linear.weights import PlainWeight
from kernels.sdpa.backends import run_math
from kernels.sdpa.key_tiles import run_attention_tiles

DTYPES = (torch.float32, torch.bfloat16)
PAGE_SIZE = 16


def close(found: Tensor, wanted: Tensor) -> bool:
    tolerance = 1e-4 if found.dtype is torch.float32 else 2e-2
    return bool((found.float() - wanted.float()).abs().max() <= tolerance * wanted.float().abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.SWIGLU])
def test_a_rows_product_is_that_of_the_row_alone(epilogue: Epilogue, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    for size_in, size_out in ((100, 37), (256, 320)):
        weight = PlainWeight((torch.randn(epilogue.parts * size_out, size_in, generator=draw) * 0.1).to(dtype))
        bias = None if epilogue is Epilogue.SWIGLU else torch.randn(size_out, generator=draw).to(dtype)
        x = torch.randn(70, size_in, generator=draw).to(dtype)

        def product(rows: Tensor, weight: PlainWeight = weight, bias: Tensor | None = bias) -> Tensor:
            out = rows.new_empty(rows.shape[0], weight.size[0] // epilogue.parts)
            run_linear_tiles(rows, weight, bias, epilogue, out)
            return out

        alone = torch.cat([product(x[row : row + 1]) for row in range(70)])
        wanted = torch.empty_like(alone)
        run_torch(x, weight, bias, epilogue, wanted)
        assert close(alone, wanted)
        for first, last in ((0, 70), (3, 19), (1, 17), (50, 66), (5, 7)):  # whole tiles, aligned and not, and parts
            assert torch.equal(product(x[first:last]), alone[first:last])


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(Activation.SILU, torch.float32), (Activation.GELU, torch.bfloat16), (ClampedSwiglu(), torch.float32)],
)
def test_a_tokens_experts_are_those_of_the_token_alone(activation: ExpertActivation, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    hidden, width, num_experts, num_active = 48, 40, 6, 3
    weights = ExpertWeights(
        (torch.randn(num_experts, 2 * width, hidden, generator=draw) * 0.2).to(dtype),
        (torch.randn(num_experts, hidden, width, generator=draw) * 0.2).to(dtype),
        torch.randn(num_experts, 2 * width, generator=draw).to(dtype),
        torch.randn(num_experts, hidden, generator=draw).to(dtype),
    )
    x = torch.randn(45, hidden, generator=draw).to(dtype)
    visited = torch.rand(45, num_experts, generator=draw).argsort(dim=1)[:, :num_active].int()
    shares = torch.rand(45, num_active, generator=draw)

    def computed(rows: slice) -> Tensor:
        out = torch.empty_like(x[rows])
        run_experts_tiles(x[rows], visited[rows], shares[rows], weights, activation, out)
        return out

    alone = torch.cat([computed(slice(row, row + 1)) for row in range(45)])
    assert close(alone, experts_eager(x, visited, shares, weights, activation))
    for rows in (slice(0, 45), slice(7, 40), slice(1, 3)):
        assert torch.equal(computed(rows), alone[rows])


@pytest.mark.parametrize("activation", list(Activation))
def test_an_activation_does_not_depend_on_the_place(activation: Activation) -> None:
    draw = torch.Generator().manual_seed(3)
    for width in (24, 100, 2000):
        gate_up = torch.randn(67, 2 * width, generator=draw) * 3
        found = gated_alike(gate_up, activation)
        assert close(found, gated_torch(gate_up, activation))
        for row in range(67):
            assert torch.equal(gated_alike(gate_up[row : row + 1].clone(), activation)[0], found[row])
    x = torch.randn(997, 1, generator=draw)
    assert torch.equal(sigmoid_alike(x), torch.cat([sigmoid_alike(row) for row in x.clone()])[:, None])


@dataclass(frozen=True)
class Sequences:
    """Whole sequences of which batches are made: q [n, heads, d], k and v [n, kv_heads, d] of each.

    images   positions of each sequence that see each other both ways: [(start, stop)]
    """

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    flags: AttentionFlags
    images: list[tuple[int, int]]

    def _flags(self, parts: list[tuple[int, int, int]]) -> AttentionFlags:
        spans = torch.zeros(sum(stop - start for _, start, stop in parts), 2, dtype=torch.int32)
        rows = [position for _, start, stop in parts for position in range(start, stop)]
        for first, end in self.images:
            spans[[row for row, position in enumerate(rows) if first <= position < end]] = torch.tensor(
                [first, end]
            ).int()
        return replace(self.flags, spans=spans) if self.images else self.flags

    def attended(self, parts: list[tuple[int, int, int]], *, is_packed: bool = False) -> tuple[Tensor, Tensor]:
        """Attend from positions [start, stop) of some sequences, as prefill or over pages; by tiles and by PyTorch."""
        q = torch.cat([self.q[at][start:stop] for at, start, stop in parts])
        edges = torch.tensor([0] + [stop - start for _, start, stop in parts]).cumsum(0).int()
        longest = max(stop - start for _, start, stop in parts), max(stop for _, _, stop in parts)
        if is_packed:
            k, v = (torch.cat([it[at][:stop] for at, _, stop in parts]) for it in (self.k, self.v))
            batch = AttentionBatch(edges, *longest, cu_seqlens_k=edges)
        else:
            k, v, table = self._pages(parts)
            lengths = torch.tensor([stop for _, _, stop in parts]).int()
            batch = AttentionBatch(edges, *longest, page_table=table, context_lens=lengths)
        found, wanted = torch.full_like(q, torch.nan), torch.empty_like(q)
        flags = self._flags(parts)
        run_attention_tiles(q, k, v, batch, flags, found)
        run_math(q, k, v, batch, flags, wanted)
        return found, wanted

    def _pages(self, parts: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return pages of keys and values in which nothing but the sequences' own is a number, and their table."""
        counts = [-(-stop // PAGE_SIZE) for _, _, stop in parts]
        pages = [
            torch.full((sum(counts), PAGE_SIZE, *it[0].shape[1:]), torch.nan, dtype=it[0].dtype)
            for it in (self.k, self.v)
        ]
        table, free = torch.zeros(len(parts), max(counts), dtype=torch.int32), list(range(sum(counts)))
        random.Random(0).shuffle(free)
        for row, ((at, _, stop), count) in enumerate(zip(parts, counts, strict=True)):
            own = [free.pop() for _ in range(count)]
            table[row, :count] = torch.tensor(own)
            for pool, kept in zip(pages, (self.k[at], self.v[at]), strict=True):
                for place, page in enumerate(own):
                    rows = kept[:stop][place * PAGE_SIZE : (place + 1) * PAGE_SIZE]
                    pool[page, : rows.shape[0]] = rows
        return pages[0], pages[1], table


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks", "images"),
    [
        (None, None, False, []),
        (None, 20.0, True, [(3, 8), (100, 126), (250, 257)]),
        (150, None, True, []),
        (5, 20.0, False, [(0, 1), (3, 8), (95, 126), (240, 290)]),
    ],
)
def test_attention_is_the_same_in_any_batch_and_chunk(
    window: int | None, softcap: float | None, has_sinks: bool, images: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    draw, pick = torch.Generator().manual_seed(4), random.Random(4)
    kv_heads, group, head_dim = 2, 3, 24
    lengths = [1, 9, 127, 129, 300, 511]

    def drawn(heads: int) -> list[Tensor]:
        return [torch.randn(n, heads, head_dim, generator=draw).to(dtype) * 1.5 for n in lengths]

    sinks = torch.randn(kv_heads * group, generator=draw) if has_sinks else None
    flags = AttentionFlags(head_dim**-0.5, window=window, softcap=softcap, sinks=sinks)
    sequences = Sequences(drawn(kv_heads * group), drawn(kv_heads), drawn(kv_heads), flags, images)
    alone = []
    for at, n in enumerate(lengths):
        found, wanted = sequences.attended([(at, 0, n)], is_packed=True)
        assert close(found, wanted)
        alone.append(found)
    mixed, _ = sequences.attended([(at, 0, n) for at, n in enumerate(lengths)], is_packed=True)
    assert torch.equal(mixed, torch.cat(alone))
    for _ in range(4):
        stops = [(at, pick.randint(1, n)) for at, n in enumerate(lengths)]
        stops = [(at, next((end for first, end in images if first < stop < end), stop)) for at, stop in stops]
        parts = [(at, pick.choice([stop - 1, pick.randrange(stop)]), stop) for at, stop in stops]
        found, wanted = sequences.attended(parts)
        assert close(found, wanted)
        assert torch.equal(found, torch.cat([alone[at][start:stop] for at, start, stop in parts]))
