"""Choice of the variant of `gluon.prefill.hopper`, and its cuts of the head dim."""

from dataclasses import replace

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


def chosen(head_dim: int, length: int, *, has_context: bool = False, **flags: int) -> Variant:
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    keys = cu_seqlens.clone() if has_context else cu_seqlens
    batch = AttentionBatch(cu_seqlens, length, length, cu_seqlens_k=keys)
    return variant_of(head_dim, batch, AttentionFlags(1.0, **flags))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head_dim", "columns"),
    [(40, (64,)), (64, (64,)), (72, (64, 16)), (80, (64, 16)), (88, (128,)), (96, (128,)), (104, (128,)),
     (128, (128,)), (136, (128, 16)), (192, (128, 64)), (200, (256,)), (256, (256,))],
)  # fmt: skip
def test_a_padded_head_dim_is_cut_where_that_is_less(head_dim: int, columns: tuple[int, ...]) -> None:
    variant = chosen(head_dim, 100)
    assert variant.columns == columns
    assert sum(columns) >= head_dim


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_the_slices_of_scores_cover_what_is_computed_once(head_dim: int) -> None:
    variant = chosen(head_dim, 100)
    end = 0
    for first, width in variant.slices:
        assert first == end
        assert width.bit_count() == 1
        end += width
    assert end == sum(variant.widths)


def test_of_64_and_32_columns_only_the_scores_are_cut() -> None:
    assert chosen(96, 100).slices == ((0, 64), (64, 32))
    assert chosen(104, 100).slices == ((0, 128),)


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
    assert not extend_variant_of(192, 64, 4, AttentionFlags(1.0)).tiling.named_barriers


@pytest.mark.parametrize("flags", [{}, {"window": 100}, {"softcap": 30.0}])
def test_paged_rows_of_192_columns_have_whole_partial_results(flags: dict[str, int]) -> None:
    for head_dim in (136, 192):
        variant = extend_variant_of(head_dim, 64, 4, AttentionFlags(1.0, **flags))  # type: ignore[arg-type]
        assert (variant.row_parts, variant.copied, variant.tiling.part_d) == ((128, 64), 64, 256)
        assert whole(variant) == longer(variant) == variant
    assert extend_variant_of(80, 64, 4, AttentionFlags(1.0)).tiling.part_d == 128


@pytest.mark.parametrize("head_dim", [64, 80, 128, 200, 256])
def test_rows_of_a_power_of_two_are_copied_whole(head_dim: int) -> None:
    variant = chosen(head_dim, 100)
    assert variant.row_parts == (variant.tiling.block_d,) == (variant.copied,)
    assert variant.copies == ((0, 0, 0),)


@pytest.mark.parametrize(
    ("head_dim", "split", "unsplit"),
    [
        (72, (64, 16), (64, 16)),
        (80, (64, 16), (64, 16)),
        (88, (128,), (64, 32)),
        (96, (128,), (64, 32)),
        (104, (128,), (128,)),
    ],
)
def test_paged_head_dims_are_cut_where_measured(
    head_dim: int, split: tuple[int, ...], unsplit: tuple[int, ...]
) -> None:
    variant = extend_variant_of(head_dim, 64, 4, AttentionFlags(1.0))
    assert (variant.columns, whole(variant).columns) == (split, unsplit)
    assert sum(variant.widths) == sum(whole(variant).widths)
    for flags in (AttentionFlags(1.0, window=100), AttentionFlags(1.0, softcap=30.0)):
        flagged = extend_variant_of(head_dim, 64, 4, flags)
        assert len(flagged.widths) == len(whole(flagged).widths) == 1


def test_unsplit_chunks_at_128_have_scores_ahead() -> None:
    plain, capped, windowed = (
        extend_variant_of(128, 64, 4, AttentionFlags(1.0, **flags))  # type: ignore[arg-type]
        for flags in ({}, {"softcap": 30.0}, {"window": 1000})
    )
    assert whole(plain).tiling.scores_ahead
    assert not whole(capped).tiling.scores_ahead
    assert not whole(capped).masks_apart
    assert not whole(plain).parts
    assert not whole(capped).parts
    assert whole(windowed) == windowed


def test_three_consumers_serve_long_prompts() -> None:
    assert chosen(64, LONG).tiling.consumers == 3
    assert chosen(64, LONG - 1).tiling.consumers == 2
    assert chosen(64, LONG, window=LONG_WINDOW).skips_low
    assert chosen(64, LONG, window=LONG_WINDOW - 1).tiling.consumers == 2
    assert chosen(64, LONG, window=LONG_WINDOW, has_context=True).tiling.consumers == 2
    assert chosen(128, LONG, window=LONG_WINDOW).tiling.consumers == 2


def test_a_softcap_alone_uses_polynomials_earlier() -> None:
    assert chosen(64, LONG_SOFTCAP, softcap=30).has_polynomials
    assert chosen(64, LONG_SOFTCAP - 1, softcap=30).tiling.consumers == 2
    assert not chosen(64, LONG_SOFTCAP - 1, softcap=30).has_polynomials
    assert not chosen(128, LONG, softcap=30).has_polynomials
    assert not chosen(64, LONG).has_polynomials
    for beside in ({"window": LONG_WINDOW}, {"has_context": True}):
        assert chosen(64, LONG - 1, softcap=30, **beside).tiling.consumers == 2
        assert not chosen(64, LONG, softcap=30, **beside).has_polynomials


def test_the_polynomial_errs_below_a_sixth_of_fp16_rounding() -> None:
    x = torch.linspace(-0.5, 0.5, 10_001, dtype=torch.float64)
    found = sum(coefficient * x**power for power, coefficient in enumerate(EXP2))
    assert ((found / 2**x) - 1).abs().max() < torch.finfo(torch.float16).eps / 2 / 6


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_an_unsplit_batch_has_the_tiles_of_its_plan(head_dim: int, group: int) -> None:
    """The plan is made before `whole` chooses; and what it may choose is loaded beside what it was chosen from."""
    sinks, spans = torch.zeros(8), torch.zeros(3, 2, dtype=torch.int32)
    for given in ({}, {"window": 9}, {"softcap": 9.0}, {"sinks": sinks}, {"spans": spans}):
        plain = extend_variant_of(head_dim, 64, group, AttentionFlags(1.0, **given))  # type: ignore[arg-type]
        for planned in (plain, longer(plain)):
            served = whole(planned)
            assert (served.tiling.block_m, served.pack) == (planned.tiling.block_m, planned.pack)
            assert (served.tiling.block_n, served.box) == (planned.tiling.block_n, planned.box)
            assert {planned, served} <= set(variants_beside(planned))
