"""Classes of pointers: the part of a tensor that Triton compiles into a kernel, its dtype and alignment."""

from dataclasses import dataclass

import torch
from torch import Tensor

PointerClass = tuple[torch.dtype, int]  # dtype, and the address modulo 16 bytes


@dataclass(frozen=True, slots=True)
class AnyTensor:
    """A stand-in, for Triton's compiler, of every tensor of one dtype whose address modulo 16 is `residue`."""

    dtype: torch.dtype
    residue: int

    def data_ptr(self) -> int:
        return self.residue


def pointer_class(x: Tensor | None) -> PointerClass | None:
    """Return the class of a tensor's pointer; None for None."""
    return None if x is None else (x.dtype, x.data_ptr() % 16)


def any_tensor(pointer: PointerClass | None) -> AnyTensor | None:
    """Return a stand-in for the tensors of a class; None for None."""
    return None if pointer is None else AnyTensor(*pointer)
