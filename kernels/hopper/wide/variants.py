"""The shipped variants of the Gluon kernels for heads of 512: what is compiled in. Nothing is tuned at run time."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from kernels.hopper.decode.variants import MIN_COLUMNS, PAGE_SIZE_MULTIPLE, DecodeTiling, DecodeVariant, columns_of
from kernels.hopper.variants import ROWS, Tiling, Variant

HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class WideTiling(Tiling):
    """A tiling whose two consumers share the rows of a tile: each has half of a block's keys, and half of O."""

    @property
    def block_m(self) -> int:
        """Query rows of one tile."""
        return ROWS


# Queries, keys and values of 64 rows each take 192 KiB of shared memory. Half of the queries in registers give 5 % over
# none, a quarter 3 % (one H200, 8k and 2k).
TILING = WideTiling(2, HEAD_DIM, 64, 1, 1, named_barriers=True, pv_first=False, lazy_rescale=True, q_columns=256)
PAGED_TILING = replace(TILING, q_columns=128)  # with half of the queries ptxas spills, and serialises wgmma
DECODE_TILINGS: dict[int, DecodeTiling] = {  # by columns
    8: DecodeTiling(2, 16, 2, 1, warp_columns=8),
    16: DecodeTiling(2, 16, 2, 1, warp_columns=8),
    32: DecodeTiling(1, 16, 3, 1, warp_columns=8),
}
# Of few sequences what counts are the parts of a row, which are summed at the end: by one head a program they are half
# as many, and 1 x 8k takes 34 us in place of 57 (one H200); 8 x 8k takes 9 % longer.
FEW_SEQS = 2
FEW_TILING = DecodeTiling(1, 16, 3, 1, warp_columns=8)


def check_head_dim(head_dim: int) -> None:
    """Raise ValueError for another head dim than 512."""
    if head_dim != HEAD_DIM:
        raise ValueError(f"head_dim: expected {HEAD_DIM}, found {head_dim}")


@lru_cache
def wide_prefill_variant(has_context: bool) -> Variant:
    """The variant of packed prompts. has_context: queries may start after keys that have none."""
    return Variant(TILING, HEAD_DIM, has_context)


@lru_cache
def wide_extend_variant(page_size: int, group: int, parts: bool) -> Variant:
    """The variant of chunks over pages; group: query heads a KV head, parts: a tile's keys may be split.

    Raises ValueError for a page size that is no multiple of 16.
    """
    check_page_size(page_size)
    pack = group if group <= ROWS and group.bit_count() == 1 else 1
    return Variant(PAGED_TILING, HEAD_DIM, True, page_size=page_size, pack=pack, parts=parts)


def check_page_size(page_size: int) -> None:
    """Raise ValueError for a page size that is no multiple of 16."""
    if page_size % PAGE_SIZE_MULTIPLE:
        raise ValueError(f"page_size: expected a multiple of {PAGE_SIZE_MULTIPLE}, found {page_size}")


@lru_cache
def wide_decode_variant(
    page_size: int, heads: tuple[int, int], max_queries: int, *, of_few: bool = False
) -> DecodeVariant:
    """The variant of one or a few tokens a sequence, heads being (query heads, KV heads).

    of_few: sequences, at most FEW_SEQS. Raises ValueError for a page size that is no multiple of 16.
    """
    check_page_size(page_size)
    num_heads, num_kv_heads = heads
    group = num_heads // num_kv_heads
    queries, members = columns_of(max_queries, group)
    columns = queries * members
    tiling = FEW_TILING if of_few and columns == MIN_COLUMNS else DECODE_TILINGS[columns]
    heads_of_program = math.gcd(tiling.heads, num_kv_heads)
    return DecodeVariant(
        head_dim=HEAD_DIM,
        block_d=HEAD_DIM,
        block_n=tiling.block_n,
        stages=tiling.max_stages,
        heads=heads_of_program,
        column_warps=columns // tiling.warp_columns,
        queries=queries,
        members=members,
        group=group,
        page_size=page_size,
        window=False,
        softcap=False,
        sinks=False,
        per_processor=tiling.per_processor * tiling.heads // heads_of_program,
    )
