"""The plan of `gluon.ordered.hopper`, in Triton's interpreter: parts at absolute borders, and what their sum gives."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.hopper.ordered.launch import Work, combine_parts, plan_pages, tiles_of, work_of
from kernels.hopper.ordered.variants import PART_KEYS, OrderedVariant, ordered_variant_of
from kernels.hopper.schedule import HEADER, ITEM
from support.attention.inputs import NAN, edges

PROCESSORS = 132


def planned(
    q_lens: list[int], contexts: list[int], device: torch.device, *, is_few: bool = True, window: int | None = None,
    most_parts: int | None = None,
) -> tuple[OrderedVariant, Work, list[list[int]], list[list[int]], torch.Tensor]:  # fmt: skip
    """(variant, work, row blocks, tiles, plan) of a batch over pages, with 28 query heads under 4."""
    flags = AttentionFlags(1.0, window=window)
    variant = ordered_variant_of(128, 64, 7, is_few, flags)
    batch = AttentionBatch(
        edges(q_lens, device), max(q_lens), max(contexts),
        page_table=torch.zeros(len(contexts), 1, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
    )  # fmt: skip
    work = work_of(sum(q_lens), (28, 4), batch, flags, variant, PROCESSORS)
    if most_parts is not None:
        work = replace(work, max_parts=most_parts)
    plan = plan_pages(batch, flags, variant, work)
    return variant, work, items_of(plan), items_of(tiles_of(plan, work)), plan


def items_of(plan: torch.Tensor) -> list[list[int]]:
    numbers = plan.tolist()
    return [numbers[HEADER.value + ITEM.value * at :][: ITEM.value] for at in range(numbers[2])]


@pytest.mark.parametrize(
    ("window", "most_parts"), [(None, None), (700, None), (None, 5)], ids=["all", "under a window", "as many as fit"]
)
def test_tiles_are_cut_at_multiples_of_a_part(window: int | None, most_parts: int | None, device: torch.device) -> None:
    rng = random.Random(0)
    contexts = [rng.choice([1, 511, 512, 513, 1500, 9000]) for _ in range(9)]
    _, work, blocks, tiles, _ = planned([1] * 9, contexts, device, window=window, most_parts=most_parts)
    places = sorted(tile[7] for tile in tiles if tile[7] >= 0)
    assert places == list(range(len(places)))
    assert 0 < len(places) <= work.max_parts
    for block in blocks:
        mine = [tile for tile in tiles if tile[0] == block[0]]
        assert (mine[-1][5], mine[0][6]) == (block[5], block[6]), "from the last keys to the first"
        assert all(upper[5] == lower[6] and upper[5] % PART_KEYS == 0 for upper, lower in pairwise(mine))
        if len(mine) > 1:
            assert [tile[7] - mine[0][7] for tile in mine] == list(range(len(mine)))
            assert all(tile[5] // PART_KEYS == (tile[6] - 1) // PART_KEYS for tile in mine)
        else:
            assert mine[0][7] == -1


def test_chunks_that_fill_the_gpu_are_not_split(device: torch.device) -> None:
    assert planned([512], [8704], device, is_few=False)[1].max_parts == 0
    assert planned([64], [8704], device, is_few=False)[1].max_parts > 0


def test_parts_and_a_sink_are_folded_into_a_row(device: torch.device) -> None:
    contexts = [1300, 300]
    variant, work, _, tiles, plan = planned([1, 1], contexts, device)
    sinks = torch.randn(28, device=device)
    shape = (work.max_parts, work.tile_heads, work.part_rows)
    parts = torch.full((*shape, 128), NAN, device=device)
    stats = torch.full((*shape, 2), NAN, device=device)
    out = torch.zeros(2, 28, 128, device=device)
    expected = out.clone()
    for row in range(2):
        mine = [tile[7] for tile in tiles if tile[0] == row and tile[7] >= 0]
        if not mine:
            continue
        of_row = torch.randn(len(mine), 4, 7, 128, device=device)
        m, found = torch.randn(len(mine), 4, 7, device=device) * 4, torch.rand(len(mine), 4, 7, device=device) + 1
        parts[mine, :, :7], stats[mine, :, :7, 0], stats[mine, :, :7, 1] = of_row, m, found
        weights = torch.exp2(m - m.amax(0))
        total = (weights * found).sum(0).view(28) + torch.exp2(sinks * 1.4426950408889634 - m.amax(0).view(28))
        expected[row] = (weights[..., None] * of_row).sum(0).view(28, 128) / total[:, None]
    combine_parts(plan, (parts, stats), out, AttentionFlags(1.0, sinks=sinks), variant, work)()
    assert torch.allclose(out, expected, atol=1e-5)
    assert not out[1].any(), "a row whose keys are one part is its tile's"
