"""Calls `gluon.prefill.hopper` without a GPU, by a driver that records launches; prints what it saw as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from gluon_compile import Hopper
from triton.runtime import driver

from kernels.batch import AttentionBatch, AttentionFlags
from kernels.hopper.prefill.kernel import hallmark_gluon_prefill
from kernels.hopper.prefill.launch import run_prefill
from kernels.hopper.schedule import hallmark_gluon_plan
from kernels.tma.pointers import AnyTensor


class Launcher:
    """Stands in for Triton's launcher: keeps every launch's arguments, with the constants where nothing is given."""

    launches: list[tuple[int, tuple[Any, ...]]] = []  # noqa: RUF012 -- of this program

    def __init__(self, source: Any, _metadata: Any) -> None:
        self.num_arguments, self.constants = len(source.signature), source.constants

    def __call__(self, *arguments: Any) -> None:
        """As Triton's binder launches."""
        self.launches.append((self.num_arguments, arguments[9:]))

    def launch(self, *arguments: Any) -> None:
        """Triton's compiled launcher: takes four arguments more before the kernel's."""
        given = tuple(self.constants.get((at,), value) for at, value in enumerate(arguments[13:]))
        self.launches.append((self.num_arguments, given))


class Recording(Hopper):
    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 2, 0, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232_448},
        fill_tma_descriptor=lambda address, *_: address,
    )


def call(tokens: int) -> tuple[Any, ...]:
    q, k, v = (torch.zeros(tokens, heads, 128, dtype=torch.bfloat16) for heads in (8, 2, 2))
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
    batch = AttentionBatch(cu_seqlens, tokens, tokens, cu_seqlens_k=cu_seqlens)
    out = torch.zeros_like(q)
    run_prefill(q, k, v, batch, AttentionFlags(0.1), out)
    return q, k, v, out, cu_seqlens


def layers_of_a_step(layers: int) -> dict[str, object]:
    """Layers whose batch keeps its plans: every other one has a window, and every third an output of its own.

    Each has flags and sinks of its own, as the engine's have.
    """
    Launcher.launches.clear()
    q, k, v = (torch.zeros(200, heads, 128, dtype=torch.bfloat16) for heads in (8, 2, 2))
    cu_seqlens = torch.tensor([0, 200], dtype=torch.int32)
    batch = AttentionBatch(cu_seqlens, 200, 200, cu_seqlens_k=cu_seqlens, plans={})
    outs = (torch.zeros_like(q), torch.zeros_like(q))
    wrong = []
    for layer in range(layers):
        flags = AttentionFlags(0.1, window=100 if layer % 2 else None, sinks=torch.zeros(8))
        out = outs[layer % 3 == 0]
        run_prefill(q, k, v, batch, flags, out)
        _, shared = Launcher.launches[-1]
        num_shared = len(Launcher.launches)
        run_prefill(q, k, v, replace(batch, plans=None), flags, out)
        _, own = Launcher.launches[-1]
        del Launcher.launches[num_shared:]
        if (*shared[:28], *shared[29:]) != (*own[:28], *own[29:]):  # all but the plan
            wrong.append(layer)
    assert batch.plans is not None
    return {"launches": len(Launcher.launches), "wrong": wrong, "kept": len(batch.plans)}


def num_compiled() -> int:
    return sum(len(kernel.device_caches[0][0]) for kernel in (hallmark_gluon_plan, hallmark_gluon_prefill))


def main() -> None:
    driver.set_active(Recording())
    q, k, v, out, cu_seqlens = call(256)
    compiled = [num_compiled()]
    (num_plan, plan), (num_prefill, prefill) = Launcher.launches
    tensors = (AnyTensor(torch.int32, plan[0] % 16), cu_seqlens, cu_seqlens)
    hallmark_gluon_plan.warmup(*tensors, *plan[3:], grid=(1,))  # through the binder: must be what was compiled
    compiled.append(num_compiled())
    call(300)
    compiled.append(num_compiled())
    result = {
        "compiled": compiled,
        "by_layers": layers_of_a_step(12),
        "plan": [num_plan, len(plan)],
        "prefill": [num_prefill, len(prefill)],
        "plan_tensors": plan[:3] == (prefill[28], cu_seqlens.data_ptr(), cu_seqlens.data_ptr()),
        "maps": [prefill[0] == q.data_ptr(), prefill[7] == k.data_ptr(), prefill[14] == v.data_ptr()],
        "out": prefill[25] == out.data_ptr(),
        "strides": prefill[26:28],
        "heads": prefill[31:34],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
