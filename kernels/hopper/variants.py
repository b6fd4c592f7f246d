"""The shipped variants of the Gluon kernels: what is compiled in, by head dim. Nothing is tuned at run time."""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from kernels.calls.batch import AttentionBatch, AttentionFlags

ROWS = 64  # query rows of one consumer: the M of one wgmma


@dataclass(frozen=True, slots=True)
class Tiling:
    """The layout of a program: one row of the shipped table.

    consumers       groups of 4 warps with ROWS query rows each
    block_d         head dim in shared memory and registers; a smaller head dim is padded with zeros by TMA
    block_n         keys of one step
    stages          depth of the K ring and of the V ring
    q_buffers       tiles of queries in shared memory: 2 lets the next one arrive early
    named_barriers  stages are given back, and the tensor cores passed on in strict turns, by hardware barriers
    pv_first        at a tile's end P V is issued before the next tile's queries are waited for
    lazy_rescale    O is rescaled only when a row's max has grown by 2**8, in the warps that have such a row
    scores_ahead    consumers are those of consumer_ahead.py
    early_waits     those wait for keys and values right behind the issue of the product before
    q_columns       columns of the queries that consumers hold in registers: 0 or a power of two
    cut             a head dim is computed as two powers of two where their sum is less than a larger one
    stored_as_is    O is stored as it lies in registers, 4 bytes a lane, without the scratch memory of wider stores
    """

    consumers: int
    block_d: int
    block_n: int
    stages: int
    q_buffers: int
    named_barriers: bool
    pv_first: bool
    lazy_rescale: bool
    scores_ahead: bool = False
    early_waits: bool = False
    q_columns: int = 0
    cut: bool = False
    stored_as_is: bool = False

    @property
    def block_m(self) -> int:
        """Query rows of one tile."""
        return self.consumers * ROWS

    @property
    def part_d(self) -> int:
        """Columns of a row of partial results: a power of two."""
        return 1 << (self.block_d - 1).bit_length()


# Measured on one H200 (torch 2.11.0+cu130, triton 3.6.0), bf16, causal, 512 to 32768 tokens. Scores ahead give 5-13 %
# at 64 up to 4096 tokens and 4-8 % at 128; at 256 they cost 2-5 %. Lazy rescaling gives 3-7 % at 128, 3-5 % at 256. At
# 256 wgmma waits for shared memory: a quarter of the queries in registers gives 2 %, `pv_first` 0-2 %. Cut in two 80 is
# 8 % faster, 192 6-9 %, 96 1-5 %. Rows of 192 columns leave room for the next tile's queries: 6-10 % up to 4096 tokens.
# Turns then give 3 % of 2048 tokens, 6-8 % of 4096 and 8192, 9-10 % of more.
TILINGS: dict[int, Tiling] = {
    64: Tiling(
        2, 64, 128, 4, 2, named_barriers=False, pv_first=False, lazy_rescale=True, scores_ahead=True, early_waits=True
    ),
    128: Tiling(2, 128, 128, 2, 2, named_barriers=True, pv_first=False, lazy_rescale=True, scores_ahead=True, cut=True),
    192: Tiling(
        2, 192, 64, 2, 2, named_barriers=True, pv_first=False, lazy_rescale=True, scores_ahead=True, q_columns=64,
        cut=True,
    ),
    256: Tiling(2, 256, 64, 2, 1, named_barriers=False, pv_first=True, lazy_rescale=True, q_columns=64),
}  # fmt: skip
# With late waits head dim 128 is a quarter slower under a window (H200); without a flag 2 % faster. At 192 turns cost
# 2-5 % under a window, and give less than 1 % under a softcap.
FLAGGED_TILINGS: dict[int, Tiling] = {
    **TILINGS,
    128: replace(TILINGS[128], early_waits=True),
    192: replace(TILINGS[192], named_barriers=False),
}
# The masks of spans leave no registers at 256.
SPAN_TILINGS: dict[int, Tiling] = {**FLAGGED_TILINGS, 256: replace(TILINGS[256], lazy_rescale=False, q_columns=0)}

# At 64 exponentials take as long as both products. A third consumer fills what two leave idle; it gives 1-4 % from 8192
# tokens on and costs 6 % at 4096, for its registers hold no scores ahead. Under a window of 1024 it gives 2-5 %,
# of 4096 5-8 %, and it costs 3-9 % under narrower ones (H200).
LONG_TILINGS = {64: Tiling(3, 64, 128, 3, 2, named_barriers=True, pv_first=False, lazy_rescale=False)}
LONG = 8192  # queries of the longest sequence
LONG_WINDOW = 1024
LONG_SOFTCAP = 4096  # under a softcap alone: with polynomials 1 % at 4096, 5-6 % from 6000 on, at 2048 they cost 3 %

