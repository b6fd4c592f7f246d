"""The shipped variants of `gluon.extend.hopper`: those of prefill over pages, by how much work there is of a batch."""

from dataclasses import replace
from functools import lru_cache

from kernels.calls.batch import AttentionFlags
from kernels.hopper.variants import LONG_TILINGS, ROWS, TILINGS, Tiling, Variant, given, variant_with

PAGE_SIZE_MULTIPLE = 16  # a box of fewer rows would be mostly overhead

# Where they are others than prefill's. Turns give 2 % at 64 as well, of a chunk of 512 over 8k 5 % (H200). At 192 a
# third stage in place of the next tile's queries gives 2-4 %, turns cost 2-6 %.
PAGED_TILINGS: dict[int, Tiling] = {
    64: replace(TILINGS[64], stages=3, named_barriers=True),
    128: Tiling(2, 128, 128, 2, 2, named_barriers=True, pv_first=False, lazy_rescale=False),
    192: replace(TILINGS[192], stages=3, q_buffers=1, named_barriers=False),
}
# At 128 where no keys are split. The third stage takes the memory of a second buffer of queries, which chunks of a few
# tiles a multiprocessor do not miss, and that of wider stores. Scores ahead without it give 2 % (H200).
WHOLE_TILING = Tiling(
    2, 128, 128, 3, 1, named_barriers=True, pv_first=False, lazy_rescale=True, scores_ahead=True, early_waits=True,
    stored_as_is=True,
)  # fmt: skip


def extend_variant_of(head_dim: int, page_size: int, group: int, flags: AttentionFlags) -> Variant:
    """The variant that serves chunks over pages; group: query heads a KV head. `longer` gives the one for much work.

    Raises ValueError for a head dim that no tiling takes, or a page size that is no multiple of 16.
    """
    return _extend_variant(head_dim, page_size, group, *given(flags))


@lru_cache
def _extend_variant(
    head_dim: int, page_size: int, group: int, window: bool, softcap: bool, sinks: bool, spans: bool
) -> Variant:
    if page_size % PAGE_SIZE_MULTIPLE:
        raise ValueError(f"page_size: expected a multiple of {PAGE_SIZE_MULTIPLE}, found {page_size}")
    plain = variant_with(head_dim, False, True, window, softcap, sinks, spans)
    tiling = PAGED_TILINGS.get(plain.tiling.block_d, plain.tiling)
    pack = group if group <= ROWS and group.bit_count() == 1 else 1
    # A loop of its own for masked blocks gives 1-2 % at 256; at 64 scores ahead lose without it. At 128, where keys are
    # split, it gives 7-9 % together with lazy rescaling, either alone up to 1 %; it is not measured with a softcap.
    masks_apart = tiling.block_d != 128 and not (window or spans)
    if tiling.block_d == 128 and not (window or softcap or spans):
        # Cut in two 72 and 80 gain 9-11 % with scores ahead, 88 and 96 5 % without.
        tiling, masks_apart = replace(tiling, lazy_rescale=True, cut=True) if head_dim > 80 else TILINGS[128], True
    return replace(plain, tiling=tiling, page_size=page_size, pack=pack, parts=True, masks_apart=masks_apart)


@lru_cache
def longer(variant: Variant) -> Variant:
    """Return the variant of extend for much work: `variant` itself but at 64 without window, softcap and spans.

    Three consumers are up to 3 % faster there, if their larger tiles leave no multiprocessors without work; under a
    softcap 6 % slower. With P V first they keep two words of a tile's end elsewhere; else it would be 29 (ptxas 12.8).
    """
    tiling = LONG_TILINGS.get(variant.tiling.block_d)
    if tiling is None or variant.window or variant.softcap or variant.spans:
        return variant
    return replace(variant, tiling=replace(tiling, pv_first=True, lazy_rescale=True), masks_apart=False)


@lru_cache
def whole(variant: Variant) -> Variant:
    """Return the variant of extend for a batch without split keys: another one at 128 only.

    It gives 5-6 % over one like that for parts without lazy rescaling, which still serves under a softcap: there
    it is not measured (H200).
    """
    if variant.tiling.block_d != 128 or variant.window or variant.spans:
        return variant
    if variant.head_dim <= 96 and not variant.softcap:  # cut: 9-16 % faster than what is not
        return replace(variant, tiling=TILINGS[128], parts=False)
    tiling = PAGED_TILINGS[128] if variant.softcap else WHOLE_TILING
    return replace(variant, tiling=tiling, parts=False, masks_apart=not variant.softcap)


@lru_cache
def variants_beside(variant: Variant) -> tuple[Variant, ...]:
    """All variants of extend for the tensors and flags of one of them."""
    flags = (variant.window, variant.softcap, variant.sinks, variant.spans)
    plain = _extend_variant(variant.head_dim, variant.page_size, variant.pack, *flags)
    return tuple(dict.fromkeys((plain, longer(plain), whole(plain))))
