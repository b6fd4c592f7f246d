"""Runs fused ops as on a GPU, by a driver that records launches; prints as JSON what each op compiled and launched.

A program of its own: where Triton's interpreter is on, as in the tests of this folder, nothing can be compiled.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from kernels.experts.kinds import RoutingConfig
from kernels.experts.routing.route_triton import hallmark_experts_route, run_route
from kernels.fused.activation import swiglu
from kernels.fused.add_norms import Addend, add_norms
from kernels.fused.gated_norm import norm_and_gate
from kernels.fused.norm import add_rms_norm
from kernels.fused.rope_kv import rope_and_write_kv
from kernels.fused.row_gate import add_gated_
from support.compiled.fused_kernels import (
    add_norms_kernel,
    add_shared_kernel,
    gated_kernel,
    norm_and_gate_kernel,
    rms_norm_kernel,
    rope_kernel,
)
from support.compiled.sm90_driver import Launcher, Recording


class Gpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype).as_subclass(Gpu)


X, RESIDUAL, WEIGHT, GATE_UP = gpu(3, 4096), gpu(3, 4096), gpu(4096), gpu(3, 8192)
HEADS = gpu(3, 12, 128)
Q, K, V = HEADS[:, :8], HEADS[:, 8:10], HEADS[:, 10:]
TABLE, POSITIONS, SLOTS = (gpu(64, 128, dtype=torch.float32), gpu(7, dtype=torch.int32), gpu(7, dtype=torch.int64))
PAGES = gpu(4, 16, 2, 128), gpu(4, 16, 2, 128)


def rope() -> None:
    rope_and_write_kv(Q, K, V, TABLE, POSITIONS[1:4], *PAGES, SLOTS[1:4], eps=1e-6)  # of an odd address


def unaligned_norm() -> None:
    add_rms_norm(gpu(3 * 4096 + 1)[1:].view(3, 4096), RESIDUAL, WEIGHT, 1e-6)


def norms_around_sum() -> None:
    add_norms(Addend(((X, WEIGHT),), 1e-6, scale=WEIGHT), RESIDUAL, (WEIGHT, WEIGHT), 1e-6)


OPS: dict[str, tuple[Any, Callable[[], object]]] = {
    "norm": (rms_norm_kernel, lambda: add_rms_norm(X, RESIDUAL, WEIGHT, 1e-6)),
    "norms around a sum": (add_norms_kernel, norms_around_sum),
    "swiglu": (gated_kernel, lambda: swiglu(GATE_UP)),
    "rope": (rope_kernel, rope),
    "gated sum": (add_shared_kernel, lambda: add_gated_(X, RESIDUAL, X, WEIGHT)),
    "norm and gate": (norm_and_gate_kernel, lambda: norm_and_gate(HEADS, gpu(3, 1536), gpu(128), 1e-6)),
    "routes": (hallmark_experts_route, lambda: run_route(gpu(3, 128, dtype=torch.float32), RoutingConfig(128, 8))),
    "unaligned norm": (rms_norm_kernel, unaligned_norm),
}


def watched(kernel: Any, op: Callable[[], object]) -> dict[str, object]:
    """The op twice, then its kernel through Triton's binder with what was launched."""
    cache = kernel.device_caches[0][0]
    Launcher.launches.clear()
    before = len(cache)
    op()
    op()
    compiled = len(cache) - before
    last = Launcher.launches[-1]
    return {"compiled": compiled, "launches": len(Launcher.launches), "arguments": [last.taken, len(last.given)]}


def main() -> None:
    driver.set_active(Recording())
    found = {name: watched(*op) for name, op in OPS.items()}
    caches = {kernel: len(kernel.device_caches[0][0]) for kernel, _ in OPS.values()}
    sizes = {"SIZE": 4096, "BLOCK": 4096, "HAS_RESIDUAL": True, "num_warps": 8}
    out = gpu(3, 4096)
    rms_norm_kernel[(3,)](X, RESIDUAL, WEIGHT, out, 4096, 4096, 1e-6, **sizes)
    kinds = {"NUM_PARTS": 1, "HAS_AFTER": False, "HAS_SCALE": True, "NUM_NORMS": 2}
    norms = {"SIZE": 4096, "BLOCK": 4096, "num_warps": 8, **kinds}
    add_norms_kernel[(3,)](X, X, RESIDUAL, X, out, X, *(WEIGHT,) * 7, 1e-6, 0.0, 1e-6, **norms)
    gated_kernel[(3, 2)](GATE_UP, out, 8192, SIZE=4096, BLOCK=2048)
    blocks = {"NUM_Q_BLOCKS": 1, "BLOCK_HEADS": 8, "BLOCK_COLS": 64, "HAS_NORM": False}
    heads = {"NUM_HEADS": 8, "NUM_KV_HEADS": 2, "HEAD_DIM": 128, **blocks}
    gated = {"HEADS": 12, "SIZE": 128, "BLOCK_HEADS": 8, "BLOCK": 128, "num_warps": 8}
    norm_and_gate_kernel[(3, 2)](HEADS, HEADS, WEIGHT, HEADS, 1536, 1e-6, IS_SIGMOID=False, WEIGHT_STRIDE=0, **gated)
    routing = {"NUM_ACTIVE": 8, "NUM_GROUPS": 1, "NUM_ACTIVE_GROUPS": 1, "IS_SOFTMAX": True, "RENORMALIZES": False}
    routing |= {"NUM_EXPERTS": 128, "BLOCK_E": 128, "HAS_BIAS": False, "HAS_GATE": False}
    routing |= {"IS_DEPENDENT": False, "launch_pdl": False}
    logits, places = (gpu(3, 128, dtype=dtype) for dtype in (torch.float32, torch.int32))
    hallmark_experts_route[(3,)](logits, None, None, logits, places, 128, 1.0, num_warps=1, **routing)
    tensors = (Q, K, V, TABLE, POSITIONS[1:4], *PAGES, SLOTS[1:4], Q, K)
    rope_kernel[(3, 2)](*tensors, 1536, 1536, 1536, 1e-6, **heads)
    again = {kernel: len(kernel.device_caches[0][0]) for kernel in caches}
    print(json.dumps({"ops": found, "found_by_the_binder": again == caches}))


if __name__ == "__main__":
    main()
