"""Reading the machine: its fingerprint, its cores, and our dtypes as torch's."""

import functools
import os
import platform
import re
from pathlib import Path

import torch

from kernels.calls.launch import is_interpreted, triton_version
from kernels.system.cpu_libraries import library_variables
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.shape import Dtype

_TORCH_DTYPES = {
    Dtype.FP32: torch.float32,
    Dtype.FP16: torch.float16,
    Dtype.BF16: torch.bfloat16,
    FP8: torch.float8_e4m3fn,
}


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Our dtype as torch names it."""
    return _TORCH_DTYPES[dtype]


def dtype_of(dtype: torch.dtype) -> Dtype:
    """Torch's dtype as ours. Raises ValueError for one that no path takes."""
    for ours, theirs in _TORCH_DTYPES.items():
        if theirs is dtype:
            return ours
    raise ValueError(f"expected one of {', '.join(d.value for d in _TORCH_DTYPES)}, found {dtype}")


def read_fingerprint(device: torch.device, *, num_threads: int | None = None) -> Fingerprint:
    """Return the fingerprint of `device`. Raises ValueError for a device that is neither CPU nor CUDA.

    num_threads  of a CPU: those that torch is to compute with; None for those that it computes with now
    """
    if device.type == "cuda":
        return _read_gpu(device)
    if device.type != "cpu":
        raise ValueError(f"expected a cpu or cuda device, found {device.type}")
    return _read_cpu(
        Device.INTERPRETER if is_interpreted() else Device.CPU,
        torch.get_num_threads() if num_threads is None else num_threads,
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
    )


def use_all_cores() -> None:
    """Let torch compute with every core that this process may use: so the server does, and what measures for it."""
    torch.set_num_threads(num_cores())


# Every call of the library asks. What may change while the process lives is an argument, so that a change is seen; all
# else is read once for each value of the arguments.
@functools.cache
def _read_cpu(device: Device, num_threads: int, is_onednn_used: bool, matmul_precision: str) -> Fingerprint:
    settings = [*library_variables()]
    settings += [] if is_onednn_used else ["oneDNN=off"]
    settings += [] if matmul_precision == "highest" else [f"float32_matmul={matmul_precision}"]
    return Fingerprint(
        device=device,
        gpu=_processor_name(),
        sm=None,
        driver=None,
        cuda=torch.version.cuda,
        cudnn=None,
        torch=str(torch.__version__),
        triton=triton_version(),
        instruction_set=torch.backends.cpu.get_cpu_capability(),
        libraries=" ".join(settings) or "default",
        threads=num_threads,
    )


@functools.cache
def _read_gpu(device: torch.device) -> Fingerprint:
    properties = torch.cuda.get_device_properties(device)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return Fingerprint(
        device=Device.CUDA,
        gpu=properties.name,
        sm=10 * properties.major + properties.minor,
        driver=_driver_version(),
        cuda=torch.version.cuda,
        cudnn=None if cudnn is None else str(cudnn),
        torch=str(torch.__version__),
        triton=triton_version(),
    )


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def _driver_version() -> str | None:
    """The kernel driver's version, e.g. 580.95.05; None where it does not say."""
    info = Path("/proc/driver/nvidia/version")
    if not info.exists():
        return None
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", info.read_text())
    return found.group(1) if found else None
