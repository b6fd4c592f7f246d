"""triton.extend against the oracle; unused slots are NaN and page-table tails poisoned in every test."""

from dataclasses import replace

import pytest
import torch
from attention_inputs import NAN, POISON_PAGE, assert_right, attend, flags_for, paged

from kernels.portable.extend import run_extend


@pytest.mark.parametrize("page_size", [1, 16, 24])  # 24: neither a power of two nor a divisor of the tile
def test_contexts_at_page_and_tile_edges(page_size: int, device: torch.device) -> None:
    inputs = paged([1, 5, 16, 3, 0, 33], [15, 16, 17, 33, 8, 65], device, page_size=page_size)
    assert_right(run_extend, inputs, flags_for(inputs))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)])
def test_query_heads_share_the_keys_of_their_group(heads: tuple[int, int], device: torch.device) -> None:
    inputs = paged([9, 1], [20, 40], device, heads=heads, head_dim=16)
    assert_right(run_extend, inputs, flags_for(inputs))


@pytest.mark.parametrize("head_dim", [80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_head_dims(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = paged([12, 5], [40, 5], device, head_dim=head_dim, dtype=dtype)
    assert_right(run_extend, inputs, flags_for(inputs))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 32])
def test_windows_at_page_borders(window: int, device: torch.device) -> None:
    inputs = paged([20, 1], [70, 33], device)
    assert_right(run_extend, inputs, flags_for(inputs, window=window))


@pytest.mark.parametrize("names", [("softcap",), ("sinks",), ("spans",), ("softcap", "sinks", "spans")])
def test_each_flag_and_all_at_once(names: tuple[str, ...], device: torch.device) -> None:
    inputs = paged([20, 1, 7], [70, 33, 7], device)
    assert_right(run_extend, inputs, flags_for(inputs, *names, window=19 if len(names) == 3 else None))


def test_full_attention_sees_the_keys_after_a_query(device: torch.device) -> None:
    inputs = paged([20, 7], [50, 7], device)
    assert_right(run_extend, inputs, flags_for(inputs, causal=False))


def test_pages_behind_the_window_are_never_read(device: torch.device) -> None:
    inputs = paged([4], [100], device)
    flags = flags_for(inputs, window=10)  # the first query, at 96, sees keys from 87: page 5 starts at 80
    expected = attend(run_extend, inputs, flags)
    table = inputs.batch.page_table
    assert table is not None
    inputs.k[table[0, 5], :7], inputs.v[table[0, 5], :7] = NAN, NAN
    table[0, :5] = POISON_PAGE
    assert torch.equal(attend(run_extend, inputs, flags), expected)


def test_an_empty_context_gives_zero(device: torch.device) -> None:
    inputs = paged([2, 3], [0, 3], device)
    out = attend(run_extend, inputs, flags_for(inputs))
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.isfinite(out).all()


def test_pages_by_head_first_strides(device: torch.device) -> None:
    inputs = paged([20], [70], device, heads=(4, 2))
    k, v = (pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (inputs.k, inputs.v))
    flags = flags_for(inputs)
    assert torch.equal(attend(run_extend, replace(inputs, k=k, v=v), flags), attend(run_extend, inputs, flags))


def test_pages_beyond_2_to_the_31_elements_are_found(device: torch.device) -> None:
    """A pool of 2^21 + 8 pages of 1024 elements, of which only the last few are ever touched."""
    inputs = paged([20], [60], device)
    table = inputs.batch.page_table
    assert table is not None
    pool = 2**21 + 8
    k, v = (torch.empty(pool, 16, 1, 64, dtype=torch.float16, device=device) for _ in "kv")
    k[-7:], v[-7:] = inputs.k, inputs.v  # 4 pages in use and 3 spare ones
    far = torch.where(table == POISON_PAGE, table, table + pool - 7)
    expected = attend(run_extend, inputs, flags_for(inputs))
    moved = replace(inputs, k=k, v=v, batch=replace(inputs.batch, page_table=far))
    assert torch.equal(attend(run_extend, moved, flags_for(inputs)), expected)
