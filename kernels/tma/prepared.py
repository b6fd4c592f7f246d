"""What prepared calls of the three Gluon kernels share: launch options, and tensor maps by address."""

from typing import Any

from kernels.launch import Loaded
from kernels.tma.launches import TensorMap

_MAX_KEPT = 64  # addresses that an allocator gives in turns; each takes 0.6 KB


class KeptMaps(dict[int, tuple[object, ...]]):
    """The kernel's arguments for tensors of one form, by their addresses: made when they are asked for."""

    def __init__(self, tensor_map: TensorMap) -> None:
        self._map = tensor_map

    def __missing__(self, address: int) -> tuple[object, ...]:
        if len(self) >= _MAX_KEPT:
            self.clear()
        made = self[address] = self._map.at(address)
        return made


def launch_options(kernel: Loaded) -> tuple[Any, ...]:
    """Return the arguments of a launch that stand between its stream and the kernel's own."""
    return kernel.begin((1, 1, 1))[4:]
