"""The shipped variants of `gluon.decode.hopper`: what is compiled in, by head dim. Nothing is tuned at run time."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from kernels.calls.batch import AttentionFlags

HEAD_DIM_MULTIPLE = 8  # TMA's strides are multiples of 16 bytes
PAGE_SIZE_MULTIPLE = 16  # keys of one matmul instruction
CHUNK_D = 64  # dims that TMA swizzles as one row: copied and multiplied at a time
MIN_COLUMNS = 8  # queries of one matmul instruction
MAX_COLUMNS = 32  # of a row
MAX_QUERIES = 16  # of a sequence
SHARED_BYTES_OF_A_PROCESSOR = 228 * 1024
_FIXED_BYTES = 1024 + 256  # of each program: what the hardware keeps, and barriers


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """A program has `heads` KV heads (fewer where their number asks for it) and `block_n` keys of each in a tile, of
    which every warp reads all for `warp_columns` of the queries; `per_processor` programs share a multiprocessor, and
    have as many stages as fit, up to `max_stages` (more where pages make tiles smaller).
    """

    heads: int
    block_n: int
    max_stages: int
    per_processor: int
    warp_columns: int = 16


# By padded head dim and columns. Neighbouring heads together read memory faster (one H200, 8.6 GB at 128: 1979 us one
# by one, 1954 by two, 1917 by four). Deep stages of one program hide what happens at a row's end (1.1 GB of contexts of
# 1k at 128: 282 us with 3 stages of 64 keys, 334 with 2 of 16 in each of two programs). At 256 tiles of 16 keys take 5%
# longer, and two warps share 16 columns: 273 us for 64 x 4k, 323 by one; head dims up to 192 have room for 3 stages.
TILINGS: dict[tuple[int, int], DecodeTiling] = {
    (64, 8): DecodeTiling(4, 64, 3, 1),
    (64, 16): DecodeTiling(4, 64, 3, 1),
    (64, 32): DecodeTiling(2, 64, 6, 1),
    (128, 8): DecodeTiling(2, 64, 3, 1),
    (128, 16): DecodeTiling(2, 32, 6, 1),
    (128, 32): DecodeTiling(2, 32, 4, 1),
    (256, 8): DecodeTiling(2, 32, 3, 1),
    (256, 16): DecodeTiling(2, 32, 3, 1, warp_columns=8),
    (256, 32): DecodeTiling(1, 32, 4, 1, warp_columns=8),
}
# Of much context: 256 x 4k at 128 1.3% faster, 8 x 32k 1.8%; one context of 32k is 3% slower. With more columns 64 x 4k
# is 1% (128), 6% (64) and 19% (256) faster, one context of 4k 2%, 15% and 30% slower; at 128 with 32 2% faster, 276 us.
LARGE_TILINGS: dict[tuple[int, int], DecodeTiling] = {
    **TILINGS,
    (128, 8): DecodeTiling(4, 32, 2, 1),
    (128, 16): DecodeTiling(2, 64, 2, 1, warp_columns=8),
    (128, 32): DecodeTiling(2, 64, 2, 1),
    (64, 32): DecodeTiling(4, 64, 2, 1),
    (256, 32): DecodeTiling(1, 32, 2, 2, warp_columns=8),
}
# Of one sequence clusters share the rows, where these are as many as here: programs of a cluster, by rows. No more than
# 7 clusters of 16 find a place at the same time (H200). 64 programs read slower than one on every multiprocessor: the
# keys of a program, by padded head dim, up to which the launch that is saved counts for more, in a chain of calls too.
CLUSTERS: dict[int, int] = {4: 16, 8: 8}
CLUSTER_KEYS: dict[int, int] = {64: 512, 128: 256, 256: 256}
CLUSTER_STAGES: dict[int, int] = {64: 8, 128: 6, 256: 3}
CLUSTER_BLOCK_N = 64  # keys of a tile: with 128 1 x 1k takes a seventh longer at 128, a tenth at 64
MAX_HEAD_DIM = max(size for size, _ in TILINGS)
LARGE_SEQS = 5  # sequences, at least, ...
LARGE_TOKENS = 1 << 18  # ... and tokens of them all, by the host's bound, from which on a batch is large


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """Everything that is compiled into the kernels besides dtypes, addresses and strides.

    A KV head's columns are `queries` x `members`, powers of two: column c is query c // members of the sequence under
    head c % members of the group, or of its part. `column_warps` warps share them.
    """

    head_dim: int
    block_d: int
    block_n: int
    stages: int
    heads: int
    column_warps: int
    queries: int
    members: int
    group: int
    page_size: int
    window: bool
    softcap: bool
    sinks: bool
    per_processor: int
    cluster: int = 1  # programs that share a row of the only sequence, in one launch; 1: as shares fall, in two
    key_groups: int = 1  # of the keys of a tile, a warp each

    @property
    def warps(self) -> int:
        """The number of warps of a program."""
        return self.heads * self.column_warps * self.key_groups

    @property
    def chunk_d(self) -> int:
        """Dims that are copied and multiplied at a time; by clusters all."""
        return CHUNK_D if self.cluster == 1 else self.block_d

    @property
    def chunks(self) -> int:
        """The number of chunks that hold dims of the head."""
        return -(-self.head_dim // self.chunk_d)

    @property
    def box_n(self) -> int:
        """Keys of a tile that are copied together: they lie in one page."""
        return math.gcd(self.block_n, self.page_size)

    @property
    def columns(self) -> int:
        return self.queries * self.members

    @property
    def columns_used(self) -> int:
        """Columns that hold a query in some row."""
        return self.queries * min(self.members, self.group)

    @property
    def parts(self) -> int:
        """Rows that a group of query heads is."""
        return -(-self.group // self.members)


def variant_of(
    head_dim: int, page_size: int, heads: tuple[int, int], max_queries: int, num_seqs: int, max_context: int,
    flags: AttentionFlags, *, in_clusters: bool = True,
) -> DecodeVariant:  # fmt: skip
    """The variant for these arguments, heads being (query heads, KV heads).

    in_clusters: whether clusters may share rows. Raises ValueError for a head dim or a page size that none takes.
    """
    variant = _variant(
        head_dim, page_size, heads, max_queries,
        num_seqs >= LARGE_SEQS and num_seqs * max_context >= LARGE_TOKENS,
        (flags.window is not None, flags.softcap is not None, flags.sinks is not None),
    )  # fmt: skip
    if not in_clusters or num_seqs > 1 or variant.window or variant.columns > MIN_COLUMNS:
        return variant
    cluster = CLUSTERS.get(heads[1] * variant.parts)
    if cluster is None or max_context > cluster * CLUSTER_KEYS[variant.block_d]:
        return variant
    return _of_clusters(variant, cluster)


def columns_of(max_queries: int, group: int) -> tuple[int, int]:
    """(queries, members) that the columns of a row are."""
    queries = 1 << (max_queries - 1).bit_length()
    if queries > MAX_QUERIES:
        raise ValueError(f"max_seqlen_q: expected at most {MAX_QUERIES}, found {max_queries}")
    members = min(MAX_COLUMNS // queries, max(MIN_COLUMNS // queries, 1 << (group - 1).bit_length()))
    return queries, members


@lru_cache
def _variant(
    head_dim: int, page_size: int, heads: tuple[int, int], max_queries: int, is_large: bool, flags: tuple[bool, ...]
) -> DecodeVariant:
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
    tile_bytes = heads_of_program * -(-head_dim // CHUNK_D) * CHUNK_D * 2 * (columns + 2 * block_n)
    # The combining programs of a processor start while the others still run: their room is kept free.
    combine_bytes = heads_of_program * per_processor * (32 * block_d + 1024)
    room = (SHARED_BYTES_OF_A_PROCESSOR - combine_bytes) // per_processor - _FIXED_BYTES - heads_of_program * 2048
    return DecodeVariant(
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


@lru_cache
def _of_clusters(variant: DecodeVariant, cluster: int) -> DecodeVariant:
    stages, groups = CLUSTER_STAGES[variant.block_d], CLUSTER_BLOCK_N // PAGE_SIZE_MULTIPLE
    return replace(variant, heads=1, block_n=CLUSTER_BLOCK_N, stages=stages, cluster=cluster, key_groups=groups)
