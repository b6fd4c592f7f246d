"""`gluon.decode.hopper` on an sm_90 GPU: against the oracle's rule, and against `triton.decode`."""

import random
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_inputs import FIXED_SEEDS, NAN, POISON_PAGE, Inputs, assert_right, attend, flags_for, fresh_seeds, paged
from decode_graphs import assert_launches_wait_for_the_ones_before, replayed
from torch import Tensor

from kernels.functional import attention_paged
from kernels.hopper.decode.launch import run_decode
from kernels.portable.decode import run_decode as run_triton_decode
from kernels.reference.compare import compare

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_hopper")]

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
# Tile and page edges, no key, no query, and one context among many times longer than the others.
CONTEXTS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 0, 127, 128, 129, 500, 4000, 257, 2]
QUERIES = [1] * 9 + [0] + [1] * 8
SHAPES = [(64, (32, 8)), (64, (14, 2)), (128, (32, 8)), (128, (7, 1)), (128, (6, 3)), (256, (16, 4)), (256, (8, 1))]


def ragged(dim: int, heads: tuple[int, int], dtype: torch.dtype = BF16, page_size: int = 64) -> Inputs:
    return paged(QUERIES, CONTEXTS, CUDA, heads=heads, head_dim=dim, dtype=dtype, page_size=page_size)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("dim", "heads"), SHAPES)
def test_ragged_contexts_are_within_the_rule(dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = ragged(dim, heads, dtype)
    assert_right(run_decode, inputs, flags_for(inputs))


@pytest.mark.parametrize("is_flagged", [False, True], ids=["", "all flags"])
@pytest.mark.parametrize("dim", [40, 80, 96, 112, 192])
def test_head_dims_that_are_padded(dim: int, is_flagged: bool) -> None:
    inputs = ragged(dim, (8, 4))
    assert_right(
        run_decode, inputs, flags_for(inputs, "softcap", "sinks", window=50) if is_flagged else flags_for(inputs)
    )


@pytest.mark.parametrize("page_size", [16, 32, 48, 128])
def test_page_sizes(page_size: int) -> None:
    inputs = ragged(128, (8, 2), page_size=page_size)
    assert_right(run_decode, inputs, flags_for(inputs))


@pytest.mark.parametrize("heads", [(16, 1), (32, 1), (40, 2), (128, 1)])
def test_groups_too_large_for_one_row(heads: tuple[int, int]) -> None:
    inputs = ragged(128, heads)
    assert_right(run_decode, inputs, flags_for(inputs))


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 64, 100, 3999, 4001])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_windows(dim: int, window: int) -> None:
    inputs = ragged(dim, (8, 4))
    assert_right(run_decode, inputs, flags_for(inputs, window=window))


def test_pages_behind_the_window_are_not_read() -> None:
    """A cache may have given them to another sequence, or filled them with anything."""
    inputs = paged([1], [1000], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)
    flags = flags_for(inputs, window=100)
    expected = attend(run_decode, inputs, flags)
    table = inputs.batch.page_table
    assert table is not None
    inputs.k[table[0, 14].item(), : 900 - 14 * 64] = NAN  # the window's first page, before the window
    inputs.v[table[0, 14].item(), : 900 - 14 * 64] = NAN
    poisoned = table.clone()
    poisoned[0, :14] = POISON_PAGE
    moved = replace(inputs, batch=replace(inputs.batch, page_table=poisoned))
    assert torch.equal(attend(run_decode, moved, flags), expected)


@pytest.mark.parametrize("names", [("softcap",), ("sinks",), ("softcap", "sinks")])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_softcap_and_sinks(dim: int, names: tuple[str, ...]) -> None:
    inputs = ragged(dim, (16, 4))
    assert_right(run_decode, inputs, flags_for(inputs, *names, window=50 if len(names) == 2 else None))


@pytest.mark.parametrize("max_queries", [2, 3, 8, 16])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_a_few_queries_a_sequence(dim: int, max_queries: int) -> None:
    """As when drafted tokens are verified; some have more queries than keys before them, one more than keys at all."""
    draw = random.Random(max_queries)
    queries = [max_queries, 0, *(draw.randint(1, max_queries) for _ in range(6)), 2]
    contexts = [max_queries, 5, *(draw.randint(max_queries, 700) for _ in range(6)), 1]
    inputs = paged(queries, contexts, CUDA, heads=(8, 2), head_dim=dim, dtype=BF16, page_size=64)
    for flags in (flags_for(inputs), flags_for(inputs, "softcap", "sinks", window=30)):
        assert_right(run_decode, inputs, flags)


