"""The rates of the machine that bound every kernel: arithmetic and memory, as measured."""

import logging
from dataclasses import dataclass

import torch

from qualification.measure.checks.checked import one_thread
from qualification.measure.costs.timing import fastest_us, time_call

logger = logging.getLogger(__name__)

_JUDGING_BYTES = 2**29  # of a GPU's copy: ten times an H200's L2
_JUDGING_BYTES_CPU = (2**12, 2**25)  # least and most


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The rates that no kernel exceeds by much."""

    flops_per_second: float
    bytes_per_second: float

    def floor_us(self, flops: int, num_bytes: int) -> float:
        return max(flops / self.flops_per_second, num_bytes / self.bytes_per_second) * 1e6

    def or_higher(self, other: "Ceilings") -> "Ceilings":
        """The higher of each rate: what disturbs a measurement makes it slower."""
        return Ceilings(
            max(self.flops_per_second, other.flops_per_second), max(self.bytes_per_second, other.bytes_per_second)
        )


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


def ceilings_now(device: torch.device, dtype: torch.dtype, num_bytes: int) -> Ceilings | None:
    """Rates to judge the time of a call on `num_bytes` by, of the fastest of a few samples; in 10 to 50 ms.

    num_bytes  that the call reads and writes

    On a GPU a product and a copy that fit in no cache, as `time_call` times with a cold L2. On a CPU, where a call
    finds in its caches what the call before left there, a copy and a sum of as many bytes, the same for them; both by
    one thread and counted once for each, since what all threads reach together depends on what else the machine does.
    None where a GPU has no memory left for it.
    """
    if device.type == "cpu":
        with one_thread():
            one = _ceilings_of_one_core(device, dtype, num_bytes)
        num_threads = torch.get_num_threads()
        return Ceilings(num_threads * one.flops_per_second, num_threads * one.bytes_per_second)
    try:
        return _ceilings_of_gpu(device)
    except torch.OutOfMemoryError:
        logger.warning("no memory is left to measure this GPU's rates: a time is judged by its spread alone")
        return None


def _ceilings_of_gpu(device: torch.device) -> Ceilings:
    """Measure in 16 bits, the fastest that attention computes in."""
    size = 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    source = torch.empty(_JUDGING_BYTES, dtype=torch.uint8, device=device)
    target, product = torch.empty_like(source), torch.empty_like(a)
    matmul_us = fastest_us(lambda: torch.mm(a, b, out=product), device, max_samples=3)
    copy_us = fastest_us(lambda: target.copy_(source), device, max_samples=3)
    return Ceilings(2 * size**3 / (matmul_us * 1e-6), 2 * _JUDGING_BYTES / (copy_us * 1e-6))


def _ceilings_of_one_core(device: torch.device, dtype: torch.dtype, num_bytes: int) -> Ceilings:
    """Measure in the dtype and in fp32, in which a path may compute where the processor has nothing faster."""
    size = 512
    matmul_us = min(_matmul_us(device, each, size) for each in {dtype, torch.float32})
    least, most = _JUDGING_BYTES_CPU
    num_values = min(max(num_bytes, least), most) // 4
    source = torch.ones(num_values, device=device)
    target = torch.empty(num_values // 2, device=device)  # the copy reads and writes as many bytes as the sum reads
    copy_us = fastest_us(lambda: target.copy_(source[: num_values // 2]), device)
    sum_us = fastest_us(source.sum, device)
    return Ceilings(2 * size**3 / (matmul_us * 1e-6), 4 * num_values / (min(copy_us, sum_us) * 1e-6))


def _matmul_us(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return fastest_us(lambda: torch.mm(a, b, out=product), device)
