"""Weights of 4 bits with an exponent (NVFP4, MXFP4), which become numbers e4m3 in blocks of 128 when they are loaded.

sm_90 multiplies numbers of 8 bits, and none of these. A number of 4 bits is 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign.
Each block of 128 x 128 gets as its scale the least power of two by which its largest number is at most 448: a number
whose digits e4m3 has is exact, so that

  MXFP4  (times a power of two for 32 numbers) is exact, as long as the scales of a block are at most 2^14 apart
  NVFP4  (times a scale e4m3 for 16 numbers and one for all) is exact for 0.5, 1, 2 and 4, and for 1.5, 3 and 6 times
         scales whose digits times 3 fit: others are off by at most 1/21 of themselves (1.5 * 14/8 = 2.625, of which
         2.5 is left), numbers below 2^-6 of the block's scale by at most half a step there, 2^-10 of it

Sources: OCP Microscaling Formats 1.0, table 5; NVIDIA's and compressed-tensors' definitions of NVFP4.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.formats.fp8_weights import BLOCK, E4M3, LARGEST
from qualification.model.packing import Packing
from server.errors import ModelError
from server.model.load.checkpoint import TensorEntry, add_made, read_whole
from server.model.load.packed import PackedEntry

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the code's low three bits; the fourth one is the sign
_BIAS_OF_SCALE = 127  # of powers of two of 8 bits; 255 is none
_NAN_SCALE = 255
_BIAS_OF_FP64, _DIGITS_OF_FP64 = 1023, 52
_ROWS_AT_ONCE = 8 * BLOCK


@dataclass(frozen=True, slots=True)
class _Words:
    """Last words of the names of a product's tensors.

    whole    the scale of all numbers, and whether it is a divisor
    inputs   how its maker rounds inputs to 4 bits, which is not done
    group    numbers of a row that share a scale
    """

    codes: str
    whole: str | None
    is_divisor: bool
    inputs: str
    group: int
    scale_dtype: str


_WORDS = {
    Packing.NVFP4: _Words("weight", "weight_scale_2", False, "input_scale", 16, "F8_E4M3"),
    Packing.NVFP4_COMPRESSED: _Words("weight_packed", "weight_global_scale", True, "input_global_scale", 16, "F8_E4M3"),
    Packing.MXFP4_COMPRESSED: _Words("weight_packed", None, False, "input_global_scale", 32, "U8"),
}


@dataclass(frozen=True, slots=True)
class _Fp4Parts:
    """Tensors of a product: codes [N, K / 2], two numbers a byte; scales [N, K / group]; one scale of all numbers."""

    product: str
    words: _Words
    codes: TensorEntry
    scales: TensorEntry
    whole: TensorEntry | None

    def unpacked(self) -> dict[str, Tensor]:
        """Return the tensors of `Fp8BlocksWeight`. Raises ModelError for scales that are no numbers, or do not fit."""
        codes, scales, factor = read_whole(self.codes), self._scales(), self._factor()
        found, powers = [], []
        for first in range(0, codes.shape[0], _ROWS_AT_ONCE):
            own = slice(first, first + _ROWS_AT_ONCE)
            numbers = numbers_of(codes[own]) * scales[own].repeat_interleave(self.words.group, 1)
            rounded, exponents = in_blocks(numbers)
            if self.words.whole is None and not _is_exact(numbers, rounded, exponents):
                raise ModelError(
                    f"{self.product}.weight_scale: rows {first} to {first + numbers.shape[0]} have a block of {BLOCK} "
                    f"by {BLOCK} whose scales are more than 2^14 apart, which 8 bits do not hold: serve the checkpoint "
                    "that this one was made from"
                )
            found.append(rounded)
            powers.append(exponents)
        in_fp32 = (_power_of_two(torch.cat(powers)) * factor).float()
        if not bool(torch.isfinite(in_fp32).all()) or bool((in_fp32 == 0).any()):
            raise ModelError(f"{self.product}.weight_scale: a block's scale is beyond what fp32 holds")
        return {"weight": torch.cat(found), "weight_scale": in_fp32}

    def _scales(self) -> Tensor:
        """Return the scale of each group, fp64."""
        stored = read_whole(self.scales)
        if stored.dtype is torch.uint8:
            is_wrong = stored == _NAN_SCALE
            found = _power_of_two(stored.int() - _BIAS_OF_SCALE)
        else:
            found = stored.double()
            is_wrong = found.isnan()
        if bool(is_wrong.any()):
            raise ModelError(f"{self.product}.weight_scale: {int(is_wrong.sum())} scales are NaN")
        return found

    def _factor(self) -> float:
        if self.whole is None:
            return 1.0
        found = float(read_whole(self.whole).reshape(-1)[0])
        if not math.isfinite(found) or found <= 0:
            raise ModelError(f"{self.product}.{self.words.whole}: a positive number was expected, found {found}")
        return 1 / found if self.words.is_divisor else found


def reencoded_entries(folder: Path, entries: Mapping[str, TensorEntry], packing: Packing) -> dict[str, TensorEntry]:
    """Return a checkpoint's tensors with those of 4 bits as `Fp8BlocksWeight` has them. Raises ModelError."""
    words = _WORDS[packing]
    found = dict(entries)
    for name, entry in entries.items():
        product, _, word = name.rpartition(".")
        if word != words.codes or entry.dtype != "U8":
            continue
        needed = ["weight_scale"] if words.whole is None else ["weight_scale", words.whole]
        missing = [f"{product}.{it}" for it in needed if f"{product}.{it}" not in entries]
        if missing:
            raise ModelError(f"{folder}: {name} needs {', '.join(missing)}: fetch the checkpoint again")
        whole = None if words.whole is None else found.pop(f"{product}.{words.whole}")
        parts = _Fp4Parts(product, words, found.pop(name), found.pop(f"{product}.weight_scale"), whole)
        found.pop(f"{product}.{words.inputs}", None)
        add_made(folder, found, _as_loaded(parts), name)
    return found


