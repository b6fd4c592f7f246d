"""The plans of prefill and extend: every row block once, in the order of work, with the keys its tile sees.

Of extend also its keys in parts that leave none out, and the tensor maps of pages.
"""

import heapq
import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.hopper.extend.launch import (
    Work,
    as_rows,
    is_long_work,
    page_maps,
    plan_extend,
    rows_of_page,
    tiles_of,
    work_of,
)
from kernels.hopper.extend.variants import extend_variant_of, longer, variants_beside, whole
from kernels.hopper.schedule import HEADER, ITEM, L2_BYTES, plan_tiles
from kernels.hopper.tensor_layout import value_dims
from kernels.hopper.variants import TILINGS, Variant, variant_of

PROCESSORS = 132
BLOCK_M = TILINGS[64].block_m


@dataclass(frozen=True, slots=True)
class Block:
    """A row block, or of extend what a tile is made of. prefill: `first_key` of the sequence; extend: its number."""

    row: int
    rows: int
    position: int
    keys: int
    first_key: int
    begin: int
    end: int
    place: int  # of partial results; of no meaning in prefill


def edges(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def blocks_of(plan: torch.Tensor) -> list[Block]:
    numbers = plan.tolist()
    assert numbers[0] == 0, "the first tile to take"
    items = numbers[HEADER.value :]
    return [Block(*items[i * ITEM.value : i * ITEM.value + 8]) for i in range(numbers[2])]


def planned_prompts(
    q_lens: list[int], k_lens: list[int], device: torch.device, head_dim: int = 128, **flags: object
) -> list[Block]:
    """The blocks listed, in the order of work."""
    batch = AttentionBatch(edges(q_lens, device), max(q_lens), max(k_lens), cu_seqlens_k=edges(k_lens, device))
    layer = AttentionFlags(1.0, **flags)  # type: ignore[arg-type]
    return blocks_of(plan_tiles(sum(q_lens), batch, layer, variant_of(head_dim, batch, layer)))


def paged_batch(q_lens: list[int], contexts: list[int], device: torch.device) -> AttentionBatch:
    lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    table = torch.zeros(len(q_lens), -(-max(contexts) // 64), dtype=torch.int32, device=device)
    return AttentionBatch(edges(q_lens, device), max(q_lens), max(contexts), page_table=table, context_lens=lens)


def planned(
    q_lens: list[int],
    contexts: list[int],
    device: torch.device,
    *,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    **given: object,
) -> tuple[Variant, Work, list[Block], list[Block]]:
    """(variant, work, row blocks in the order of work, what tiles are made of) of chunks."""
    flags = AttentionFlags(1.0, **given)  # type: ignore[arg-type]
    batch = paged_batch(q_lens, contexts, device)
    variant = extend_variant_of(head_dim, 64, heads[0] // heads[1], flags)
    work = work_of(sum(q_lens), *heads, batch, variant, PROCESSORS)
    plan = plan_extend(batch, flags, variant, work, PROCESSORS)
    return variant, work, blocks_of(plan), blocks_of(tiles_of(plan, work))


def expected_blocks(q_lens: list[int], k_lens: list[int], block_q: int, *, paged: bool) -> list[tuple[int, ...]]:
    """Every block of a causal batch, in the order of rows, without its place."""
    blocks, row, key = [], 0, 0
    for sequence, (num_rows, num_keys) in enumerate(zip(q_lens, k_lens, strict=True)):
        for start in range(0, num_rows, block_q):
            position = num_keys - num_rows + start
            end = max(1, min(position + block_q, num_keys))
            rows = min(block_q, num_rows - start)
            blocks.append((row + start, rows, position, num_keys, sequence if paged else key, 0, end))
        row, key = row + num_rows, key + num_keys
    return blocks


def told(blocks: list[Block]) -> list[tuple[int, ...]]:
    return sorted((b.row, b.rows, b.position, b.keys, b.first_key, b.begin, b.end) for b in blocks)


@pytest.mark.parametrize(("seed", "num_seqs"), [(0, 1), (2, 66)])
def test_every_row_block_of_ragged_prompts_is_planned_once(seed: int, num_seqs: int, device: torch.device) -> None:
    rng = random.Random(seed)  # 66: more sequences than one step of the plan's loop reads
    q_lens = [rng.choice([0, 1, 127, 128, 129, 300]) for _ in range(num_seqs)] + [1]
    k_lens = [max(0, length + rng.choice([0, 0, 333, -5])) for length in q_lens]
    found = told(planned_prompts(q_lens, k_lens, device))
    assert found == expected_blocks(q_lens, k_lens, BLOCK_M, paged=False)


@pytest.mark.parametrize(("seed", "num_seqs"), [(0, 1), (3, 66)])
def test_every_row_block_of_ragged_chunks_is_planned_once(seed: int, num_seqs: int, device: torch.device) -> None:
    rng = random.Random(seed)
    q_lens = [rng.choice([0, 1, 31, 32, 33, 200]) for _ in range(num_seqs)] + [1]
    contexts = [max(0, length + rng.choice([0, 1, 333, 5000, -5])) for length in q_lens]
    variant, _, blocks, _ = planned(q_lens, contexts, device, heads=rng.choice([(32, 8), (14, 2), (4, 4)]))
    assert told(blocks) == expected_blocks(q_lens, contexts, BLOCK_M // variant.pack, paged=True)


def test_blocks_that_see_the_most_keys_come_first(device: torch.device) -> None:
    lengths = [300, 1500, 1, 0, 700]
    levels = [block.position // BLOCK_M for block in planned_prompts(lengths, lengths, device)]
    assert levels == sorted(levels, reverse=True)
    _, _, blocks, _ = planned([300, 40, 1, 0, 700, 40], [5000, 9000, 1, 7, 700, 9000], device)
    order = [(-block.keys, block.first_key, -block.position) for block in blocks]
    assert order == sorted(order)


def test_keys_beyond_l2_are_planned_group_after_group(device: torch.device) -> None:
    # Half of L2's share a sequence: groups of two. A key of one head is 4 * head_dim bytes with its value.
    length = L2_BYTES // (4 * 256) // 2
    blocks = planned_prompts([200] * 4, [length] * 4, device, head_dim=256)
    groups = [block.first_key // (2 * length) for block in blocks]
    assert groups == [0, 0, 0, 0, 1, 1, 1, 1]


def flagged(context: int, device: torch.device, **flags: object) -> list[Block]:
    """The blocks of 1000 queries that end at a context, as prompts where that is 1000."""
    if context == 1000:
        blocks = planned_prompts([1000], [1000], device, **flags)
    else:
        _, _, blocks, _ = planned([1000], [context], device, heads=(2, 2), **flags)
    return sorted(blocks, key=lambda block: block.row)


@pytest.mark.parametrize("context", [1000, 5000])
def test_a_window_narrows_what_a_block_reads(context: int, device: torch.device) -> None:
    begins = [block.begin for block in flagged(context, device, window=100)]
    assert begins == [max(0, context - 1000 + start - 99) for start in range(0, 1000, BLOCK_M)]


@pytest.mark.parametrize("context", [1000, 4000])
def test_a_span_widens_what_a_block_reads_both_ways(context: int, device: torch.device) -> None:
    before = context - 1000
    spans = torch.zeros(1000, 2, dtype=torch.int32, device=device)
    spans[300] = torch.tensor([40, before + 900])  # a row of the third block, [256, 384)
    spans[700] = torch.tensor([before + 600, 9000])  # past the sequence: cut at its end
    blocks = flagged(context, device, window=100, spans=spans)
    assert (blocks[2].begin, blocks[2].end) == (40, before + 900)
    assert (blocks[5].begin, blocks[5].end) == (before + 541, context)
    assert (blocks[1].begin, blocks[1].end) == (before + 29, before + 256)


def test_the_map_of_values_addresses_rows_modulo_2_to_the_64() -> None:
    v = torch.empty(64, 4, 128, dtype=torch.float16)
    shape, strides = value_dims(v.shape, v.stride())
    half = shape[2]
    for row, rows in ((0, 0), (5, 17), (2**29, 128)):
        index = (half, row + rows, half - rows, 0, 0)
        elements = sum(i * stride for i, stride in zip(index, strides, strict=True))
        assert elements * 2 % 2**64 == row * v.stride(0) * 2
        assert all(0 <= i < size for i, size in zip(index[:2], shape[:2], strict=True))


@pytest.mark.parametrize("head_dim", [4, 257, 320])
def test_a_head_dim_beyond_the_tilings_is_refused(head_dim: int, device: torch.device) -> None:
    cu_seqlens = edges([1], device)
    batch = AttentionBatch(cu_seqlens, 1, 1, cu_seqlens_k=cu_seqlens)
    with pytest.raises(ValueError, match=f"multiple of 8 up to 256, found {head_dim}"):
        variant_of(head_dim, batch, AttentionFlags(1.0))


def test_shared_offsets_need_no_offset_masks(device: torch.device) -> None:
    cu_seqlens = edges([5, 9], device)
    shared = AttentionBatch(cu_seqlens, 9, 9, cu_seqlens_k=cu_seqlens)
    apart = AttentionBatch(cu_seqlens, 9, 9, cu_seqlens_k=cu_seqlens.clone())
    assert not variant_of(128, shared, AttentionFlags(1.0)).offset
    assert variant_of(128, apart, AttentionFlags(1.0)).offset


@pytest.mark.parametrize(
    ("q_lens", "contexts", "heads"),
    [
        ([64], [131072], (32, 8)),
        ([512], [33280], (16, 4)),
        ([16, 100, 700], [70000, 200, 9000], (32, 8)),
        ([5] * 8, [2000 * i + 5 for i in range(8)], (2, 1)),
    ],
)
def test_parts_cover_the_keys_of_each_row_block_once(
    q_lens: list[int], contexts: list[int], heads: tuple[int, int], device: torch.device
) -> None:
    variant, work, blocks, tiles = planned(q_lens, contexts, device, heads=heads)
    block_n = variant.tiling.block_n
    places = [tile.place for tile in tiles if tile.place >= 0]
    assert sorted(places) == list(range(len(places))), "each part has its own place"
    assert 0 < len(places) <= work.max_parts
    for block in blocks:
        mine = sorted((tile for tile in tiles if tile.row == block.row), key=lambda tile: tile.begin)
        assert (mine[0].begin, mine[-1].end) == (block.begin, block.end)
        assert all(left.end == right.begin for left, right in pairwise(mine))
        assert all(tile.begin % block_n == 0 for tile in mine[1:])
        assert (block.place >= 0) == (len(mine) > 1)
        if len(mine) > 1:  # the first part has the last keys
            assert [tile.place for tile in reversed(mine)] == list(range(block.place, block.place + len(mine)))


def test_a_short_chunk_over_a_long_context_fills_the_processors(device: torch.device) -> None:
    _, work, _, tiles = planned([64], [131072], device)
    assert 0.9 * PROCESSORS <= len(tiles) * work.tile_heads <= 3 * PROCESSORS


def test_one_long_context_among_short_ones_is_split(device: torch.device) -> None:
    _, _, _, tiles = planned([32] * 20 + [32], [500] * 20 + [100_000], device)
    longest = max(tile.end - tile.begin for tile in tiles)
    assert longest < 100_000 / 8


def time_of(work: Work, tiles: list[Block], block_n: int) -> float:
    """Return when the last processor ends, each taking the next tile when free: in blocks of keys, over even shares."""
    lengths = [(tile.end - 1) // block_n + 1 - tile.begin // block_n for tile in tiles for _ in range(work.tile_heads)]
    ends = [0] * PROCESSORS
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends) / (sum(lengths) / PROCESSORS)


def test_chunks_that_fill_the_gpu_but_for_little_are_not_split(device: torch.device) -> None:
    for q_len, heads in ((512, (32, 8)), (2048, (32, 8)), (2048, (16, 4))):
        assert planned([q_len], [q_len + 8192], device, heads=heads)[1].max_parts == 0
    assert planned([8192, 8192], [40_000, 16_000], device)[1].max_parts == 0, "many tiles are not split either"


@pytest.mark.parametrize(
    ("q_len", "context", "heads", "head_dim"),
    [
        (2048, 34816, (32, 8), 128),  # 3.88 waves of 132 tiles
        (512, 131072, (32, 8), 64),  # 0.97
        (2048, 131072, (16, 4), 256),  # 1.94
        (512, 33280, (16, 4), 256),  # 0.48
    ],
)
def test_idle_processors_get_the_first_keys_of_other_tiles(
    q_len: int, context: int, heads: tuple[int, int], head_dim: int, device: torch.device
) -> None:
    variant, work, blocks, tiles = planned([q_len], [context], device, heads=heads, head_dim=head_dim)
    num_waves = len(blocks) * work.tile_heads / PROCESSORS
    num_whole = sum(tile.place < 0 for tile in tiles)
    assert num_whole == int(num_waves) * PROCESSORS // work.tile_heads, "whole waves stay whole"
    assert time_of(work, tiles, variant.tiling.block_n) < 1.02
    firsts = [tile for tile in tiles if tile.place >= 0 and tile.begin == 0]
    assert tiles[-len(firsts) :] == firsts, "they come last"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_same_variants_are_made_ready_whichever_comes_first(head_dim: int) -> None:
    variant = extend_variant_of(head_dim, 64, 4, AttentionFlags(1.0))
    ready = variants_beside(variant)
    assert {variant, longer(variant), whole(variant)} == set(ready)
    assert all(variants_beside(each) == ready for each in ready)


def test_three_consumers_serve_long_work_of_well_filled_tiles(device: torch.device) -> None:
    def is_long(q_lens: list[int], contexts: list[int], **given: object) -> bool:
        flags = AttentionFlags(1.0, **given)  # type: ignore[arg-type]
        variant = extend_variant_of(64, 64, 4, flags)
        return is_long_work(sum(q_lens), 32, paged_batch(q_lens, contexts, device), variant, PROCESSORS)

    assert is_long([512], [131072])
    assert is_long([2048], [34816])
    assert is_long([4096], [12_288])
    assert not is_long([2048], [10240]), "two are faster, with smaller tiles"
    assert not is_long([1024], [33_792]), "and here"
    assert not is_long([64], [131072]), "most rows would be empty"
    assert not is_long([64] * 100, [30_000] * 100), "of each sequence most rows would be empty"
    for flags in (AttentionFlags(1.0, window=100), AttentionFlags(1.0, softcap=30.0)):
        flagged = extend_variant_of(64, 64, 4, flags)
        assert longer(flagged) == flagged


def test_a_part_of_a_wave_is_split_so_that_all_end_together(device: torch.device) -> None:
    variant, work, blocks, tiles = planned([1280], [34048], device)  # 40 row blocks under 8 heads: 2.4 waves of 132
    assert len(blocks) == 40
    assert sum(tile.place < 0 for tile in tiles) == 2 * PROCESSORS // work.tile_heads
    assert time_of(work, tiles, variant.tiling.block_n) < 1.06


@pytest.mark.parametrize("page_size", [1, 24, 72])
def test_a_page_size_that_no_copy_takes_is_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 16, found {page_size}"):
        extend_variant_of(128, page_size, 4, AttentionFlags(1.0))


@pytest.mark.parametrize(("group", "pack"), [(1, 1), (2, 2), (4, 4), (64, 64), (7, 1), (6, 1), (128, 1)])
def test_query_heads_of_a_group_are_packed_into_a_tile(group: int, pack: int) -> None:
    assert extend_variant_of(128, 64, group, AttentionFlags(1.0)).pack == pack


@pytest.mark.parametrize(("page_size", "head_dim", "box"), [(16, 128, 16), (64, 128, 64), (128, 256, 64), (96, 64, 32)])
def test_a_copy_never_crosses_the_border_of_a_page(page_size: int, head_dim: int, box: int) -> None:
    assert extend_variant_of(head_dim, page_size, 4, AttentionFlags(1.0)).box == box


class Kernel:
    """Stands in for a loaded one; its tensor maps are their addresses."""

    boxes = ((0, 2),) * 3  # its elements are of two bytes

    def encode(self, address: int, *_: object) -> int:
        return address


def test_pages_whole_rows_apart_are_addressed_without_a_copy() -> None:
    pool = torch.empty(6, 2, 16, 4, 8, dtype=torch.float16)
    beside_values, whole = pool[:, 1], pool.flatten(0, 1)
    head_first = torch.empty(12, 4, 16, 8, dtype=torch.float16).transpose(1, 2)
    for pages, expected in ((beside_values, 32), (whole, 16), (head_first, 64)):
        assert as_rows(pages) is pages
        maps = page_maps(Kernel(), pages.shape, pages.stride(), pages.stride())  # type: ignore[arg-type]
        address, *numbers = maps[pages.data_ptr(), 0][:7]
        rows = pages.as_strided(numbers[:3], numbers[3:])  # type: ignore[arg-type]
        assert (address, rows_of_page(pages.stride())) == (pages.data_ptr(), expected)
        assert rows[2 * expected + 3].data_ptr() == pages[2, 3].data_ptr()


def test_pages_that_a_tensor_map_cannot_address_are_copied() -> None:
    of_18_bytes = torch.arange(2 * 16 * 9, dtype=torch.float16).view(2, 16, 1, 9)[..., :8]
    odd = torch.arange(2 * 16 * 8 + 4, dtype=torch.float16)[4:].view(2, 16, 1, 8)
    between_rows = torch.arange(2 * 264.0).half().as_strided((2, 16, 1, 8), (264, 16, 8, 1))
    for pages in (of_18_bytes, odd, between_rows):
        copy = as_rows(pages)
        assert copy.data_ptr() != pages.data_ptr()
        assert torch.equal(copy, pages)
        assert as_rows(copy) is copy
