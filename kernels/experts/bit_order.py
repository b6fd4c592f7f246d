"""The order in which mxfp4's codes stand in memory: one in which few instructions make 16-bit numbers of them.

A unit is two neighbouring 32-bit words a, b of a row, little endian: 16 codes of one scale. As in a checkpoint a word
holds 8 codes, and codes i and i + 4 are its pair i. PATTERN is a pair as two bf16 numbers: of each the sign (bit 15),
two bits of exponent (8, 7) and one of mantissa (6), which are the number times 2^-126. Pairs 0 to 2 stand in their word
as the pattern, rotated left by ROTATIONS. Their 24 bits leave 8 free, KEPT, and pairs 3 of both words share the free
ones of both:

    whole = (a & KEPT) | (rotated left by 2 (b) & ~KEPT)
    pair 3 of a = rotated right by LAST_ROTATIONS[0] (whole) & PATTERN, of b by LAST_ROTATIONS[1]

So 16 codes take 16 instructions in place of the 30 that a checkpoint's order takes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

PATTERN = 0x81C081C0
ROTATIONS = (0, 6, 10)  # of pairs 0, 1, 2
KEPT = 0x0C180C18  # bits of pairs 3 in the first word of a unit
SHARED_ROTATION = 2  # from the second word's to their places in `whole`
LAST_ROTATIONS = (4, 14)  # of pairs 3 in `whole`

_BITS = (6, 7, 8, 15)  # of PATTERN's low half: where bits 0 to 3 of a code stand
_CHUNK_BYTES = 1 << 24  # moved at once, with as much beside it twice


@dataclass(frozen=True, slots=True)
class Move:
    """Way of some bits: out of a word of a unit (0 or 1) into one, so many places to the left."""

    word: int
    to_word: int
    left: int

    def moved(self, mask: int) -> int:
        return mask << self.left if self.left >= 0 else mask >> -self.left


def bit_of(word: int, code: int, bit: int) -> tuple[int, int]:
    """Return the word of a unit, and its bit, in which a bit of a code of one of its words stands."""
    pair, half = code % 4, code // 4
    at = _BITS[bit] + 16 * half
    if pair < len(ROTATIONS):
        return word, (at + ROTATIONS[pair]) % 32
    at = (at + LAST_ROTATIONS[word]) % 32
    return (0, at) if KEPT >> at & 1 else (1, (at - SHARED_ROTATION) % 32)


def moves() -> dict[Move, int]:
    """Return the moves that put a checkpoint's unit into this order, with the mask of the bits that each moves."""
    found: dict[Move, int] = {}
    for word in (0, 1):
        for at in range(32):
            to_word, to = bit_of(word, at // 4, at % 4)
            move = Move(word, to_word, to - at)
            found[move] = found.get(move, 0) | 1 << at
    return found


def order_(blocks: Tensor, chunk_bytes: int = _CHUNK_BYTES) -> None:
    """Put a checkpoint's blocks [..., G, 16] uint8, contiguous, into the order of this module, in place."""
    _apply(moves(), blocks, chunk_bytes)


def checkpoint_order(blocks: Tensor) -> Tensor:
    """Return blocks in the order of a checkpoint, which `order_` had put into that of this module."""
    blocks = blocks.clone(memory_format=torch.contiguous_format)
    back = {Move(move.to_word, move.word, -move.left): move.moved(mask) for move, mask in moves().items()}
    _apply(back, blocks, _CHUNK_BYTES)
    return blocks


def _apply(masks: dict[Move, int], blocks: Tensor, chunk_bytes: int) -> None:
    units = blocks.view(-1).view(torch.int32).view(-1, 2)
    for first in range(0, len(units), chunk_bytes // 8):
        chunk = units[first : first + chunk_bytes // 8]
        moved = torch.zeros_like(chunk)
        for move, mask in masks.items():
            word = chunk[:, move.word]
            bits = word << move.left if move.left >= 0 else word >> -move.left
            after = move.moved(mask)  # also takes off the signs that int32's shift to the right brings
            moved[:, move.to_word] |= bits.bitwise_and_(after - (after >> 31 << 32))
        chunk.copy_(moved)
