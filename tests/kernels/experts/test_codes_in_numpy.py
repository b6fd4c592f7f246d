"""The Gluon products of mxfp4 weights, run in numpy, against fp64; the order of columns; what chooses their tiles."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.experts.bit_order import (
    KEPT,
    LAST_ROTATIONS,
    PATTERN,
    ROTATIONS,
    SHARED_ROTATION,
    bit_of,
    checkpoint_order,
    order_,
)
from kernels.experts.kinds import ClampedSwiglu
from kernels.experts.mxfp4 import unpack
from kernels.experts.mxfp4.order import gather, ordered_size, places
from kernels.experts.mxfp4.tilings import ALL_TILES, STEP, CodesTiles, CodesTiling, codes_tiles
from kernels.experts.tiles import token_counts
from kernels.experts.weights import dequantized
from kernels.reference.experts import activated_fp64
from support.emulator.codes_by_numpy import assemble, numbers_of, run_product
from support.emulator.gluon_by_numpy import Map

EXPERTS, HIDDEN, WIDTH = 3, 192, 64  # neither is whole blocks of 128
LIMIT, ALPHA = 7.0, 1.702


class Layer:
    """Weights of a small mixture in mxfp4, and sorted rows, an expert without any among them."""

    def __init__(self, tiles: CodesTiles, *, has_large_scales: bool) -> None:
        random = torch.Generator().manual_seed(1)

        def codes(rows: int, size: int) -> tuple[Tensor, Tensor]:
            shape = (EXPERTS, rows, size // 32)
            blocks = torch.randint(256, (*shape, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(112, 122, shape, generator=random, dtype=torch.uint8)
            scales[:, 0, 0] = 130 if has_large_scales else 128
            return blocks, scales

        self.counts = (5, 0, tiles.tokens + 3)
        self.gate_up, self.down = codes(2 * WIDTH, HIDDEN), codes(HIDDEN, WIDTH)
        self.biases = [torch.randn(EXPERTS, size, generator=random).double() for size in (2 * WIDTH, HIDDEN)]
        self.x = torch.randn(sum(self.counts), HIDDEN, generator=random).bfloat16().double()
        self.order = torch.randperm(sum(self.counts), generator=random)

    def experts(self) -> list[tuple[int, slice]]:
        ends = np.cumsum(self.counts)
        return [
            (e, slice(int(end - count), int(end))) for e, (count, end) in enumerate(zip(self.counts, ends, strict=True))
        ]

    def table(self, tokens: int) -> np.ndarray:
        tiles = [(e, row, of.stop) for e, of in self.experts() for row in range(of.start, of.stop, tokens)]
        return np.array([(len(tiles), 0, 0), *tiles])

    def expected(self) -> tuple[Tensor, Tensor]:
        """The activated products, and the results, of the sorted rows."""
        inner, results = torch.empty(len(self.x), WIDTH).double(), torch.empty(len(self.x), HIDDEN).double()
        for e, of in self.experts():
            products = self.x[of] @ dequantized(self.gate_up[0][e], self.gate_up[1][e], torch.float64).T
            gate, up = (products + self.biases[0][e]).chunk(2, dim=-1)
            inner[of] = activated_fp64(gate, up, ClampedSwiglu(ALPHA, LIMIT))
            down = dequantized(self.down[0][e], self.down[1][e], torch.float64)
            results[of] = inner[of] @ down.T + self.biases[1][e]
        return inner, results


def ordered(x: Tensor) -> np.ndarray:
    """Rows in the order of `places`, with zeros behind the last column."""
    whole = torch.zeros(len(x), ordered_size(x.shape[1]), dtype=x.dtype)
    whole[:, : x.shape[1]] = x
    return whole.view(len(x), -1, STEP)[:, :, places()].reshape(whole.shape).numpy()


def run(layer: Layer, codes: tuple[Tensor, Tensor], bias: Tensor, x: np.ndarray, out: np.ndarray,
        tiling: CodesTiling) -> None:  # fmt: skip
    """One product of a layer: of gate and up into `out` in the next one's order, or of down at the rows' slots."""
    blocks, scales = codes
    rows, size = blocks.shape[1], blocks.shape[2] * 32
    weights = blocks.reshape(EXPERTS, rows, size // 2).numpy().view(np.uint16).astype(np.float64)
    if tiling.parts == 2:
        weights = weights.reshape(EXPERTS, 2, rows // 16, 8, size // 4).transpose(0, 2, 1, 3, 4)
    size_out, limits = rows // tiling.parts, (LIMIT, ALPHA) if tiling.parts == 2 else (0.0, 0.0)
    packed = scales.numpy().astype(np.int64)
    run_product(
        Map(weights, tiling.weights_box), Map(x, tiling.inputs_box), out, packed, bias.numpy(), layer.order.numpy(),
        layer.table(tiling.tokens), (-(-size_out // tiling.columns), x.shape[1] // STEP, size // 32, size_out,
                                     out.shape[1], *limits), tiling, num_programs=3,
    )  # fmt: skip


@pytest.mark.parametrize(("tiles", "large"), [*((it, False) for it in ALL_TILES), (ALL_TILES[0], True)], ids=str)
def test_both_products_are_right_and_no_role_waits_forever(tiles: CodesTiles, large: bool) -> None:
    layer = Layer(tiles, has_large_scales=large)
    inner, results = layer.expected()
    stored = np.full_like(ordered(inner), np.nan)
    stored[:, -STEP:] = 0  # as `gather` leaves what lies behind the width
    gate_up = tiles.gate_up(has_bias=True, activation="clamped", has_large_scales=large)
    down = tiles.down(has_bias=True, has_large_scales=large)
    run(layer, layer.gate_up, layer.biases[0], ordered(layer.x), stored, gate_up)
    np.testing.assert_allclose(stored, ordered(inner), atol=1e-9)
    out = np.full((len(layer.x), HIDDEN), np.nan)
    run(layer, layer.down, layer.biases[1], stored, out, down)
    np.testing.assert_allclose(out[layer.order], results.numpy(), atol=1e-8)


@pytest.mark.parametrize(("text", "most"), [(unpack.UNPACK, 128), (unpack.UNPACK_LARGE_SCALES, 255)])
def test_every_code_times_every_scale_is_its_number(text: str, most: int) -> None:
    scales = torch.arange(most + 1, dtype=torch.int32)
    codes = torch.arange(256, dtype=torch.uint8).repeat(most + 1, 1)  # in a checkpoint's order: all pairs of codes
    bits = (scales * 128 + 126 * 128).numpy()  # of `factors_of`
    order_(codes)
    units = codes.numpy().view(np.uint32).reshape(most + 1, 32, 2)  # 16 codes
    found = assemble(text, units, np.broadcast_to((bits | bits << 16)[:, None, None], units.shape))
    places_of_word = [numbers_of(found[i] >> np.uint32(16 * half)) for half in (0, 1) for i in range(4)]
    got = torch.from_numpy(np.stack(places_of_word, axis=-1)).view(most + 1, 512)
    blocks = codes[:255].view(-1, 16, 16)
    of_blocks = scales[:255, None].expand(-1, 16).to(torch.uint8)
    assert torch.equal(got[:255], dequantized(blocks, of_blocks, torch.bfloat16).double())
    assert got[255:].isnan().all()


@pytest.mark.parametrize("width", [64, 128])
def test_slots_are_gathered_in_the_order_of_the_products(width: int) -> None:
    num_tokens, num_active = 5, 3
    x = torch.randn(num_tokens, HIDDEN).bfloat16()
    order = torch.randperm(num_tokens * num_active).int()
    inner = torch.full((len(order), 128), torch.nan).bfloat16()
    found = gather(x, order, inner, width)
    assert torch.equal(found.double(), torch.from_numpy(ordered(x[order.long() // num_active].double())))
    assert (inner == 0).all() if width == 64 else inner.isnan().all()


def test_tiles_are_higher_the_more_rows_an_expert_has() -> None:
    tiles = [codes_tiles(tokens, 4, 32) for tokens in (2, 3, 16, 17, 64, 65, 160, 161, 384, 385, 2048, 2049, 8192)]
    assert [it and it.tokens for it in tiles] == [None, 8, 8, 16, 16, 32, 32, 64, 64, 128, 128, 256, 256]
    assert codes_tiles(8192, 4, 128) == codes_tiles(2048, 4, 32)  # 256 rows an expert on average: no more than a tile
    assert {2048, 2049} <= {it for first in token_counts(32, 4, 2, 232_448) for it in (first - 1, first)}


WORD = 0xFFFFFFFF


def rotated_right(bits: int, by: int) -> int:
    return (bits >> by | bits << (32 - by)) & WORD


def pattern_of(code: int) -> int:
    """A code as the bits of a bf16 number: the number times 2^-126."""
    return (code & 8) << 12 | (code & 7) << 6


def test_every_bit_of_a_unit_has_a_place_of_its_own() -> None:
    places = {bit_of(word, code, bit) for word in (0, 1) for code in range(8) for bit in range(4)}
    assert places == {(word, at) for word in (0, 1) for at in range(32)}


def test_every_pair_is_found_by_a_rotation_and_a_mask() -> None:
    blocks = torch.randint(256, (50, 3, 16), dtype=torch.uint8)
    units = blocks.view(torch.int32).view(-1, 2).tolist()
    order_(blocks)
    for unit, (first, second) in zip(units, blocks.view(torch.int32).view(-1, 2).tolist(), strict=True):
        a, b = first & WORD, second & WORD
        whole = (a & KEPT) | (rotated_right(b, 32 - SHARED_ROTATION) & ~KEPT)
        for checkpoint, word, last in zip(unit, (a, b), LAST_ROTATIONS, strict=True):
            found = [rotated_right(word, by) for by in ROTATIONS] + [rotated_right(whole, last)]
            codes = [checkpoint >> 4 * i & 15 for i in range(8)]
            pairs = [pattern_of(codes[i]) | pattern_of(codes[i + 4]) << 16 for i in range(4)]
            assert [bits & PATTERN for bits in found] == pairs


def test_a_checkpoints_order_comes_back_also_in_chunks() -> None:
    checkpoint = torch.randint(256, (2, 5, 3, 16), dtype=torch.uint8)
    blocks, in_chunks = checkpoint.clone(), checkpoint.clone()
    order_(blocks)
    order_(in_chunks, chunk_bytes=56)
    assert torch.equal(in_chunks, blocks)
    assert torch.equal(checkpoint_order(blocks), checkpoint)
