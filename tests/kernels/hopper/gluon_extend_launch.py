"""Calls `gluon.extend.hopper` without a GPU, by a driver that records launches; prints what it saw as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
from dataclasses import replace
from typing import Any

import torch
from gluon_launch import Launcher, Recording
from torch import Tensor
from triton.runtime import driver

from kernels.batch import AttentionBatch, AttentionFlags
from kernels.hopper.extend import launch as gluon_extend_launch
from kernels.hopper.extend.kernel import hallmark_gluon_extend
from kernels.hopper.extend.plan import (
    hallmark_gluon_extend_combine,
    hallmark_gluon_extend_plan,
    hallmark_gluon_extend_split,
)
from kernels.tma.pointers import AnyTensor

KERNELS = (
    hallmark_gluon_extend_plan,
    hallmark_gluon_extend_split,
    hallmark_gluon_extend,
    hallmark_gluon_extend_combine,
)


def call(tokens: int, context: int, num_seqs: int = 1) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    """Two KV heads of four query heads over pages that are every other one of their pool."""
    q = torch.zeros(num_seqs * tokens, 8, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(200, 2, 64, 2, 64, dtype=torch.bfloat16).unbind(1)
    batch = AttentionBatch(
        torch.arange(num_seqs + 1, dtype=torch.int32) * tokens,
        tokens,
        context,
        page_table=torch.zeros(num_seqs, 200, dtype=torch.int32),
        context_lens=torch.full((num_seqs,), context, dtype=torch.int32),
    )
    gluon_extend_launch.run_extend(q, k, v, batch, AttentionFlags(0.1), torch.zeros_like(q))
    return q, k, v, batch


def layers_of_a_step(layers: int) -> dict[str, object]:
    """Layers with pages and sinks of their own, whose batch keeps its plans; every third has an output of its own."""
    Launcher.launches.clear()
    q = torch.zeros(16, 8, 64, dtype=torch.bfloat16)
    outs = (torch.zeros_like(q), torch.zeros_like(q))
    batch = AttentionBatch(
        torch.tensor([0, 16], dtype=torch.int32),
        16,
        9000,
        page_table=torch.zeros(1, 200, dtype=torch.int32),
        context_lens=torch.tensor([9000], dtype=torch.int32),
        plans={},
    )
    wrong = []
    for layer in range(layers):
        out = outs[layer % 3 == 0]
        k, v = torch.zeros(2, 200, 64, 2, 64, dtype=torch.bfloat16)
        flags = AttentionFlags(0.1, sinks=torch.zeros(8))
        gluon_extend_launch.run_extend(q, k, v, batch, flags, out)
        shared = Launcher.launches[-2:]
        num_shared = len(Launcher.launches)
        gluon_extend_launch.run_extend(q, k, v, replace(batch, plans=None), flags, out)
        own = Launcher.launches[-2:]
        del Launcher.launches[num_shared:]
        if [besides_plan(arguments) for _, arguments in shared] != [besides_plan(arguments) for _, arguments in own]:
            wrong.append(layer)
    assert batch.plans is not None
    return {"launches": len(Launcher.launches), "wrong": wrong, "kept": len(batch.plans)}


def besides_plan(arguments: tuple[Any, ...]) -> list[Any]:
    """Of the attention or of its combination: all but the addresses of the plan and of partial results."""
    own = (28, 29, 34) if len(arguments) > 34 else (0, 1, 2)
    return [value for at, value in enumerate(arguments) if at not in own]


def num_compiled() -> int:
    return sum(len(kernel.device_caches[0][0]) for kernel in KERNELS)


def main() -> None:
    driver.set_active(Recording())
    q, k, v, batch = call(16, 9000)
    launches = list(Launcher.launches)
    Launcher.launches.clear()
    call(16, 9000, num_seqs=6)  # planned by one launch, split by another
    launches_of_six = list(Launcher.launches)
    compiled = [num_compiled()]
    of_lengths, of_parts = [torch.int32] * 4, [torch.int32, torch.float32, torch.float32, torch.bfloat16, torch.float32]
    for kernel, num_warps, dtypes, (_, arguments) in (
        (hallmark_gluon_extend_split, 8, of_lengths, launches[0]),
        (hallmark_gluon_extend_combine, 4, of_parts, launches[2]),
        (hallmark_gluon_extend_plan, 4, of_lengths, launches_of_six[0]),
        (hallmark_gluon_extend_split, 8, of_lengths, launches_of_six[1]),
    ):  # through the binder: must be what was compiled
        tensors = [x and AnyTensor(dtype, x % 16) for x, dtype in zip(arguments, dtypes, strict=False)]
        kernel.warmup(*tensors, *arguments[len(dtypes) :], grid=(1,), launch_pdl=True, num_warps=num_warps)
    compiled.append(num_compiled())
    call(21, 11000)
    call(2000, 100_000)  # on three consumers
    compiled.append(num_compiled())
    Launcher.launches.clear()
    call(16, 200)
    of_a_short_context = len(Launcher.launches)
    by_layers = layers_of_a_step(6)
    attention = launches[1][1]
    result = {
        "compiled": compiled,
        "by_layers": by_layers,
        "arguments": [[taken, len(given)] for taken, given in launches + launches_of_six],
        "launches": [len(launches), len(launches_of_six)],
        "of_a_short_context": of_a_short_context,
        "maps": [attention[0] == q.data_ptr(), attention[7] == k.data_ptr(), attention[14] == v.data_ptr()],
        "table": attention[30] == batch.page_table.data_ptr(),
        "rows_of_a_page": attention[32:34],
        "heads": attention[37:40],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