def test_the_library_serves_a_few_queries_by_this_path() -> None:
    inputs = paged([3, 1, 0, 4], [500, 1, 9, 64], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)
    batch, flags = inputs.batch, flags_for(inputs)
    assert batch.page_table is not None
    assert batch.context_lens is not None
    out = attention_paged(
        inputs.q, inputs.k, inputs.v, batch.page_table, batch.context_lens, batch.cu_seqlens_q, 4, batch.max_context
    )
    assert torch.equal(out, attend(run_decode, inputs, flags))


@pytest.mark.parametrize(("dim", "heads"), [(64, (32, 8)), (128, (32, 8)), (128, (8, 1)), (256, (16, 4))])
def test_a_long_context(dim: int, heads: tuple[int, int]) -> None:
    inputs = paged([1, 1], [131_073, 5], CUDA, heads=heads, head_dim=dim, dtype=BF16, page_size=64)
    assert_right(run_decode, inputs, flags_for(inputs))


def test_one_long_context_among_many_short_ones() -> None:
    contexts = [30_001, *(1 + 7 * number % 90 for number in range(300))]
    inputs = paged([1] * 301, contexts, CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)
    assert_right(run_decode, inputs, flags_for(inputs))


@pytest.mark.parametrize(("dim", "heads"), [(64, (32, 8)), (128, (32, 8)), (128, (48, 3)), (256, (16, 4))])
@pytest.mark.parametrize("names", [(), ("sinks",)])
def test_rows_of_few_and_of_many_parts_in_one_batch(dim: int, heads: tuple[int, int], names: tuple[str, ...]) -> None:
    contexts = [5000, *(1 + 97 * number % 1100 for number in range(40)), 17_000]  # a large batch, by its host bounds
    inputs = paged([1] * 42, contexts, CUDA, heads=heads, head_dim=dim, dtype=BF16, page_size=64)
    assert_right(run_decode, inputs, flags_for(inputs, *names))


def test_a_batch_of_more_sequences_than_are_looked_at_together() -> None:
    contexts = [(37 * number) % 200 for number in range(700)]
    inputs = paged([1] * 700, contexts, CUDA, heads=(2, 1), head_dim=64, dtype=BF16, page_size=64)
    assert_right(run_decode, inputs, flags_for(inputs))


@pytest.mark.parametrize("names", [(), ("sinks",)])
def test_without_any_key_the_output_is_zero(names: tuple[str, ...]) -> None:
    inputs = paged([1, 1, 1], [0, 1, 0], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)
    out = attend(run_decode, inputs, flags_for(inputs, *names))
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    assert torch.isfinite(out).all()


