"""Decode in CUDA graphs, for the tests of both of its kernels on a GPU."""

from collections.abc import Callable

import torch
from attention_inputs import NAN, Inputs, flags_for
from torch import Tensor

from kernels.fused.rope_kv import rope_and_write_kv
from kernels.linear.matmul import linear
from kernels.path import RunAttention


def replayed(call: Callable[[], None]) -> Callable[[], None]:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def layers(run: RunAttention, inputs: Inputs) -> Callable[[Callable[[], object]], Tensor]:
    """Six layers of a decoder over one sequence's token each, which waits between its launches as it is told.

    The new keys come from the launch right before, queries too; the output is the next launch's input.
    """
    q, batch = inputs.q, inputs.batch
    assert batch.page_table is not None
    assert batch.context_lens is not None
    (num_seqs, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, inputs.k.shape
    hidden_size, heads = num_heads * head_dim, (num_heads, num_kv_heads, num_kv_heads)
    positions = batch.context_lens - 1
    pages = batch.page_table.gather(1, (positions // page_size)[:, None].long())[:, 0]
    slots = pages.long() * page_size + positions % page_size
    flags, cos_sin = flags_for(inputs), torch.randn(1024, head_dim, device=q.device)

    def weight(rows: int) -> Tensor:
        return torch.randn(rows, hidden_size, device=q.device).to(q.dtype) / hidden_size**0.5

    weights = [(weight(sum(heads) * head_dim), weight(hidden_size)) for _ in range(6)]
    start = torch.randn(num_seqs, hidden_size, device=q.device).to(q.dtype)

    def compute(wait: Callable[[], object]) -> Tensor:
        hidden = start
        for qkv, output in weights:
            q, k, v = linear(hidden, qkv).view(num_seqs, sum(heads), head_dim).split_with_sizes(heads, dim=1)
            wait()
            rope_and_write_kv(q, k, v, cos_sin, positions, inputs.k, inputs.v, slots)
            wait()
            out = torch.empty_like(q)
            run(q, inputs.k, inputs.v, batch, flags, out)
            wait()
            hidden = linear(out.flatten(1), output)
            wait()
        return hidden

    return compute


def assert_launches_wait_for_the_ones_before(run: RunAttention, inputs: Inputs) -> None:
    """In a graph, where launches start early, the bits are those of launches that the host waits for."""
    compute = layers(run, inputs)
    torch.cuda.synchronize()
    expected = compute(torch.cuda.synchronize)
    assert torch.isfinite(expected).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute(lambda: None)
    for _ in range(30):
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, expected)
