"""Launch options of the Triton paths: tile sizes by head dim, element size and shared memory, and the flags."""

import math
from dataclasses import dataclass
from typing import Any

from kernels.calls.batch import AttentionFlags

_LOG2_E = math.log2(math.e)
SHARED_BYTES_HOPPER = 232_448  # what one program of an sm_90 can have


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile of a kernel: BLOCK_M packed query rows by BLOCK_N keys, and Triton's launch options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By padded head dim. wgmma wants block_m >= 64. Twice the block_n spills registers at 128 (with a window and a softcap)
# and at 256: ptxas of Triton 3.6.0 for sm_90.
_HOPPER_16_BIT = {64: Tiles(128, 128, 8, 2), 128: Tiles(128, 64, 8, 3), 256: Tiles(128, 32, 8, 3)}
_SMALL_16_BIT = {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 4, 2)}  # fits 99 KiB of sm_86
_32_BIT = {64: Tiles(64, 32, 8, 1), 128: Tiles(32, 32, 8, 1), 256: Tiles(16, 32, 8, 1)}  # fp32 FMAs, for tests
_INTERPRETED = Tiles(32, 32, 4, 1)  # small: so that short test inputs cross tile edges


def padded_head_dim(head_dim: int) -> int:
    """The power of two a head dim is padded to, at least the 16 of an MMA instruction."""
    return max(16, 1 << (head_dim - 1).bit_length())


def query_tiles(head_dim: int, element_bytes: int, shared_bytes: int | None) -> Tiles:
    """Tiles of prefill and extend. `shared_bytes` is the GPU's limit for one program; None in the interpreter."""
    if shared_bytes is None:
        return _INTERPRETED
    row = max(64, padded_head_dim(head_dim))
    if element_bytes == 4:
        return _32_BIT[row]
    return (_HOPPER_16_BIT if shared_bytes >= SHARED_BYTES_HOPPER else _SMALL_16_BIT)[row]


def decode_tiles(head_dim: int, element_bytes: int, group: int, shared_bytes: int | None) -> Tiles:
    """Tiles of decode: all query heads of a KV head are rows of one tile."""
    block_m = max(16, 1 << (group - 1).bit_length())
    if shared_bytes is None:
        return Tiles(block_m, 32, 4, 1)
    row = max(64, padded_head_dim(head_dim))
    if element_bytes == 4:
        return Tiles(block_m, 32 if row <= 128 else 16, 8, 1)
    return Tiles(block_m, 64 if row <= 128 else 32, 4, 2)


def flag_arguments(flags: AttentionFlags) -> dict[str, Any]:
    """The flags as the keyword arguments that every attention kernel takes; a flag that is off costs nothing.

    Scores are in units of log2(e), for exp2. The factor is folded in here, in double precision: one rounding fewer.
    """
    if flags.softcap is None:
        scale, softcap = flags.scale * _LOG2_E, 1.0
    else:
        scale, softcap = flags.scale / flags.softcap, flags.softcap * _LOG2_E
    return {
        "scale": scale,
        "softcap": softcap,
        "window": 0 if flags.window is None else flags.window,
        "CAUSAL": flags.causal,
        "HAS_WINDOW": flags.window is not None,
        "HAS_SOFTCAP": flags.softcap is not None,
        "HAS_SINKS": flags.sinks is not None,
        "HAS_SPANS": flags.spans is not None,
    }