def check_against_triton(seed: int) -> None:
    """Compare both kernels on a random batch."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dim, heads = draw.choice([*SHAPES, (128, (8, 8)), (256, (12, 2))])  # few: each is compiled
    contexts = [int(2 ** draw.uniform(0, 11)) for _ in range(draw.choice([1, 2, 3, 8, 33]))]
    inputs = paged([1] * len(contexts), contexts, CUDA, heads=heads, head_dim=dim, dtype=BF16, page_size=64)
    flags = flags_for(inputs, window=draw.choice([None, None, 77]))
    ours, theirs = (attend(run, inputs, flags).float() for run in (run_decode, run_triton_decode))
    assert (ours - theirs).abs().max() <= 2**-7 * theirs.abs().max()


@pytest.mark.parametrize("seed", FIXED_SEEDS)
def test_gluon_agrees_with_triton_on_random_contexts(seed: int) -> None:
    check_against_triton(seed)


def test_gluon_agrees_with_triton_on_fresh_seeds() -> None:
    for seed in fresh_seeds():
        check_against_triton(seed)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_ten_calls_give_the_same_bits(dim: int) -> None:
    inputs = ragged(dim, (32, 8))
    first, *others = (attend(run_decode, inputs, flags_for(inputs)) for _ in range(10))
    assert all(torch.equal(first, other) for other in others)


def out_for(inputs: Inputs) -> Tensor:
    return torch.full_like(inputs.q, NAN)


def test_a_graph_follows_the_lengths() -> None:
    inputs = paged([1] * 3, [100, 900, 40], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)
    flags, out, lens = flags_for(inputs), out_for(inputs), inputs.batch.context_lens
    assert lens is not None
    replay = replayed(lambda: run_decode(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out))
    for lengths in ([100, 900, 40], [1, 500, 0], [7, 0, 39], [0, 0, 0]):
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(NAN)
        replay()
        assert compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags).is_within_rule


def test_two_graphs_replayed_at_once_are_independent() -> None:
    """No workspace and no counter is shared."""
    several = [ragged(128, (32, 8)) for _ in range(2)]
    outs = [out_for(inputs) for inputs in several]
    replays = [
        replayed(lambda i=i, o=o: run_decode(i.q, i.k, i.v, i.batch, flags_for(i), o))  # type: ignore[misc]
        for i, o in zip(several, outs, strict=True)
    ]
    expected = [attend(run_decode, inputs, flags_for(inputs)) for inputs in several]
    streams = [torch.cuda.Stream() for _ in several]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, replay in zip(streams, replays, strict=True):
            with torch.cuda.stream(stream):
                replay()
    torch.cuda.synchronize()
    for out, right in zip(outs, expected, strict=True):
        assert torch.equal(out, right)


@pytest.mark.parametrize(("dim", "heads"), [(64, (32, 8)), (128, (32, 8)), (256, (16, 4))])
def test_layers_of_a_step_share_scratch_memory(dim: int, heads: tuple[int, int]) -> None:
    """One right behind the other, each starts before the one before has ended."""
    inputs = paged([1] * 5, [3000, 70, 1, 640, 300], CUDA, heads=heads, head_dim=dim, dtype=BF16, page_size=64)
    pages = [(inputs.k.roll(n, 2), inputs.v.roll(n, 2)) for n in range(12)]
    flags = [flags_for(inputs, window=500 if n % 3 == 2 else None) for n in range(12)]
    flags = [replace(each, sinks=torch.randn(heads[0], device=CUDA)) for each in flags]
    outs = [out_for(inputs) for _ in flags]

    def compute(plans: dict[Hashable, Any] | None) -> None:
        batch = replace(inputs.batch, plans=plans)
        for (k, v), of_layer, out in zip(pages, flags, outs, strict=True):
            run_decode(inputs.q, k, v, batch, of_layer, out)

    compute(None)
    torch.cuda.synchronize()
    expected = [out.clone() for out in outs]
    plans: dict[Hashable, Any] = {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute(plans)
    assert len([key for key in plans if key[0] == "decode scratch"]) == 1  # type: ignore[index]
    for _ in range(100):
        for out in outs:
            out.fill_(NAN)
        graph.replay()
        assert all(map(torch.equal, outs, expected))


def test_early_launches_read_what_earlier_ones_write() -> None:
    inputs = paged([1] * 5, [1000, 70, 1, 64, 300], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)
    assert_launches_wait_for_the_ones_before(run_decode, inputs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_call_never_waits_for_the_gpu() -> None:
    inputs = ragged(128, (32, 8))
    flags = flags_for(inputs)
    attend(run_decode, inputs, flags)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(run_decode, inputs, flags)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_queries_that_tma_cannot_address_are_copied() -> None:
    inputs = paged([1, 1], [100, 3], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)
    expected = attend(run_decode, inputs, flags_for(inputs))
    wide = torch.empty(2, 8, 131, dtype=BF16, device=CUDA)[..., 1:129]
    wide.copy_(inputs.q)
    assert torch.equal(attend(run_decode, replace(inputs, q=wide), flags_for(inputs)), expected)


def test_pages_that_tma_cannot_address_are_refused() -> None:
    inputs = paged([1], [100], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)
    wide = torch.empty(*inputs.k.shape[:3], 129, dtype=BF16, device=CUDA)[..., :128]
    with pytest.raises(ValueError, match="whole 16 bytes"):
        attend(run_decode, replace(inputs, k=wide), flags_for(inputs))


def test_a_pool_of_more_than_2_to_the_31_elements() -> None:
    inputs = paged([1, 1], [70, 300], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)
    expected = attend(run_decode, inputs, flags_for(inputs))
    used = inputs.k.shape[0]
    pool = 2**31 // inputs.k[0].numel() + used
    k, v = (torch.full((pool, *inputs.k.shape[1:]), NAN, dtype=BF16, device=CUDA) for _ in "kv")
    k[-used:], v[-used:] = inputs.k, inputs.v
    table = inputs.batch.page_table
    assert table is not None
    far = torch.where(table < used, table + pool - used, table)
    moved = replace(inputs, k=k, v=v, batch=replace(inputs.batch, page_table=far))
    assert torch.equal(attend(run_decode, moved, flags_for(inputs)), expected)
