"""Weights of 4 bits as their makers define them: numbers out of the tensors of a checkpoint."""

import math
from collections.abc import Callable, Container

import torch
from torch import Tensor

from qualification.model.forward.matrix import e4m3
from qualification.model.packing import Packing

_NIBBLES = range(8)  # of an integer of 32 bits, from the lowest bits on
_AWQ_ROW_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight rows
_BLOCK = 128  # rows and columns that share a scale once they are numbers of 8 bits


def is_packed(packing: Packing, product: str, names: Container[str]) -> bool:
    """Return whether a product of such a checkpoint is packed, by the names of its tensors."""
    if packing is Packing.NVFP4:
        return f"{product}.weight_scale_2" in names
    return f"{product}.weight" not in names


def numbers_of(packing: Packing, product: str, stored: Callable[[str], Tensor]) -> Tensor:
    """Return a weight [out, in] fp64, of a product's tensors by their names: as a server multiplies it."""
    if packing.is_reencoded:
        return _of_fp4(packing, product, stored)
    if packing in (Packing.COMPRESSED, Packing.COMPRESSED_SYMMETRIC):
        return _compressed(packing, product, stored)
    codes, zeros, scales = (stored(f"{product}.{word}") for word in ("qweight", "qzeros", "scales"))
    if packing is Packing.AWQ:
        return _scaled(_along_rows(codes, _AWQ_ROW_OF_NIBBLE), _along_rows(zeros, _AWQ_ROW_OF_NIBBLE), scales).T
    numbers = torch.stack([codes >> 4 * nibble & 15 for nibble in _NIBBLES], dim=1).flatten(0, 1)  # [in, out]
    if packing is Packing.GPTQ:
        zeros = zeros.long() + sum(1 << 4 * nibble for nibble in _NIBBLES)  # of eight at once, as they were taken off
    of_groups = _along_rows(zeros, tuple(_NIBBLES))
    if packing is Packing.GPTQ_SYMMETRIC:
        of_groups = torch.full_like(of_groups, 8)
    return _scaled(numbers, of_groups, scales).T


def _compressed(packing: Packing, product: str, stored: Callable[[str], Tensor]) -> Tensor:
    scales = stored(f"{product}.weight_scale")  # [out, groups]
    codes = _along_rows(stored(f"{product}.weight_packed"), tuple(_NIBBLES))
    if packing is Packing.COMPRESSED_SYMMETRIC:
        zeros = torch.full(scales.shape, 8, device=scales.device)
    else:
        packed = stored(f"{product}.weight_zero_point")  # [out / 8, groups]
        zeros = _along_rows(packed.T.contiguous(), tuple(_NIBBLES)).T[: scales.shape[0]]
    return _scaled(codes.T, zeros.T, scales.T).T


def _of_fp4(packing: Packing, product: str, stored: Callable[[str], Tensor]) -> Tensor:
    """Return numbers of MXFP4 as they are, and of NVFP4 as e4m3 numbers: times 2^k, of each block of 128 x 128 the
    least by which its largest is at most 448, and times the scale of all numbers.
    """
    word = "weight" if packing is Packing.NVFP4 else "weight_packed"
    packed, scales = stored(f"{product}.{word}"), stored(f"{product}.weight_scale")
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1).long()
    exponents, halves = (codes >> 1) & 3, (codes & 1).double()
    sizes = torch.where(exponents == 0, halves / 2, (1 + halves / 2) * 2.0 ** (exponents - 1).double())
    numbers = torch.where(codes >= 8, -sizes, sizes)
    if packing is Packing.MXFP4_COMPRESSED:
        return numbers * torch.pow(2.0, scales.double() - 127).repeat_interleave(32, 1)
    numbers = numbers * scales.double().repeat_interleave(16, 1)
    if packing is Packing.NVFP4:
        whole = stored(f"{product}.weight_scale_2").double().reshape(())
    else:
        whole = 1 / stored(f"{product}.weight_global_scale").double().reshape(())
    found = torch.empty_like(numbers)
    for top in range(0, numbers.shape[0], _BLOCK):
        for left in range(0, numbers.shape[1], _BLOCK):
            block = numbers[top : top + _BLOCK, left : left + _BLOCK]
            largest = float(block.abs().max())
            scale = 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 1.0
            found[top : top + _BLOCK, left : left + _BLOCK] = e4m3(block / scale) * scale
    return found * whole


def _along_rows(packed: Tensor, place_of_nibble: tuple[int, ...]) -> Tensor:
    """Return codes [n, 8 m] of integers [n, m], eight of a row each."""
    found = torch.empty(*packed.shape, len(_NIBBLES), dtype=torch.int64, device=packed.device)
    for nibble, place in zip(_NIBBLES, place_of_nibble, strict=True):
        found[..., place] = packed >> 4 * nibble & 15
    return found.flatten(1)


def _scaled(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """Return [in, out] fp64: codes [in, out], zeros and scales [groups, out]."""
    size = codes.shape[0] // scales.shape[0]
    return (codes - zeros.repeat_interleave(size, 0)).double() * scales.double().repeat_interleave(size, 0)
