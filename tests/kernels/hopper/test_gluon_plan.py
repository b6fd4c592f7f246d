"""The plan of `gluon.prefill.hopper`: every row block once, in the order of work, with the keys its tile sees."""

import random
from dataclasses import dataclass

import pytest
import torch

from kernels.batch import AttentionBatch, AttentionFlags
from kernels.hopper.schedule import HEADER, ITEM, L2_BYTES, plan_tiles
from kernels.hopper.tensor_layout import value_dims
from kernels.hopper.variants import TILINGS, variant_of


@dataclass(frozen=True, slots=True)
class Block:
    row: int
    rows: int
    position: int
    keys: int
    first_key: int
    begin: int
    end: int


def edges(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def planned(
    q_lens: list[int], k_lens: list[int], device: torch.device, head_dim: int = 128, **flags: object
) -> list[Block]:
    """The blocks listed, in the order of work."""
    batch = AttentionBatch(edges(q_lens, device), max(q_lens), max(k_lens), cu_seqlens_k=edges(k_lens, device))
    layer = AttentionFlags(1.0, **flags)  # type: ignore[arg-type]
    plan = plan_tiles(sum(q_lens), batch, layer, variant_of(head_dim, batch, layer)).tolist()
    assert plan[0] == 0, "the first tile to take"
    items = plan[HEADER.value :]
    return [Block(*items[i * ITEM.value : i * ITEM.value + 7]) for i in range(plan[2])]


def expected_ranges(q_lens: list[int], k_lens: list[int]) -> list[Block]:
    """Every block of a causal batch, in the order of rows."""
    blocks, row, key = [], 0, 0
    for num_rows, num_keys in zip(q_lens, k_lens, strict=True):
        for start in range(0, num_rows, TILINGS[64].block_m):
            position = num_keys - num_rows + start
            end = max(1, min(position + TILINGS[64].block_m, num_keys))
            blocks.append(
                Block(row + start, min(TILINGS[64].block_m, num_rows - start), position, num_keys, key, 0, end)
            )
        row, key = row + num_rows, key + num_keys
    return blocks


@pytest.mark.parametrize("seed", range(6))
def test_every_row_block_of_a_ragged_batch_is_planned_once(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    num_seqs = rng.choice([1, 2, 7, 65, 130])  # more sequences than one step of the plan's loop reads
    q_lens = [rng.choice([0, 1, 127, 128, 129, 700]) for _ in range(num_seqs)] + [1]
    k_lens = [max(0, length + rng.choice([0, 0, 333, -5])) for length in q_lens]
    blocks = planned(q_lens, k_lens, device)
    assert sorted(blocks, key=lambda block: block.row) == expected_ranges(q_lens, k_lens)


def test_blocks_that_see_the_most_keys_come_first(device: torch.device) -> None:
    lengths = [300, 1500, 1, 0, 700]
    levels = [block.position // TILINGS[64].block_m for block in planned(lengths, lengths, device)]
    assert levels == sorted(levels, reverse=True)


def test_keys_beyond_l2_are_planned_group_after_group(device: torch.device) -> None:
    # Half of L2's share a sequence: groups of two. A key of one head is 4 * head_dim bytes with its value.
    length = L2_BYTES // (4 * 256) // 2
    blocks = planned([200] * 4, [length] * 4, device, head_dim=256)
    groups = [block.first_key // (2 * length) for block in blocks]
    assert groups == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_window_narrows_what_a_block_reads(device: torch.device) -> None:
    blocks = sorted(planned([1000], [1000], device, window=100), key=lambda block: block.row)
    assert [block.begin for block in blocks] == [max(0, start - 99) for start in range(0, 1000, TILINGS[64].block_m)]


def test_a_span_widens_what_a_block_reads_both_ways(device: torch.device) -> None:
    spans = torch.zeros(1000, 2, dtype=torch.int32, device=device)
    spans[300] = torch.tensor([40, 900])  # a row of the third block, [256, 384)
    spans[700] = torch.tensor([600, 2000])  # past the sequence: cut at its end
    blocks = sorted(planned([1000], [1000], device, window=100, spans=spans), key=lambda block: block.row)
    assert (blocks[2].begin, blocks[2].end) == (40, 900)
    assert (blocks[5].begin, blocks[5].end) == (541, 1000)
    assert (blocks[1].begin, blocks[1].end) == (29, 256)


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
