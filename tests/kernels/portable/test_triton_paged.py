"""triton.extend and triton.decode against the oracle: unused slots are NaN, tails of page tables poisoned, everywhere."""

from dataclasses import replace

import pytest
import torch
from attention_inputs import NAN, POISON_PAGE, Inputs, assert_right, attend, flags_for, paged

from kernels.path import RunAttention
from kernels.portable.decode import num_splits_for, run_decode
from kernels.portable.extend import run_extend
from kernels.portable.launch_config import Tiles

RUNS = {"extend": run_extend, "decode": run_decode}
# At page and tile edges, with no query or no key; for decode, one and more splits of one and more tiles.
EDGES = {
    "extend": ([1, 5, 16, 3, 0, 33], [15, 16, 17, 33, 8, 65]),
    "decode": ([1, 1, 1, 1, 1, 0, 1, 1], [1, 15, 16, 17, 130, 5, 0, 65]),
}
FEW = {"extend": ([9, 5], [40, 5]), "decode": ([1, 1], [70, 40])}
TILES = Tiles(16, 32, 4, 1)


@pytest.fixture(params=RUNS)
def phase(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def run(phase: str) -> RunAttention:
    return RUNS[phase]


@pytest.fixture
def ragged(phase: str, device: torch.device) -> Inputs:
    return paged(*EDGES[phase], device)


@pytest.mark.parametrize("page_size", [1, 16, 24])  # 24: neither a power of two nor a divisor of the tile
def test_contexts_at_page_and_tile_edges(phase: str, run: RunAttention, page_size: int, device: torch.device) -> None:
    inputs = paged(*EDGES[phase], device, page_size=page_size)
    assert_right(run, inputs, flags_for(inputs))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1), (32, 1)])
def test_query_heads_share_the_keys_of_their_group(
    phase: str, run: RunAttention, heads: tuple[int, int], device: torch.device
) -> None:
    inputs = paged(*FEW[phase], device, heads=heads, head_dim=16)
    assert_right(run, inputs, flags_for(inputs))


@pytest.mark.parametrize("head_dim", [80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_head_dims(phase: str, run: RunAttention, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    inputs = paged(*FEW[phase], device, head_dim=head_dim, dtype=dtype)
    assert_right(run, inputs, flags_for(inputs))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 32, 129, 130, 131])
def test_windows_at_page_and_context_borders(run: RunAttention, ragged: Inputs, window: int) -> None:
    assert_right(run, ragged, flags_for(ragged, window=window))


@pytest.mark.parametrize("names", [("softcap",), ("sinks",), ("spans",), ("softcap", "sinks", "spans")])
def test_each_flag_and_all_at_once(run: RunAttention, ragged: Inputs, names: tuple[str, ...]) -> None:
    assert_right(run, ragged, flags_for(ragged, *names, window=19 if len(names) == 3 else None))


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


@pytest.mark.parametrize("names", [(), ("sinks",)])
def test_an_empty_context_gives_zero(
    phase: str, run: RunAttention, names: tuple[str, ...], device: torch.device
) -> None:
    inputs = paged([2, 3] if phase == "extend" else [1, 1], [0, 40], device)
    out = attend(run, inputs, flags_for(inputs, *names))
    num_empty = inputs.batch.max_seqlen_q - 1 or 1
    assert not out[:num_empty].any()
    assert torch.isfinite(out).all()


def test_pages_by_head_first_strides(device: torch.device) -> None:
    inputs = paged([20], [70], device, heads=(4, 2))
    k, v = (pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (inputs.k, inputs.v))
    flags = flags_for(inputs)
    assert torch.equal(attend(run_extend, replace(inputs, k=k, v=v), flags), attend(run_extend, inputs, flags))


def test_pages_beyond_2_to_the_31_elements_are_found(phase: str, run: RunAttention, device: torch.device) -> None:
    """A pool of 2^21 + 8 pages of 1024 elements, of which only the last few are ever touched."""
    inputs = paged([20 if phase == "extend" else 1], [60], device)
    table = inputs.batch.page_table
    assert table is not None
    pool = 2**21 + 8
    k, v = (torch.empty(pool, 16, 1, 64, dtype=torch.float16, device=device) for _ in "kv")
    k[-7:], v[-7:] = inputs.k, inputs.v  # 4 pages in use and 3 spare ones
    far = torch.where(table == POISON_PAGE, table, table + pool - 7)
    expected = attend(run, inputs, flags_for(inputs))
    moved = replace(inputs, k=k, v=v, batch=replace(inputs.batch, page_table=far))
    assert torch.equal(attend(run, moved, flags_for(inputs)), expected)


def test_a_long_context_is_put_together_from_splits(device: torch.device) -> None:
    inputs = paged([1, 1], [260, 3], device)  # the second has one split with keys and others without
    assert num_splits_for(inputs.batch, 1, TILES, processors=4) == 4
    assert_right(run_decode, inputs, flags_for(inputs))


def test_the_grid_depends_on_bounds_and_not_on_lengths(device: torch.device) -> None:
    short, long = (paged([1, 1], lengths, device).batch for lengths in ([3, 5], [300, 500]))
    loose = replace(short, max_context=500)
    assert num_splits_for(loose, 1, TILES, processors=132) == num_splits_for(long, 1, TILES, processors=132) == 16


@pytest.mark.parametrize(
    ("num_seqs", "max_context", "expected"),
    [(1, 20, 1), (1, 33, 2), (1, 100_000, 32), (4, 100_000, 32), (8, 100_000, 17), (1024, 100_000, 1)],
)
def test_splits_fill_the_processors_and_no_more(
    num_seqs: int, max_context: int, expected: int, device: torch.device
) -> None:
    batch = replace(paged([1] * num_seqs, [1] * num_seqs, device).batch, max_context=max_context)
    assert num_splits_for(batch, 2, TILES, processors=132) == expected
