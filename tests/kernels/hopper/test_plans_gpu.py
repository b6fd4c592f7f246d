"""Layers that share a batch's plans, on an sm_90 GPU: the same bits as with a plan for each call."""

from dataclasses import replace

import pytest
import torch
from attention_inputs import Inputs, attend, packed, paged

from kernels.batch import AttentionFlags
from kernels.hopper.decode.launch import run_decode
from kernels.hopper.extend.launch import run_extend
from kernels.hopper.prefill.launch import run_prefill
from kernels.hopper.variants import LONG, variant_of
from kernels.path import RunAttention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_hopper")]

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
FLAGS = (AttentionFlags(0.1), AttentionFlags(0.1, window=100))


def prompts(lengths: list[int], dim: int = 128, heads: tuple[int, int] = (8, 2)) -> Inputs:
    """Whose queries and keys share their offsets, as those of the engine do."""
    inputs = packed(lengths, CUDA, heads=heads, head_dim=dim, dtype=BF16)
    return replace(inputs, batch=replace(inputs.batch, cu_seqlens_k=inputs.batch.cu_seqlens_q))


def chunks(queries: list[int], contexts: list[int]) -> Inputs:
    return paged(queries, contexts, CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)


CASES = {
    "prompt of fewer tiles than multiprocessors": (run_prefill, prompts, ([100],)),
    "prompts of many tiles": (run_prefill, prompts, ([3000, 0, 1, 2048, 129],)),
    "three consumers": (run_prefill, prompts, ([LONG + 9, 100], 64)),
    "one tile a multiprocessor": (run_prefill, prompts, ([128], 128, (132, 132))),
    "chunk": (run_extend, chunks, ([100], [300])),
    "chunks in parts": (run_extend, chunks, ([100, 3], [9000, 30_000])),
    "chunks of many tiles": (run_extend, chunks, ([3000, 0, 2048], [4000, 10, 2048])),
    "tokens": (run_decode, chunks, ([1, 1, 0, 1], [9000, 1, 30, 100])),
}


@pytest.mark.parametrize("name", CASES)
def test_twelve_layers_of_one_plan_give_the_bits_of_a_plan_each(name: str) -> None:
    run, make, arguments = CASES[name]
    inputs = make(*arguments)  # type: ignore[operator]
    if name == "three consumers":
        assert variant_of(64, inputs.batch, FLAGS[0]).tiling.consumers == 3
    alone = [attend(run, inputs, flags) for flags in FLAGS]
    batch = replace(inputs.batch, plans={})
    for layer in range(12):
        out = torch.full_like(inputs.q, float("nan"))
        run(inputs.q, inputs.k, inputs.v, batch, FLAGS[layer % 2], out)
        assert torch.equal(out, alone[layer % 2]), layer
    assert batch.plans is not None
    num_plans = sum(isinstance(key[0], str) for key in batch.plans)  # type: ignore[index]
    assert num_plans == (1 if run is run_decode else 2), "decode's scratch memory, or one plan of each window"
    assert len(batch.plans) > num_plans, "launches to repeat"


def captured(run: RunAttention, inputs: Inputs, layers: int) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """Layers of one plan in a graph, and what they fill."""
    outs = [torch.zeros_like(inputs.q) for _ in range(layers)]
    run(inputs.q, inputs.k, inputs.v, inputs.batch, FLAGS[0], outs[0])  # compiles
    batch, graph = replace(inputs.batch, plans={}), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            run(inputs.q, inputs.k, inputs.v, batch, FLAGS[0], out)
    return graph, outs


def test_a_graph_of_layers_plans_once_a_replay() -> None:
    inputs = prompts([1000, 24])
    inputs = replace(inputs, batch=replace(inputs.batch, max_seqlen_q=1023, max_context=1023))
    graph, outs = captured(run_prefill, inputs, 4)
    for lengths in ([1000, 24], [500, 524], [1, 1023]):
        inputs.batch.cu_seqlens_q.copy_(torch.tensor([0, lengths[0], 1024]))
        expected = attend(run_prefill, inputs, FLAGS[0])
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs), lengths
