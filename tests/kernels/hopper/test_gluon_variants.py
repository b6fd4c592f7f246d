"""Choice of the variant of `gluon.prefill.hopper`, and its cuts of the head dim."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.hopper.extend.variants import extend_variant_of, longer, variants_beside, whole
from kernels.hopper.softmax import EXP2
from kernels.hopper.variants import (
    LONG,
    LONG_SOFTCAP,
    LONG_WINDOW,
    Variant,
    variant_of,
)
from kernels.hopper.wide.decode import run_wide_decode
from kernels.hopper.wide.extend import run_wide_extend
from kernels.hopper.wide.prefill import run_wide_prefill
from kernels.hopper.wide.variants import wide_decode_variant, wide_extend_variant, wide_prefill_variant
from kernels.vocabulary.path import RunAttention


def chosen(head_dim: int, length: int, *, has_context: bool = False, **flags: int) -> Variant:
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    keys = cu_seqlens.clone() if has_context else cu_seqlens
    batch = AttentionBatch(cu_seqlens, length, length, cu_seqlens_k=keys)
    return variant_of(head_dim, batch, AttentionFlags(1.0, **flags))  # type: ignore[arg-type]


FLAGS: tuple[dict[str, float], ...] = ({}, {"window": 100}, {"softcap": 30.0})


def paged(head_dim: int, **flags: float) -> Variant:
    return extend_variant_of(head_dim, 64, 4, AttentionFlags(1.0, **flags))  # type: ignore[arg-type]


COLUMNS = {
    40: (64,), 64: (64,), 72: (64, 16), 80: (64, 16), 88: (128,), 96: (128,), 104: (128,), 128: (128,), 136: (128, 16),
    192: (128, 64), 200: (256,), 256: (256,),
}  # fmt: skip
UNSPLIT_COLUMNS = {72: (64, 16), 80: (64, 16), 88: (64, 32), 96: (64, 32), 104: (128,)}


def test_a_padded_head_dim_is_cut_where_that_is_less() -> None:
    """Compare prompts and pages, and for pages also tiles that are not split."""
    assert {head_dim: chosen(head_dim, 100).columns for head_dim in COLUMNS} == COLUMNS
    assert chosen(96, 100).slices == ((0, 64), (64, 32)), "of 64 and 32 columns only the scores are cut"
    assert chosen(104, 100).slices == ((0, 128),)
    for head_dim, columns in UNSPLIT_COLUMNS.items():
        plain, *flagged = (paged(head_dim, **flags) for flags in FLAGS)
        assert (plain.columns, whole(plain).columns) == (COLUMNS[head_dim], columns)
        assert sum(plain.widths) == sum(whole(plain).widths)
        assert all(len(it.widths) == len(whole(it).widths) == 1 for it in flagged)


def test_the_slices_of_scores_cover_what_is_computed_once() -> None:
    for head_dim in range(8, 257, 8):
        variant, end = chosen(head_dim, 100), 0
        for first, width in variant.slices:
            assert first == end, head_dim
            assert width.bit_count() == 1, head_dim
            end += width
        assert end == sum(variant.widths) >= head_dim


def test_rows_of_192_columns_are_two_parts_copied_by_64() -> None:
    for variant in (chosen(136, 100), chosen(192, LONG), chosen(192, LONG, has_context=True, window=LONG_WINDOW)):
        assert variant.row_parts == (128, 64)
        assert variant.copied == 64
        assert variant.copies == ((0, 0, 0), (0, 64, 64), (1, 0, 128))


def test_consumers_take_turns_at_192_without_flags_only() -> None:
    assert chosen(192, 100).tiling.named_barriers
    assert chosen(136, LONG) == replace(chosen(192, LONG), head_dim=136)
    for flagged in (
        chosen(192, LONG, window=LONG_WINDOW),
        chosen(192, 100, softcap=30),
        chosen(192, 9, has_context=True),
    ):
        assert not flagged.tiling.named_barriers


def test_paged_rows_of_192_columns_have_whole_partial_results() -> None:
    for variant in (paged(head_dim, **flags) for head_dim in (136, 192) for flags in FLAGS):
        assert (variant.row_parts, variant.copied, variant.tiling.part_d) == ((128, 64), 64, 256)
        assert whole(variant) == longer(variant) == variant
        assert not variant.tiling.named_barriers
    assert paged(80).tiling.part_d == 128


def test_rows_of_a_power_of_two_are_copied_whole() -> None:
    for variant in (chosen(head_dim, 100) for head_dim in (64, 80, 128, 200, 256)):
        assert variant.row_parts == (variant.tiling.block_d,) == (variant.copied,)
        assert variant.copies == ((0, 0, 0),)


def test_unsplit_chunks_at_128_have_scores_ahead() -> None:
    plain, windowed, capped = (whole(paged(128, **flags)) for flags in FLAGS)
    assert plain.tiling.scores_ahead
    assert not any((capped.tiling.scores_ahead, capped.masks_apart, plain.parts, capped.parts))
    assert windowed == paged(128, window=100)


WINDOW = {"window": LONG_WINDOW}
# Head dim, length, flags; the consumers, and whether blocks below the window are skipped and weights by polynomials.
CHOICES = [
    (64, LONG, {}, 3, False, False),
    (64, LONG - 1, {}, 2, False, False),
    (64, LONG, WINDOW, 3, True, False),
    (64, LONG, {"window": LONG_WINDOW - 1}, 2, False, False),
    (64, LONG, {**WINDOW, "has_context": True}, 2, False, False),
    (128, LONG, WINDOW, 2, False, False),
    (64, LONG_SOFTCAP, {"softcap": 30}, 3, False, True),  # alone it goes there earlier
    (64, LONG_SOFTCAP - 1, {"softcap": 30}, 2, False, False),
    (128, LONG, {"softcap": 30}, 2, False, False),
    *((64, LONG - 1, {"softcap": 30, **beside}, 2, False, False) for beside in (WINDOW, {"has_context": True})),
]


@pytest.mark.parametrize(("head_dim", "length", "flags", "consumers", "skips_low", "has_polynomials"), CHOICES)
def test_three_consumers_serve_long_prompts_of_64_columns(
    head_dim: int, length: int, flags: dict[str, int], consumers: int, skips_low: bool, has_polynomials: bool
) -> None:
    variant = chosen(head_dim, length, **flags)  # type: ignore[arg-type]
    assert (variant.tiling.consumers, variant.skips_low, variant.has_polynomials) == (
        consumers, skips_low, has_polynomials,
    )  # fmt: skip


def test_the_polynomial_errs_below_a_sixth_of_fp16_rounding() -> None:
    x = torch.linspace(-0.5, 0.5, 10_001, dtype=torch.float64)
    found = sum(coefficient * x**power for power, coefficient in enumerate(EXP2))
    assert ((found / 2**x) - 1).abs().max() < torch.finfo(torch.float16).eps / 2 / 6


def test_an_unsplit_batch_has_the_tiles_of_its_plan() -> None:
    """The plan is made before `whole` chooses; and what it may choose is loaded beside what it was chosen from."""
    sinks, spans = torch.zeros(8), torch.zeros(3, 2, dtype=torch.int32)
    for head_dim, group, given in product(range(8, 257, 8), (1, 4, 7), (*FLAGS, {"sinks": sinks}, {"spans": spans})):
        plain = extend_variant_of(head_dim, 64, group, AttentionFlags(1.0, **given))  # type: ignore[arg-type]
        for planned in (plain, longer(plain)):
            served = whole(planned)
            assert (served.tiling.block_m, served.pack) == (planned.tiling.block_m, planned.pack), planned
            assert (served.tiling.block_n, served.box) == (planned.tiling.block_n, planned.box), planned
            assert {planned, served} <= set(variants_beside(planned)), planned


def test_heads_of_512_have_tiles_of_64_rows_that_two_consumers_share() -> None:
    for variant in (wide_prefill_variant(True), wide_extend_variant(16, 8, True), wide_extend_variant(64, 6, False)):
        assert (variant.tiling.consumers, variant.tiling.block_m) == (2, 64)
        assert sum(width for _, width in variant.slices) == 512
    assert (wide_extend_variant(64, 8, True).pack, wide_extend_variant(64, 6, True).pack) == (8, 1)
    assert [wide_decode_variant(64, heads, 1).heads for heads in ((16, 2), (8, 1), (32, 4))] == [2, 1, 2]
    assert wide_decode_variant(64, (16, 2), 8, of_few=True) == wide_decode_variant(64, (16, 2), 8)
    with pytest.raises(ValueError, match="page_size: expected a multiple of 16, found 24"):
        wide_decode_variant(24, (16, 2), 1)


@pytest.mark.parametrize("run", [run_wide_prefill, run_wide_extend, run_wide_decode])
def test_paths_of_heads_of_512_refuse_what_they_do_not_compute(run: RunAttention) -> None:
    batch = AttentionBatch(torch.tensor([0, 1], dtype=torch.int32), 1, 1)
    for head_dim, flags, message in (
        (256, {}, "head_dim: expected 512, found 256"),
        (512, {"window": 128}, "window: expected none with heads of 512, found 128"),
        (512, {"softcap": 30.0}, "softcap: expected none"),
        (512, {"spans": torch.zeros(1, 2, dtype=torch.int32)}, "spans: expected none"),
    ):
        x = torch.zeros(1, 1, head_dim, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=message):
            run(x, x, x, batch, AttentionFlags(1.0, **flags), torch.empty_like(x))  # type: ignore[arg-type]
