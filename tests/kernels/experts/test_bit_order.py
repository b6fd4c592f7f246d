"""The order of mxfp4's bits in memory: nothing lost, and every pair of codes where kernels look for it."""

import torch

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
