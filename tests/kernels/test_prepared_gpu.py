"""Repeated calls of the library on a GPU: the bits of `run`, whatever changes between calls of a form."""

import random
from dataclasses import replace

import pytest
import torch
from attention_inputs import Inputs, attend, packed, paged
from torch import Tensor

from kernels import functional
from kernels.batch import AttentionFlags
from kernels.catalog import path_named
from kernels.device import read_fingerprint
from kernels.functional import attention_paged, attention_varlen

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
FLAGS = AttentionFlags(0.1)
CASES = {
    "gluon.prefill.hopper": [[100, 1, 300, 27]],
    "gluon.extend.hopper": [[100, 1, 30, 27], [3000, 1, 64, 100]],
    "gluon.decode.hopper": [[1, 1, 1, 1], [3000, 1, 64, 100]],
    "triton.prefill": [[100, 1, 300, 27]],
    "triton.extend": [[100, 1, 30, 27], [3000, 1, 64, 100]],
    "triton.decode": [[1, 1, 1, 1], [3000, 1, 64, 100]],
}


def made(lengths: list[list[int]], seed: int) -> Inputs:
    """Sequences of these lengths of queries, and of keys, in another order each time: one form."""
    torch.manual_seed(seed)
    order = random.Random(seed).sample(range(len(lengths[0])), len(lengths[0]))
    ordered = [[each[at] for at in order] for each in lengths]
    if len(ordered) == 1:
        return packed(ordered[0], CUDA, heads=(8, 2), head_dim=128, dtype=torch.bfloat16)
    bounded = [max(pair) for pair in zip(*ordered, strict=True)]  # contexts hold their queries
    inputs = paged(ordered[0], bounded, CUDA, heads=(8, 2), head_dim=128, dtype=torch.bfloat16, page_size=64)
    return replace(inputs, batch=replace(inputs.batch, max_context=3000))


def call(path: str, inputs: Inputs) -> Tensor:
    batch, (q, k, v) = inputs.batch, (inputs.q, inputs.k, inputs.v)
    if batch.page_table is None or batch.context_lens is None:
        assert batch.cu_seqlens_k is not None
        starts = (batch.cu_seqlens_q, batch.cu_seqlens_k)
        return attention_varlen(
            q, k, v, *starts, batch.max_seqlen_q, batch.max_context, softmax_scale=FLAGS.scale, path=path
        )
    return attention_paged(
        q, k, v, batch.page_table, batch.context_lens, batch.cu_seqlens_q, batch.max_seqlen_q, batch.max_context,
        softmax_scale=FLAGS.scale, path=path,
    )  # fmt: skip


def skip_where_it_rejects(path: str, inputs: Inputs) -> None:
    shape = functional.shape_of(inputs.q, inputs.k, inputs.batch, FLAGS)
    if path_named(path).rejects(shape, read_fingerprint(CUDA)):
        pytest.skip(f"{path} does not run on this GPU")


@pytest.mark.parametrize("path", CASES)
def test_repeated_calls_give_the_bits_of_run(path: str) -> None:
    """Of other tensors and lengths, on streams in turns, in scratch memory that held NaN."""
    functional._known.clear()
    inputs = [made(CASES[path], seed) for seed in range(6)]
    skip_where_it_rejects(path, inputs[0])
    run = path_named(path).run
    assert run is not None
    expected = [attend(run, each, FLAGS) for each in inputs]
    poison = torch.full((1 << 24,), float("nan"), device=CUDA)
    del poison
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for turn in range(5 * len(inputs)):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(call(path, inputs[turn % len(inputs)]))
    torch.cuda.synchronize()
    (known,) = functional._known.values()
    assert all(known.prepared.values()), "calls were prepared"
    assert all(torch.equal(out, expected[turn % len(inputs)]) for turn, out in enumerate(found))


@pytest.mark.parametrize("path", CASES)
def test_a_graph_holds_a_prepared_call(path: str) -> None:
    functional._known.clear()
    inputs, other = made(CASES[path], 0), made(CASES[path], 1)
    skip_where_it_rejects(path, inputs)
    for _ in range(3):
        call(path, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(path, inputs)
    inputs.q.copy_(other.q)
    graph.replay()
    torch.cuda.synchronize()
    run = path_named(path).run
    assert run is not None
    assert torch.equal(out, attend(run, inputs, FLAGS))
