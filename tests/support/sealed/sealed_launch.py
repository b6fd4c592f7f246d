"""Launches kernels for sm_90 on a driver that runs nothing, and prints which of them Triton's cache had, as JSON.

What Triton compiles with a C compiler is real: its driver's module and a launcher for each signature.
"""

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.hopper.prefill.launch import run_prefill
from kernels.system.triton_cache import use_own_cache


class _Hopper:
    launcher_cls = CudaLauncher

    def __init__(self) -> None:
        self.utils = CudaUtils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    found: dict[str, bool] = {}

    def note(src: Any, cache_hit: bool, **_: object) -> None:
        found[src.name] = cache_hit

    use_own_cache()  # as the engine does
    triton.knobs.compilation.listener = note
    driver.set_active(_Hopper())
    q, k, v = (torch.zeros(256, heads, 64, dtype=torch.bfloat16) for heads in (4, 1, 1))
    cu_seqlens = torch.tensor([0, 256], dtype=torch.int32)
    batch = AttentionBatch(cu_seqlens, 256, 256, cu_seqlens_k=cu_seqlens)
    run_prefill(q, k, v, batch, AttentionFlags(0.1), torch.zeros_like(q))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
