"""Calls `gluon.prefill.hopper` without a GPU, by a driver that records launches; prints what it saw as JSON.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
from types import SimpleNamespace
from typing import Any

import torch
from gluon_compile import _Hopper
from triton.runtime import driver

from kernels.attention.batch import AttentionBatch, AttentionFlags
from kernels.attention.gluon_prefill import hallmark_gluon_prefill
from kernels.attention.gluon_prefill_launch import run_prefill
from kernels.attention.gluon_schedule import hallmark_gluon_plan


class _Launcher:
    """Stands in for Triton's launcher: keeps every launch's arguments."""

    launches: list[tuple[int, tuple[Any, ...]]] = []  # noqa: RUF012 -- of this program

    def __init__(self, source: Any, _metadata: Any) -> None:
        self.num_arguments = len(source.signature)

    def __call__(self, *arguments: Any) -> None:
        self.launches.append((self.num_arguments, arguments[9:]))

    def launch(self, *arguments: Any) -> None:
        """Triton's compiled launcher: takes four arguments more before the kernel's."""
        self.launches.append((self.num_arguments, arguments[13:]))


class _Recording(_Hopper):
    launcher_cls = _Launcher
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


def num_launched_by_layers(layers: int) -> int:
    """Of layers whose batch keeps its plans; every other layer has a window."""
    _Launcher.launches.clear()
    q, k, v = (torch.zeros(200, heads, 128, dtype=torch.bfloat16) for heads in (8, 2, 2))
    cu_seqlens = torch.tensor([0, 200], dtype=torch.int32)
    batch = AttentionBatch(cu_seqlens, 200, 200, cu_seqlens_k=cu_seqlens, plans={})
    for layer in range(layers):
        flags = AttentionFlags(0.1, window=100 if layer % 2 else None)
        run_prefill(q, k, v, batch, flags, torch.zeros_like(q))
    return len(_Launcher.launches)


def num_compiled() -> int:
    return sum(len(kernel.device_caches[0][0]) for kernel in (hallmark_gluon_plan, hallmark_gluon_prefill))


def main() -> None:
    driver.set_active(_Recording())
    q, k, v, out, cu_seqlens = call(256)
    compiled = [num_compiled()]
    (num_plan, plan), (num_prefill, prefill) = _Launcher.launches
    hallmark_gluon_plan.warmup(*plan, grid=(1,))  # the same tensors through the binder: must be what was compiled
    compiled.append(num_compiled())
    call(300)
    compiled.append(num_compiled())
    result = {
        "compiled": compiled,
        "by_layers": num_launched_by_layers(6),
        "plan": [num_plan, len(plan)],
        "prefill": [num_prefill, len(prefill)],
        "plan_tensors": plan[1] is cu_seqlens and plan[2] is cu_seqlens and plan[0].data_ptr() == prefill[28],
        "maps": [prefill[0] == q.data_ptr(), prefill[7] == k.data_ptr(), prefill[14] == v.data_ptr()],
        "out": prefill[25] == out.data_ptr(),
        "strides": prefill[26:28],
        "heads": prefill[31:34],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
