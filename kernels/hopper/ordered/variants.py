"""The variants of `gluon.ordered.hopper`: what is compiled in, by head dim. Nothing is tuned at run time."""

from dataclasses import dataclass, replace
from functools import lru_cache

from kernels.calls.batch import AttentionFlags
from kernels.hopper.variants import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, ROWS, Tiling, Variant, given

PAGE_SIZE_MULTIPLE = 16  # a box of fewer rows would be mostly overhead
# A part begins at every multiple of so many keys: the name of the order says it. With 512 prompts of 8k take 11 %
# longer, for folding costs more; one sequence of 2k takes 11 us a layer in decode where it takes 15 with 1024 (H200).
PART_KEYS = 1024

# Of all phases of a head dim the same block_n and widths, and lazy rescaling everywhere: they are part of the order.
# Stages, buffers, barriers and waits are not, and the number of consumers is not: each has rows of its own.
# At 128 the totals of 128 rows take 64 KiB of shared memory, so that queries have one buffer.
TILINGS: dict[int, Tiling] = {
    64: Tiling(
        2, 64, 128, 4, 2, named_barriers=False, pv_first=False, lazy_rescale=True, scores_ahead=True, early_waits=True
    ),
    128: Tiling(
        2, 128, 128, 2, 1, named_barriers=True, pv_first=False, lazy_rescale=True, scores_ahead=True, early_waits=True,
        cut=True, stored_as_is=True,
    ),
    192: Tiling(
        2, 192, 64, 2, 1, named_barriers=True, pv_first=False, lazy_rescale=True, scores_ahead=True, cut=True
    ),
    256: Tiling(2, 256, 64, 2, 1, named_barriers=False, pv_first=False, lazy_rescale=True, scores_ahead=True),
}  # fmt: skip
# Of a few queries a sequence: one consumer, whose 64 rows a token's query heads do not fill, and deep stages.
FEW_STAGES = {64: 4, 128: 2, 192: 2, 256: 2}


@dataclass(frozen=True, slots=True)
class OrderedVariant:
    """Everything that is compiled in besides dtypes.

    form        what the modules of the other Hopper kernels know; its `parts` is set where keys are pages
    part_keys   keys of a part
    folds_last  who stores the last part of a row block folds them all; else another kernel does
    given_group query heads a KV head; where they are packed `form.pack` is the next power of two
    """

    form: Variant
    part_keys: int
    given_group: int
    folds_last: bool = False

    @property
    def group(self) -> int:
        """Query heads of a tile: those of a KV head where they are packed."""
        return self.given_group if self.form.pack > 1 else 1

    @property
    def part_blocks(self) -> int:
        """Key blocks of a part."""
        return self.part_keys // self.form.tiling.block_n

    @property
    def totals_shared(self) -> bool:
        """True if what is folded so far lies in shared memory; elsewhere it lies in the GPU's own."""
        return self.form.tiling.consumers == 1 or self.form.tiling.block_d <= 128


def ordered_variant_of(
    head_dim: int, page_size: int, group: int, is_few: bool, flags: AttentionFlags, *, part_keys: int = PART_KEYS
) -> OrderedVariant:
    """The variant for these arguments.

    page_size  of pages; 0 where keys are packed
    group      query heads a KV head
    is_few     whether one consumer has rows enough for a sequence's queries

    Raises ValueError for a head dim that no tiling takes, or a page size that is no multiple of 16.
    """
    return _ordered_variant(head_dim, page_size, group, is_few, *given(flags), part_keys)


@lru_cache
def variants_beside(variant: OrderedVariant) -> tuple[OrderedVariant, ...]:
    """Both variants over pages for the tensors and flags of one of them; none where keys are packed."""
    form = variant.form
    if form.page_size == 0:
        return ()
    sizes, flags = (
        (form.head_dim, form.page_size, variant.given_group),
        (form.window, form.softcap, form.sinks, form.spans),
    )
    return tuple(_ordered_variant(*sizes, is_few, *flags, variant.part_keys) for is_few in (False, True))


@lru_cache
def _ordered_variant(
    head_dim: int, page_size: int, group: int, is_few: bool, window: bool, softcap: bool, sinks: bool, spans: bool,
    part_keys: int,
) -> OrderedVariant:  # fmt: skip
    if page_size % PAGE_SIZE_MULTIPLE:
        raise ValueError(f"page_size: expected a multiple of {PAGE_SIZE_MULTIPLE}, found {page_size}")
    block_d = next((size for size in TILINGS if head_dim <= size), None)
    if block_d is None or head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(f"head_dim: expected a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}, found {head_dim}")
    tiling = TILINGS[block_d]
    if is_few:
        q_buffers = 1 if block_d == 256 else 2
        tiling = replace(tiling, consumers=1, stages=FEW_STAGES[block_d], q_buffers=q_buffers, named_barriers=False)
    # A few queries' heads of any group are packed, for their keys are read from memory; others as in extend.
    is_packed = page_size > 0 and group <= ROWS and (is_few or group.bit_count() == 1)
    pack = 1 << (group - 1).bit_length() if is_packed else 1
    form = Variant(
        tiling, head_dim, True, window, softcap, sinks, spans, page_size=page_size, pack=pack, parts=page_size > 0,
        masks_apart=not (window or spans),
    )  # fmt: skip
    return OrderedVariant(form, part_keys, group, folds_last=is_few)
