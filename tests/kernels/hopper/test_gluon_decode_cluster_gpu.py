"""`gluon.decode.hopper` for one sequence, whose rows clusters share, on an sm_90 GPU: against the oracle's rule."""

import pytest
import torch
from attention_inputs import NAN, Inputs, assert_right, attend, flags_for, paged
from decode_graphs import assert_launches_wait_for_the_ones_before, replayed
from torch import Tensor

from kernels.batch import AttentionBatch, AttentionFlags
from kernels.hopper.decode.launch import launch_of_clusters, run_decode
from kernels.hopper.decode.variants import variant_of
from kernels.reference.compare import compare

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_hopper")]

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [(64, (32, 8)), (64, (16, 4)), (80, (16, 4)), (128, (32, 8)), (128, (16, 4)), (256, (16, 4)), (256, (8, 8))]


def one(context: int, dim: int, heads: tuple[int, int], *, queries: int = 1, page_size: int = 64) -> Inputs:
    """A call that clusters take."""
    inputs = paged([queries], [context], CUDA, heads=heads, head_dim=dim, dtype=BF16, page_size=page_size)
    assert variant_of(dim, page_size, heads, queries, 1, context, flags_for(inputs)).cluster > 1
    return inputs


@pytest.mark.parametrize(("dim", "heads"), SHAPES)
def test_contexts_around_the_edges_of_tiles_and_of_turns(dim: int, heads: tuple[int, int]) -> None:
    for context in (1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1000, 1024, 1025, 2048):
        inputs = one(context, dim, heads)
        assert_right(run_decode, inputs, flags_for(inputs))


@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_page_sizes(page_size: int) -> None:
    for context in (17, 500, 2000):
        inputs = one(context, 128, (32, 8), page_size=page_size)
        assert_right(run_decode, inputs, flags_for(inputs))


@pytest.mark.parametrize("names", [("softcap",), ("sinks",), ("softcap", "sinks")])
@pytest.mark.parametrize(("dim", "heads"), [(64, (32, 8)), (128, (32, 8)), (256, (16, 4))])
def test_softcap_and_sinks(dim: int, heads: tuple[int, int], names: tuple[str, ...]) -> None:
    inputs = one(700, dim, heads)
    assert_right(run_decode, inputs, flags_for(inputs, *names))


@pytest.mark.parametrize("context", [2, 129, 2000])
def test_two_queries(context: int) -> None:
    inputs = one(context, 128, (16, 4), queries=2)
    assert_right(run_decode, inputs, flags_for(inputs, "sinks"))


@pytest.mark.parametrize(("dim", "heads"), [(64, (32, 8)), (128, (32, 8)), (256, (16, 4))])
def test_rings_that_turn(dim: int, heads: tuple[int, int]) -> None:
    """Over more keys than this kernel is taken for."""
    inputs = paged([1], [20_001], CUDA, heads=heads, head_dim=dim, dtype=BF16, page_size=64)
    variant = variant_of(dim, 64, heads, 1, 1, 2048, flags_for(inputs))

    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        launch = launch_of_clusters(q, k, v, batch, flags, out, variant=variant)
        assert launch is not None, "no room for a cluster"
        assert launch.over((k.data_ptr(), v.data_ptr()), flags.sinks)

    assert_right(run, inputs, flags_for(inputs))


def test_a_graph_follows_the_length() -> None:
    inputs = one(2047, 128, (32, 8))
    flags, out, lens = flags_for(inputs), torch.full_like(inputs.q, NAN), inputs.batch.context_lens
    assert lens is not None
    replay = replayed(lambda: run_decode(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out))
    for length in (2047, 1, 100, 1999, 0):
        lens.fill_(length)
        out.fill_(NAN)
        replay()
        assert compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags).is_within_rule


@pytest.mark.parametrize(("dim", "heads"), [(64, (32, 8)), (128, (32, 8)), (256, (16, 4))])
def test_ten_calls_give_the_same_bits(dim: int, heads: tuple[int, int]) -> None:
    inputs = one(2000, dim, heads)
    first, *others = (attend(run_decode, inputs, flags_for(inputs)) for _ in range(10))
    assert all(torch.equal(first, other) for other in others)


def test_early_launches_read_what_earlier_ones_write() -> None:
    assert_launches_wait_for_the_ones_before(run_decode, one(1000, 128, (16, 4)))
