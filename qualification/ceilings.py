"""The rates of the machine that bound every kernel: arithmetic and memory, as measured."""

from dataclasses import dataclass

import torch

from qualification.timing import time_call


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The rates that no kernel exceeds by much."""

    flops_per_second: float
    bytes_per_second: float

    def floor_us(self, flops: int, num_bytes: int) -> float:
        return max(flops / self.flops_per_second, num_bytes / self.bytes_per_second) * 1e6


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A large matrix product and a large copy (bytes read plus bytes written) on random data."""
    is_cuda = device.type == "cuda"
    size, num_bytes = (8192, 2**31) if is_cuda else (512, 2**25)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    target, product = torch.empty_like(source), torch.empty_like(a)
    matmul = time_call(lambda: torch.mm(a, b, out=product), device)
    copy = time_call(lambda: target.copy_(source), device)
    return Ceilings(2 * size**3 / (matmul.p50_us * 1e-6), 2 * num_bytes / (copy.p50_us * 1e-6))