def _as_loaded(parts: _Fp4Parts) -> dict[str, TensorEntry]:
    """Return the entries of a product's weight. Raises ModelError for tensors that do not fit one another."""
    words, codes = parts.words, parts.codes
    if len(codes.shape) != 2 or 2 * codes.shape[1] % words.group:
        raise ModelError(
            f"{parts.product}.{words.codes} in {codes.file.name}: codes of whole groups of {words.group} were "
            f"expected, found {codes.shape}"
        )
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    due: list[tuple[TensorEntry, str, str, list[tuple[int, ...]]]] = [
        (parts.scales, "weight_scale", words.scale_dtype, [(rows, columns // words.group)])
    ]
    if parts.whole is not None:
        due.append((parts.whole, str(words.whole), "F32", [(1,), ()]))
    for entry, word, dtype, shapes in due:
        if entry.dtype != dtype or entry.shape not in shapes:
            raise ModelError(
                f"{parts.product}.{word} in {entry.file.name}: {dtype} {shapes[0]} was expected, found {entry.dtype} "
                f"{entry.shape}"
            )
    shapes_of = {
        "weight": ((rows, columns), "F8_E4M3"),
        "weight_scale": ((-(-rows // BLOCK), -(-columns // BLOCK)), "F32"),
    }
    return {
        (name := f"{parts.product}.{word}"): PackedEntry(codes.file, shape, dtype, codes.offset, name, word, parts)
        for word, (shape, dtype) in shapes_of.items()
    }


def numbers_of(codes: Tensor) -> Tensor:
    """Return numbers [N, K] fp64 of codes [N, K / 2], two in a byte, the first in its low bits."""
    table = torch.tensor((*_NUMBERS, *(-it for it in _NUMBERS)), dtype=torch.float64)
    return table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).int()]


def in_blocks(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers [N, K] fp64 as e4m3, and the exponents of their blocks' scales [N / 128, K / 128], rounded up.

    The exponent is the least by whose power of two a block's largest number is at most 448; 0 of a block of zeros.
    """
    rows, columns = numbers.shape
    padded = F.pad(numbers, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    mantissas, exponents = torch.frexp(blocks.abs().amax((1, 3)) / LARGEST)
    exponents = torch.where(mantissas == 0.5, exponents - 1, exponents)
    scaled = numbers * _power_of_two(-_spread(exponents, rows, columns))
    return scaled.float().to(E4M3), exponents


def _is_exact(numbers: Tensor, codes: Tensor, exponents: Tensor) -> bool:
    return torch.equal(codes.double() * _power_of_two(_spread(exponents, *numbers.shape)), numbers)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2 ** exponents in fp64, by its bits: torch.ldexp takes a power of fp32."""
    return ((exponents.long() + _BIAS_OF_FP64) << _DIGITS_OF_FP64).view(torch.float64)


def _spread(of_blocks: Tensor, rows: int, columns: int) -> Tensor:
    return of_blocks.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
