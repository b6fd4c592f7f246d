"""What the kernel of `gluon.decode.hopper` for one sequence computes, in numpy, and when it is taken."""

from dataclasses import replace

import pytest
import torch
from attention_inputs import Inputs, assert_right, flags_for, paged
from cluster_by_numpy import run_clusters

from kernels.batch import AttentionFlags
from kernels.hopper.decode.variants import variant_of

CPU = torch.device("cpu")


def one(context: int, *, queries: int = 1, heads: tuple[int, int] = (8, 4), page_size: int = 16) -> Inputs:
    return paged([queries], [context], CPU, heads=heads, dtype=torch.float32, page_size=page_size)


def check(inputs: Inputs, flags: AttentionFlags, *, cluster: int = 4) -> None:
    heads, page_size = (inputs.q.shape[1], inputs.k.shape[2]), inputs.k.shape[1]
    batch = inputs.batch
    variant = variant_of(64, page_size, heads, batch.max_seqlen_q, 1, batch.max_context, flags)
    assert variant.cluster > 1
    small = replace(variant, cluster=cluster, block_n=32, key_groups=2, stages=2)  # several turns of the ring
    assert_right(lambda *arguments: run_clusters(*arguments, small), inputs, flags)


@pytest.mark.parametrize("context", [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 400])
def test_contexts_around_the_edges_of_boxes_tiles_and_turns(context: int) -> None:
    inputs = one(context)
    check(inputs, flags_for(inputs))


@pytest.mark.parametrize("page_size", [32, 48, 128])
def test_page_sizes(page_size: int) -> None:
    inputs = one(150, page_size=page_size)
    check(inputs, flags_for(inputs))


@pytest.mark.parametrize("cluster", [8, 16])
def test_programs_without_a_tile(cluster: int) -> None:
    inputs = one(70)
    check(inputs, flags_for(inputs, "softcap", "sinks"), cluster=cluster)


def test_two_queries() -> None:
    inputs = one(90, queries=2, heads=(16, 4))
    check(inputs, flags_for(inputs, "sinks"))


def test_without_a_key_the_output_is_zero() -> None:
    inputs = one(40)
    empty = replace(inputs, batch=replace(inputs.batch, context_lens=torch.zeros(1, dtype=torch.int32)))
    check(empty, flags_for(empty))


@pytest.mark.parametrize(
    ("heads", "num_seqs", "queries", "context", "window"),
    [
        ((32, 8), 2, 1, 2048, None), ((32, 8), 1, 8, 2048, None), ((32, 8), 1, 1, 2049, None),
        ((32, 8), 1, 1, 2048, 100), ((32, 16), 1, 1, 2048, None), ((8, 2), 1, 1, 2048, None),
    ],
)  # fmt: skip
def test_other_calls_are_shared_by_tiles(
    heads: tuple[int, int], num_seqs: int, queries: int, context: int, window: int | None
) -> None:
    flags = AttentionFlags(0.1, window=window)
    assert variant_of(128, 64, heads, queries, num_seqs, context, flags).cluster == 1
    assert variant_of(128, 64, (32, 8), 1, 1, 2048, AttentionFlags(0.1)).cluster == 8
