"""Arguments that the Gluon products of a mixture are launched with: tensor maps, addresses, grids."""

from typing import Any

import torch
from torch import Tensor

from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors

TensorLayout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def matrix(x: Tensor) -> TensorLayout:
    return tuple(x.shape), tuple(x.stride())


def pairs_of_8(num_experts: int, width: int, size: int) -> TensorLayout:
    """Weights [E, 2 * width, size] as 8 rows of the gate and the same rows of the up projection, side by side."""
    return (num_experts, width // 8, 2, 8, size), (2 * width * size, 8 * size, width * size, size, 1)


def tensor_map(kernel: Loaded, place: int, x: Tensor, layout: TensorLayout) -> tuple[Any, ...]:
    """A tensor map as a kernel's arguments. place: among the kernel's maps."""
    return kernel.encode(x.data_ptr(), *kernel.boxes[place], *layout, 0), *layout[0], *layout[1]


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def grid(num_tiles: int, device: torch.device, programs: int = 1) -> tuple[int, int, int]:
    """Return as many programs as the device holds at once, `programs` of a multiprocessor, or as there are tiles."""
    return min(num_processors(device) * programs, num_tiles), 1, 1
