"""Weights of 4 bits as checkpoints pack them: unpacked once, when they are loaded.

Each product's tensors become those of `Int4Weight`: `weight`, `weight_scale` and `weight_zero`, which are cut for a
rank as those of every other format are.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kernels.linear.formats.int4_weights import CODES_IN_A_BYTE, pack_pairs
from qualification.model.packing import Packing
from server.errors import ModelError
from server.model.load.checkpoint import Piece, TensorEntry, add_made, read_whole

_SYMMETRIC_ZERO = 8
_IN_AN_INTEGER = 8  # codes
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # bits of the eight rows, by fours
_NUM_THREADS = 4  # each with a product of up to 0.5 GB unpacked
_CODES, _SCALES, _ZEROS = "codes", "scales", "zeros"
_GPTQ_WORDS = {_CODES: "qweight", _SCALES: "scales", _ZEROS: "qzeros"}
_COMPRESSED_WORDS = {_CODES: "weight_packed", _SCALES: "weight_scale", _ZEROS: "weight_zero_point"}
# Taken from eight packed zero points at once by GPTQModel where it writes the first version, and added where it reads
# one, which transformers does by it. Not one by one: a zero point of 0 borrows from the next, which the sum gives back.
# AutoGPTQ and ExLlama add to each alone and get 16 for a 0; files of AutoGPTQ with a 0 have lost those behind it.
_ONES = 0x11111111
_OF_GPTQ = (Packing.GPTQ, Packing.GPTQ_V2, Packing.GPTQ_SYMMETRIC)
_SCALE_DTYPES = ("F16", "BF16", "F32")


class Parts(Protocol):
    """Tensors of a product in the file, which make those of its weight."""

    @property
    def product(self) -> str:
        """Return its name."""

    def unpacked(self) -> dict[str, Tensor]:
        """Return the tensors of its weight by the words of `stored`. Raises ModelError."""


@dataclass(frozen=True, slots=True)
class PackedEntry(TensorEntry):
    """A tensor of a weight that is not in the file as it is; `file` and `offset` are those of its codes.

    word   of the weight's `stored`
    parts  the product's tensors in the file
    """

    word: str
    parts: Parts


@dataclass(frozen=True, slots=True)
class _Parts:
    """Tensors of a product. order: the group of each column, which GPTQ's files repeat; None where there is none."""

    product: str
    packing: Packing
    codes: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry | None
    order: TensorEntry | None = None

    def unpacked(self) -> dict[str, Tensor]:
        """Return the tensors of `Int4Weight`. Raises ModelError."""
        return _unpacked(self)


def packed_entries(folder: Path, entries: Mapping[str, TensorEntry], packing: Packing) -> dict[str, TensorEntry]:
    """Return a checkpoint's tensors with those of 4 bits as `Int4Weight` has them. Raises ModelError."""
    is_compressed = packing in (Packing.COMPRESSED, Packing.COMPRESSED_SYMMETRIC)
    words = _COMPRESSED_WORDS if is_compressed else _GPTQ_WORDS
    end = f".{words[_CODES]}"
    found = dict(entries)
    for name in entries:
        if not name.endswith(end):
            continue
        product = name.removesuffix(end)
        needed = [words[_SCALES]] if packing is Packing.COMPRESSED_SYMMETRIC else [words[_SCALES], words[_ZEROS]]
        missing = [f"{product}.{word}" for word in needed if f"{product}.{word}" not in entries]
        if missing:
            raise ModelError(f"{folder}: {name} needs {', '.join(missing)}: fetch the checkpoint again")
        parts = _Parts(
            product,
            packing,
            found.pop(name),
            found.pop(f"{product}.{words[_SCALES]}"),
            found.pop(f"{product}.{words[_ZEROS]}") if len(needed) > 1 else None,
            found.pop(f"{product}.g_idx", None) if packing in _OF_GPTQ else None,
        )
        if is_compressed:
            found.pop(f"{product}.weight_shape", None)  # that of config.json, which the codes are held to
        _check(parts)
        add_made(folder, found, _as_loaded(parts), name)
    return found


def copy_packed(entries: Mapping[str, TensorEntry], pieces: Sequence[Piece]) -> list[Piece]:
    """Fill the targets of what is packed, one product after the other; returns the other pieces. Raises ModelError."""
    packed: dict[str, list[tuple[PackedEntry, Piece]]] = {}
    others = []
    for piece in pieces:
        entry = entries.get(piece.name)
        if isinstance(entry, PackedEntry):
            packed.setdefault(entry.parts.product, []).append((entry, piece))
        else:
            others.append(piece)
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="unpack") as threads:
        for filled in [threads.submit(_fill, group) for group in packed.values()]:
            filled.result()
    return others


