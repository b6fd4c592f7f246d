"""triton.decode against the oracle; unused slots are NaN and page-table tails poisoned in every test."""

from dataclasses import replace

import pytest
import torch
from attention_inputs import POISON_PAGE, assert_right, attend, flags_for, paged

from kernels.portable.decode import num_splits_for, run_decode
from kernels.portable.launch_config import Tiles

# One and more splits of one and more tiles; no query, no key, and page edges.
CONTEXTS = [1, 15, 16, 17, 130, 5, 0, 65]
QUERIES = [1, 1, 1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_contexts_at_page_and_tile_edges(page_size: int, device: torch.device) -> None:
    inputs = paged(QUERIES, CONTEXTS, device, page_size=page_size)
    assert_right(run_decode, inputs, flags_for(inputs))


def test_a_long_context_is_put_together_from_splits(device: torch.device) -> None:
    inputs = paged([1, 1], [260, 3], device)  # the second has one split with keys and others without
    assert num_splits_for(inputs.batch, 1, Tiles(16, 32, 4, 1), processors=4) == 4
    assert_right(run_decode, inputs, flags_for(inputs))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1), (32, 1)])
def test_query_heads_share_the_keys_of_their_group(heads: tuple[int, int], device: torch.device) -> None:
    inputs = paged([1, 1], [70, 40], device, heads=heads, head_dim=16)
    assert_right(run_decode, inputs, flags_for(inputs))


@pytest.mark.parametrize("head_dim", [80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_head_dims(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = paged([1, 1], [40, 75], device, head_dim=head_dim, dtype=dtype)
    assert_right(run_decode, inputs, flags_for(inputs))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 32, 129, 130, 131])
def test_windows_at_page_and_context_borders(window: int, device: torch.device) -> None:
    inputs = paged(QUERIES, CONTEXTS, device)
    assert_right(run_decode, inputs, flags_for(inputs, window=window))


@pytest.mark.parametrize("names", [("softcap",), ("sinks",), ("spans",), ("softcap", "sinks", "spans")])
def test_each_flag_and_all_at_once(names: tuple[str, ...], device: torch.device) -> None:
    inputs = paged(QUERIES, CONTEXTS, device)
    assert_right(run_decode, inputs, flags_for(inputs, *names, window=19 if len(names) == 3 else None))


@pytest.mark.parametrize("names", [(), ("sinks",)])
def test_an_empty_context_gives_zero(names: tuple[str, ...], device: torch.device) -> None:
    inputs = paged([1, 1], [0, 40], device)
    out = attend(run_decode, inputs, flags_for(inputs, *names))
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.isfinite(out).all()


def test_the_grid_depends_on_bounds_and_not_on_lengths(device: torch.device) -> None:
    short = paged([1, 1], [3, 5], device).batch
    long = paged([1, 1], [300, 500], device).batch
    tiles = Tiles(16, 32, 4, 1)
    loose = replace(short, max_context=500)
    assert num_splits_for(loose, 1, tiles, processors=132) == num_splits_for(long, 1, tiles, processors=132) == 16


@pytest.mark.parametrize(
    ("num_seqs", "max_context", "expected"),
    [(1, 20, 1), (1, 33, 2), (1, 100_000, 32), (4, 100_000, 32), (8, 100_000, 17), (1024, 100_000, 1)],
)
def test_splits_fill_the_processors_and_no_more(
    num_seqs: int, max_context: int, expected: int, device: torch.device
) -> None:
    batch = replace(paged([1] * num_seqs, [1] * num_seqs, device).batch, max_context=max_context)
    assert num_splits_for(batch, 2, Tiles(16, 32, 4, 1), processors=132) == expected


def test_pages_beyond_2_to_the_31_elements_are_found(device: torch.device) -> None:
    """A pool of 2^21 + 8 pages of 1024 elements, of which only the last few are ever touched."""
    inputs = paged([1], [60], device)
    table = inputs.batch.page_table
    assert table is not None
    pool = 2**21 + 8
    k, v = (torch.empty(pool, 16, 1, 64, dtype=torch.float16, device=device) for _ in "kv")
    k[-7:], v[-7:] = inputs.k, inputs.v  # 4 pages in use and 3 spare ones
    far = torch.where(table == POISON_PAGE, table, table + pool - 7)
    expected = attend(run_decode, inputs, flags_for(inputs))
    moved = replace(inputs, k=k, v=v, batch=replace(inputs.batch, page_table=far))
    assert torch.equal(attend(run_decode, moved, flags_for(inputs)), expected)
