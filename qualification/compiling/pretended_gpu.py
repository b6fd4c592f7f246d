"""A GPU that is pretended: tensors that have no memory, and a driver that launches nothing.

What runs under it makes the calls that it would make on the GPU, with tensors of the same shapes, strides and dtypes;
only kernels are not launched, and what they would have written is not there. So code whose calls depend on shapes alone
asks Triton for the same kernels. A process that pretends has no GPU of its own: `pretend` replaces functions of torch.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

_DEVICE = torch.device("cuda", 0)
_META = torch.device("meta")
_CPU = torch.device("cpu")
_MAX_CLUSTERS = 8  # any number above 0: a cluster has room
_NUM_DEVICES = 64  # more than a model has ranks
_TO_HOST = {
    *(torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.numpy),
    *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__),
}
_DRAWN = {torch.Tensor.uniform_, torch.Tensor.random_, torch.Tensor.normal_}  # by a generator, which is the CPU's


class GpuFacts(msgspec.Struct, frozen=True):
    """Properties of a GPU that code asks for.

    sm            10 * major + minor
    shared_bytes  that one program may have
    free_bytes    that no process has taken
    """

    name: str
    sm: int
    num_processors: int
    shared_bytes: int
    total_bytes: int
    free_bytes: int

    @classmethod
    def read(cls, device: torch.device) -> "GpuFacts":
        """Read those of a GPU that is there."""
        found = torch.cuda.get_device_properties(device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return cls(
            found.name,
            10 * found.major + found.minor,
            found.multi_processor_count,
            int(found.shared_memory_per_block_optin),  # type: ignore[attr-defined]
            total_bytes,
            free_bytes,
        )


H200 = GpuFacts("NVIDIA H200", 90, 132, 232_448, 150_110_011_392, 149_500_000_000)


class PretendedLauncher:
    """Stands in for Triton's launcher; launches nothing."""

    def __init__(self, _source: object, _metadata: object) -> None:
        self.launch = self

    def __call__(self, *_arguments: object) -> None:
        pass


class PretendedDriver:
    """Stands in for Triton's driver of a GPU that does not exist."""

    launcher_cls = PretendedLauncher

    def __init__(self, facts: GpuFacts) -> None:
        self._sm = facts.sm
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 2, 0, 0, 1024),  # module, function, registers, spills, threads
            get_device_properties=lambda _: {"max_shared_mem": facts.shared_bytes},
            fill_tma_descriptor=lambda address, *_: address,
            cuOccupancyMaxActiveClusters=lambda *_: _MAX_CLUSTERS,
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._sm, 32)


class _Event:
    """Stands in for torch.cuda.Event and torch.cuda.Stream."""

    cuda_stream = 0

    def __init__(self, *_arguments: object, **_options: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    wait_event = wait_stream = synchronize = wait = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 1.0


class PretendedGenerator(torch.Generator):
    """A CPU's random numbers for any device: nothing is drawn on the others."""

    def __new__(cls, _device: object = None) -> "PretendedGenerator":
        return super().__new__(cls)


class PretendedTensors(TorchFunctionMode):
    """Tensors of a GPU have shapes and no memory, and say that they are on it. What the host reads of them is zeros."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        first = args[0] if args else None
        if isinstance(first, Tensor):
            if func == torch.Tensor.device.__get__:
                return _DEVICE if first.is_meta else first.device
            if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
                return first.is_meta
            if func is torch.Tensor.pin_memory:
                return first
            if first.is_meta:
                if func is torch.Tensor.data_ptr:
                    return _address(first)
                if func in _TO_HOST:
                    return func(torch.zeros(first.shape, dtype=first.dtype), *args[1:], **kwargs)
                if func is torch.Tensor.cpu or (func is torch.Tensor.to and _CPU in (*args[1:], kwargs.get("device"))):
                    return torch.zeros(first.shape, dtype=first.dtype)
                if func in _DRAWN:
                    return first
            elif func is torch.Tensor.copy_ and args[1].is_meta:
                return first.zero_()
        kwargs.pop("pin_memory", None)
        given = kwargs.get("device")
        if given is not None and torch.device(given).type == "cuda":
            kwargs["device"] = _META
        if any(isinstance(it, torch.device) and it.type == "cuda" for it in args):
            args = tuple([_META if isinstance(it, torch.device) and it.type == "cuda" else it for it in args])
        return func(*args, **kwargs)


def _address(tensor: Tensor) -> int:
    """Return an address of its storage's own, as of memory at a multiple of 256 bytes."""
    storage = tensor.untyped_storage()._cdata & 0xFFFF_FFFF_FFFF
    return int((storage << 8) + tensor.storage_offset() * tensor.itemsize)


def pretend(facts: GpuFacts) -> None:
    """Have torch and Triton of this process say that there is this GPU, as its device 0."""
    driver.set_active(PretendedDriver(facts))
    properties = SimpleNamespace(
        name=facts.name,
        major=facts.sm // 10,
        minor=facts.sm % 10,
        multi_processor_count=facts.num_processors,
        shared_memory_per_block_optin=facts.shared_bytes,
        total_memory=facts.total_bytes,
    )
    answers: dict[str, object] = {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "set_device": lambda _: None,
        "synchronize": lambda *_: None,
        "is_available": lambda: True,
        "device_count": lambda: _NUM_DEVICES,
        "can_device_access_peer": lambda *_: False,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "mem_get_info": lambda *_: (facts.free_bytes, facts.total_bytes),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda *_: _Event(),
        "stream": lambda *_: nullcontext(),
        "device": lambda *_: nullcontext(),
        "Event": _Event,
        "Stream": _Event,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.Generator = cast("Any", PretendedGenerator)  # type: ignore[misc]
