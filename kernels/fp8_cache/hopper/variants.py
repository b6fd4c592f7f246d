"""The shipped variants of `gluon.decode.fp8.hopper`: what is compiled in, by head dim. Nothing is tuned at run time."""

import math
from dataclasses import dataclass
from functools import lru_cache

from kernels.calls.batch import AttentionFlags
from kernels.hopper.decode.variants import (
    LARGE_SEQS,
    LARGE_TOKENS,
    SHARED_BYTES_OF_A_PROCESSOR,
    DecodeTiling,
    DecodeVariant,
    columns_of,
)

HEAD_DIM_MULTIPLE = 16  # TMA's strides are multiples of 16 bytes
PAGE_SIZE_MULTIPLE = 16  # keys of one matmul instruction
CHUNK_D = 128  # dims that TMA swizzles as one row: copied and multiplied at a time
_FIXED_BYTES = 1024 + 256  # of each program: what the hardware keeps, and barriers

# By padded head dim and columns. Numbers are widened while others are copied, so that two programs of a processor are
# faster than one with twice the stages (one H200): 64 x 8k at 64 153 us, 172; 32 x 8k at 256 84 us, 98; 16 x 2k at 128
# 33 us, 36. Those of more columns are by likeness.
TILINGS: dict[tuple[int, int], DecodeTiling] = {
    (64, 8): DecodeTiling(4, 64, 2, 2),
    (64, 16): DecodeTiling(4, 64, 2, 2),
    (64, 32): DecodeTiling(2, 64, 6, 1),
    (128, 8): DecodeTiling(2, 64, 2, 2),
    (128, 16): DecodeTiling(2, 64, 2, 2),
    (128, 32): DecodeTiling(2, 32, 6, 1),
    (256, 8): DecodeTiling(2, 32, 2, 2),
    (256, 16): DecodeTiling(2, 32, 4, 1, warp_columns=8),
    (256, 32): DecodeTiling(1, 32, 4, 1, warp_columns=8),
}
# Of 64 x 8k at 128 four heads of one program: 266 us, 4.2 TB/s, and 488 in 16 bits; with 32 keys a tile 295.
LARGE_TILINGS: dict[tuple[int, int], DecodeTiling] = {
    **TILINGS,
    (128, 8): DecodeTiling(4, 64, 2, 1),
    (128, 16): DecodeTiling(2, 64, 3, 1, warp_columns=8),
}
MAX_HEAD_DIM = max(size for size, _ in TILINGS)


@dataclass(frozen=True, slots=True)
class Fp8DecodeVariant(DecodeVariant):
    """A variant whose keys and values are copied as units of two dims, 16 bits, of which a chunk has `units`."""

    @property
    def chunk_d(self) -> int:
        """Dims that are copied and multiplied at a time."""
        return min(CHUNK_D, self.block_d)

    @property
    def units(self) -> int:
        return self.chunk_d // 2


def fp8_variant_of(
    head_dim: int, page_size: int, heads: tuple[int, int], max_queries: int, num_seqs: int, max_context: int,
    flags: AttentionFlags,
) -> Fp8DecodeVariant:  # fmt: skip
    """The variant for these arguments, heads being (query heads, KV heads).

    Raises ValueError for a head dim or a page size that none takes.
    """
    return _variant(
        head_dim, page_size, heads, max_queries,
        num_seqs >= LARGE_SEQS and num_seqs * max_context >= LARGE_TOKENS,
        (flags.window is not None, flags.softcap is not None, flags.sinks is not None),
    )  # fmt: skip


@lru_cache
def _variant(
    head_dim: int, page_size: int, heads: tuple[int, int], max_queries: int, is_large: bool, flags: tuple[bool, ...]
) -> Fp8DecodeVariant:
    block_d = next((size for size, _ in TILINGS if head_dim <= size), None)
    if block_d is None or head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(f"head_dim: expected a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}, found {head_dim}")
    if page_size % PAGE_SIZE_MULTIPLE:
        raise ValueError(f"page_size: expected a multiple of {PAGE_SIZE_MULTIPLE}, found {page_size}")
    window, softcap, sinks = flags
    num_heads, num_kv_heads = heads
    group = num_heads // num_kv_heads
    queries, members = columns_of(max_queries, group)
    columns = queries * members
    tiling = (LARGE_TILINGS if is_large else TILINGS)[block_d, columns]
    block_n = math.gcd(tiling.block_n, page_size)  # a tile lies in one page
    heads_of_program = math.gcd(tiling.heads, num_kv_heads)
    per_processor = tiling.per_processor * tiling.heads // heads_of_program
    dims = -(-head_dim // min(CHUNK_D, block_d)) * min(CHUNK_D, block_d)
    tile_bytes = heads_of_program * (dims * 2 * (columns + block_n) + 2 * 4 * block_n)
    # The combining programs of a processor start while the others still run: their room is kept free.
    combine_bytes = heads_of_program * per_processor * (32 * block_d + 1024)
    room = (SHARED_BYTES_OF_A_PROCESSOR - combine_bytes) // per_processor - _FIXED_BYTES - heads_of_program * 4096
    return Fp8DecodeVariant(
        head_dim=head_dim,
        block_d=block_d,
        block_n=block_n,
        stages=max(2, min(tiling.max_stages * tiling.block_n // block_n, room // tile_bytes)),
        heads=heads_of_program,
        column_warps=max(1, columns // tiling.warp_columns),
        queries=queries,
        members=members,
        group=group,
        page_size=page_size,
        window=window,
        softcap=softcap,
        sinks=sinks,
        per_processor=per_processor,
    )
