"""Weights of 4 bits as their makers define them: numbers out of the tensors of a checkpoint."""

from collections.abc import Callable

import torch
from torch import Tensor

from qualification.model.packing import Packing

_NIBBLES = range(8)  # of an integer of 32 bits, from the lowest bits on
_AWQ_ROW_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight rows


def numbers_of(packing: Packing, product: str, stored: Callable[[str], Tensor]) -> Tensor:
    """Return a weight [out, in] fp64, of a product's tensors by their names."""
    if packing in (Packing.COMPRESSED, Packing.COMPRESSED_SYMMETRIC):
        return _compressed(packing, product, stored)
    codes, zeros, scales = (stored(f"{product}.{word}") for word in ("qweight", "qzeros", "scales"))
    if packing is Packing.AWQ:
        return _scaled(_along_rows(codes, _AWQ_ROW_OF_NIBBLE), _along_rows(zeros, _AWQ_ROW_OF_NIBBLE), scales).T
    numbers = torch.stack([codes >> 4 * nibble & 15 for nibble in _NIBBLES], dim=1).flatten(0, 1)  # [in, out]
    of_groups = _along_rows(zeros, tuple(_NIBBLES))
    if packing is Packing.GPTQ:
        of_groups = of_groups + 1
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