def _check(parts: _Parts) -> None:
    """Raises ModelError for tensors of a product that do not fit one another."""
    rows, columns = _size(parts)
    groups = math.prod(parts.scales.shape) // max(rows, 1)
    due: dict[TensorEntry, tuple[int, ...]] = {
        parts.codes: _shape_of_codes(parts.packing, rows, columns),
        parts.scales: (groups, rows),
    }
    if parts.packing in (Packing.COMPRESSED, Packing.COMPRESSED_SYMMETRIC):
        due[parts.scales] = (rows, groups)
        if parts.zeros is not None:
            due[parts.zeros] = (-(-rows // _IN_AN_INTEGER), groups)
    elif parts.zeros is not None:
        due[parts.zeros] = (groups, rows // _IN_AN_INTEGER)
    if parts.order is not None:
        due[parts.order] = (columns,)
    for entry, shape in due.items():
        dtypes = _SCALE_DTYPES if entry is parts.scales else ("I32",)
        if entry.shape != shape or entry.dtype not in dtypes:
            raise ModelError(
                f"{parts.product} in {entry.file.name}: of {rows} rows in groups, a tensor of {', '.join(dtypes)} "
                f"{shape} was expected, found {entry.dtype} {entry.shape}"
            )


def _shape_of_codes(packing: Packing, rows: int, columns: int) -> tuple[int, int]:
    if packing is Packing.AWQ:
        return columns, rows // _IN_AN_INTEGER
    if packing in _OF_GPTQ:
        return columns // _IN_AN_INTEGER, rows
    return rows, -(-columns // _IN_AN_INTEGER)


def _size(parts: _Parts) -> tuple[int, int]:
    """Return the weight's rows and columns, from the shape of its codes."""
    if len(parts.codes.shape) != 2:
        raise ModelError(f"{parts.product} in {parts.codes.file.name}: codes of two dims were expected")
    first, second = parts.codes.shape
    if parts.packing is Packing.AWQ:
        return second * _IN_AN_INTEGER, first
    if parts.packing in _OF_GPTQ:
        return second, first * _IN_AN_INTEGER
    return first, second * _IN_AN_INTEGER


def _as_loaded(parts: _Parts) -> dict[str, TensorEntry]:
    rows, columns = _size(parts)
    groups = math.prod(parts.scales.shape) // max(rows, 1)
    shapes = {
        "weight": ((rows, -(-columns // CODES_IN_A_BYTE)), "U8"),
        "weight_scale": ((rows, groups), "F32"),
        "weight_zero": ((rows, groups), "U8"),
    }
    return {
        (name := f"{parts.product}.{word}"): PackedEntry(
            parts.codes.file, shape, dtype, parts.codes.offset, name, word, parts
        )
        for word, (shape, dtype) in shapes.items()
    }


@torch.inference_mode()
def _fill(group: Sequence[tuple[PackedEntry, Piece]]) -> None:
    found = group[0][0].parts.unpacked()
    for entry, piece in group:
        rows, columns = piece.target.shape
        matrix = found[entry.word] if piece.row_size is None else found[entry.word].reshape(-1, piece.row_size)
        block = matrix[piece.first_row : piece.first_row + rows]
        piece.target.copy_(block[:, piece.first_column : piece.first_column + columns])


def _unpacked(parts: _Parts) -> dict[str, Tensor]:
    """Return a product's tensors as `Int4Weight` has them. Raises ModelError."""
    codes, scales = read_whole(parts.codes), read_whole(parts.scales).float()
    zeros = None if parts.zeros is None else read_whole(parts.zeros)
    if zeros is not None and parts.packing is Packing.GPTQ:
        zeros = zeros + _ONES  # modulo 2^32
    match parts.packing:
        case Packing.AWQ:
            codes, scales = _unpacked_rows(codes, _AWQ_ORDER).t(), scales.t()
            zeros = None if zeros is None else _unpacked_rows(zeros, _AWQ_ORDER).t()
        case Packing.GPTQ | Packing.GPTQ_V2 | Packing.GPTQ_SYMMETRIC:
            codes, scales = _unpacked_rows(codes.t()), scales.t()
            zeros = None if zeros is None else _unpacked_rows(zeros).t()
        case Packing.COMPRESSED | Packing.COMPRESSED_SYMMETRIC:
            codes = _unpacked_rows(codes)
            zeros = None if zeros is None else _unpacked_rows(zeros.t()).t()[: scales.shape[0]]
    if parts.order is not None:
        _check_order(parts, read_whole(parts.order), scales.shape[1])
    return {
        "weight": pack_pairs(codes.contiguous()),
        "weight_scale": scales,
        "weight_zero": _zeros(parts, zeros, scales),
    }


def _unpacked_rows(packed: Tensor, order: Sequence[int] = tuple(range(_IN_AN_INTEGER))) -> Tensor:
    """Return codes [rows, 8 * columns] uint8 of integers [rows, columns] int32. order: the place of each of eight."""
    places = torch.tensor([4 * it for it in order], dtype=torch.int32)
    return (packed[..., None] >> places & 15).to(torch.uint8).flatten(1)


def _zeros(parts: _Parts, zeros: Tensor | None, scales: Tensor) -> Tensor:
    if zeros is None:
        return torch.full(scales.shape, _SYMMETRIC_ZERO, dtype=torch.uint8)
    if parts.packing is Packing.GPTQ_SYMMETRIC:
        if bool(((zeros != _SYMMETRIC_ZERO - 1) & (zeros != _SYMMETRIC_ZERO)).any()):
            found = set(zeros.flatten().tolist())
            raise ModelError(
                f"{parts.product}: config.json says that it is symmetric (sym), and qzeros has {sorted(found)[:4]}, "
                f"where {_SYMMETRIC_ZERO - 1} or {_SYMMETRIC_ZERO} was expected: set sym to false if it is not"
            )
        return torch.full(scales.shape, _SYMMETRIC_ZERO, dtype=torch.uint8)
    return zeros


def _check_order(parts: _Parts, order: Tensor, groups: int) -> None:
    columns = order.shape[0]
    if not torch.equal(order.long(), torch.arange(columns) // max(1, columns // max(groups, 1))):
        raise ModelError(f"{parts.product}.g_idx: columns in another order (desc_act) are not supported")