MAX_HEAD_DIM = max(TILINGS)
HEAD_DIM_MULTIPLE = 8  # TMA's strides are multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class Variant:
    """Everything that is compiled into the kernel besides dtypes.

    offset     queries may start after a context of keys (or before the first key): positions are not row numbers
    page_size  tokens of a page of keys; 0 where keys are packed
    pack       query heads side by side in a tile, so that they share its keys: row r is query r // pack, head r % pack
    parts      a tile's keys may be split: partial results go to a scratch tensor, to be combined later
    masks_apart  blocks on the diagonal have a loop of their own
    """

    tiling: Tiling
    head_dim: int
    offset: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    spans: bool = False
    page_size: int = 0
    pack: int = 1
    parts: bool = False
    masks_apart: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fields = (self.tiling, self.head_dim, self.offset, self.window, self.softcap, self.sinks, self.spans)
        object.__setattr__(self, "_hash", hash((*fields, self.page_size, self.pack, self.parts, self.masks_apart)))

    def __hash__(self) -> int:
        return self._hash  # asked for in every call; to hash the fields takes 1.4 us (one core, Python 3.11)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that a head dim is cut into, so that less is computed."""
        main = 1 << (self.tiling.block_d - 1).bit_length() - 1
        tail = max(16, 1 << max(0, self.head_dim - main - 1).bit_length())
        is_cut = self.tiling.cut and main < self.head_dim and tail < main
        return (main, tail) if is_cut else (self.tiling.block_d,)

    @property
    def columns(self) -> tuple[int, ...]:
        """Widths of the parts of O: at 64 + 32 it is whole, which is 1-3 % faster, but not ahead over pages (H200)."""
        is_whole = self.widths == (64, 32) and not (self.page_size and self.tiling.scores_ahead)
        return (self.tiling.block_d,) if is_whole else self.widths

    @property
    def row_parts(self) -> tuple[int, ...]:
        """Widths of what a row of queries, keys or values lies in: shared memory's tensors are powers of two wide."""
        main = 1 << self.tiling.block_d.bit_length() - 1
        return (main, self.tiling.block_d - main) if main < self.tiling.block_d else (main,)

    @property
    def copied(self) -> int:
        """Columns of one copy by TMA: as many for all parts, so that they share a tensor map."""
        return min(self.row_parts)

    @property
    def copies(self) -> tuple[tuple[int, int, int], ...]:
        """(part, first column of it, that of the row) of each copy."""
        main = self.row_parts[0]
        return tuple((first // main, first % main, first) for first in range(0, self.tiling.block_d, self.copied))

    @property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """(first column, width) of the products that S = Q K^T is the sum of; the first one may have Q in registers."""
        held, columns = self.tiling.q_columns, sum(self.widths)
        if held == 0:
            return ((0, self.widths[0]), *((self.widths[0], width) for width in self.widths[1:]))
        found, first, width = [(0, held)], held, held
        while first < columns:
            found.append((first, min(width, columns - first)))
            first, width = first + width, 2 * width
        return tuple(found)

    @property
    def behind(self) -> int:
        """Groups of P V in flight while S is waited for: both parts give 5-12 % at 192, 1-3 % over pages (H200)."""
        return len(self.columns) if self.tiling.block_d > 128 or self.page_size else 1

    @property
    def box(self) -> int:
        """Keys of one copy: all of a block, or as many as never cross a page's border."""
        return math.gcd(self.page_size, self.tiling.block_n)

    @property
    def fields(self) -> int:
        """Integers of one posted tile."""
        return 16 if self.parts else 8

    @property
    def starts_anywhere(self) -> bool:
        """True if a tile's keys may begin after key 0."""
        return self.window or self.spans or self.parts

    @property
    def is_masked_inside(self) -> bool:
        """True if blocks after a consumer's first one may need a mask."""
        return self.offset or self.window or self.spans

    @property
    def may_see_nothing(self) -> bool:
        """True if a row may have no key in its first block, or none at all."""
        return self.offset or self.spans

    @property
    def has_polynomials(self) -> bool:
        """True if polynomials compute a quarter of the weights: exponentials and tanh share one unit.

        Not of masked blocks: there they would cost as much as they save. Two consumers lose 1-3 % by them (H200).
        """
        return self.softcap and self.tiling.consumers == 3 and not self.is_masked_inside

    @property
    def skips(self) -> bool:
        """True if consumers of one tile may start at different key blocks."""
        return (self.tiling.block_n < self.tiling.block_m or self.offset) and not self.spans

    @property
    def skips_low(self) -> bool:
        """True if consumers of one tile may end at different key blocks: a window hides more from later rows."""
        return self.window and self.skips and self.tiling.consumers == 3


def given(flags: AttentionFlags) -> tuple[bool, bool, bool, bool]:
    """Window, softcap, sinks, spans: which of them there are."""
    return flags.window is not None, flags.softcap is not None, flags.sinks is not None, flags.spans is not None


def variant_of(head_dim: int, batch: AttentionBatch, flags: AttentionFlags) -> Variant:
    """The variant that serves these arguments. Raises ValueError for a head dim that no tiling takes.

    Queries start at position 0 where queries and keys share their offsets tensor; otherwise it is not known here.
    """
    has_context = batch.cu_seqlens_q is not batch.cu_seqlens_k
    is_capped_alone = flags.softcap is not None and flags.window is None and not has_context
    long = LONG_SOFTCAP if is_capped_alone else LONG
    return variant_with(
        head_dim,
        batch.max_seqlen_q >= long and (flags.window is None or flags.window >= LONG_WINDOW),
        has_context,
        *given(flags),
    )


@lru_cache
def variant_with(
    head_dim: int,
    is_long: bool,
    offset: bool,
    window: bool,
    softcap: bool,
    sinks: bool,
    spans: bool,
) -> Variant:
    """The variant of prefill for these flags."""
    block_d = next((size for size in TILINGS if head_dim <= size), None)
    if block_d is None or head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(f"head_dim: expected a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}, found {head_dim}")
    is_flagged = offset or window or softcap or sinks
    tiling = (SPAN_TILINGS if spans else FLAGGED_TILINGS if is_flagged else TILINGS)[block_d]
    if is_long and not (spans or (window and offset)):  # their bounds do not fit in 160 registers
        tiling = LONG_TILINGS.get(block_d, tiling)
    return Variant(tiling, head_dim, offset, window, softcap, sinks, spans)
