"""Tensor maps by address, for prepared calls of the Gluon kernels."""

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
