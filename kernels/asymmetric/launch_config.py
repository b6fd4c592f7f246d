"""Sizes of the Triton path whose values have fewer numbers than its keys."""

from dataclasses import dataclass

from kernels.portable.launch_config import Tiles, padded_head_dim

_INTERPRETED = Tiles(32, 32, 4, 1)  # small: so that short test inputs cross tile edges
_LEAST_BLOCK = 16  # numbers that a tensor core multiplies at once


@dataclass(frozen=True, slots=True)
class KeyBlocks:
    """A key as two blocks, so that of 192 numbers 128 and 64 are multiplied, and not 256.

    first, rest              numbers of each; rest 0: there is one block
    block_first, block_rest  the same, rounded up to powers of 2
    """

    first: int
    rest: int
    block_first: int
    block_rest: int

    @classmethod
    def of(cls, head_dim: int) -> "KeyBlocks":
        if head_dim <= _LEAST_BLOCK:
            return cls(head_dim, 0, _LEAST_BLOCK, _LEAST_BLOCK)
        first = 1 << (head_dim.bit_length() - 1)
        return cls(first, head_dim - first, first, padded_head_dim(head_dim - first))


def asymmetric_tiles(element_bytes: int, shared: int | None) -> Tiles:
    """Return the tile of every phase: as many rows as warps have, 16 each, so that no row's keys are shared by warps.

    shared  bytes that one program can have; None in the interpreter
    """
    if shared is None:
        return _INTERPRETED
    if element_bytes == 4:
        return Tiles(16, 32, 4, 1)  # fp32 FMAs, for tests
    # Twice the keys spill 288 bytes a thread of prompts, these 16: ptxas of Triton 3.6.0 for sm_90.
    return Tiles(64, 32, 4, 2)
