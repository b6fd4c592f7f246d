"""The tensors of a folder of safetensors files, read by name. Nothing that could hold code is opened."""

import json
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from server.errors import ModelError
from server.model.load.json_file import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Ends of names: of a scale, and what DeepSeek's have behind it, which are multiplied by like all others.
SCALE, INVERSE = "_scale", "_inv"
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_CODES = {"F8_E4M3": torch.float8_e4m3fn}  # numbers of 8 bits, which are never converted
_DTYPES = _FLOATS | _CODES | {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "F8_E8M0": torch.float8_e8m0fnu}
_MAX_LISTED = 10  # names in one message
_NUM_THREADS = 8  # one waits for the disk, or for the memory of its cache, at a fraction of their speed
# Of one read, and of a thread's memory: 20 GB/s from the cache of files, 17 by 32 MB (H200).
_PART_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Place of a tensor, from its file's header.

    name  as the file has it, for messages; it may be looked up by another
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it
    offset: int  # of its first byte in the file
    name: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that a checkpoint must hold: of this dtype, or for one of 16 bits or more of floats of any such size.

    is_scale  of codes: it may be powers of two of 8 bits; and where a row has one scale, the rows may be numbers, or
              one number may stand for all
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_scale: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        if shape == self.shape or not self.is_scale or self.shape[1:] != (1,):
            return shape == self.shape
        return shape == self.shape[:1] or shape in ((), (1,), (1, 1))

    @property
    def stored_dtypes(self) -> tuple[str, ...]:
        """Return the dtypes, as safetensors names them, that may be stored."""
        if self.dtype.is_floating_point and self.dtype not in _CODES.values():
            return (*_FLOATS, "F8_E8M0") if self.is_scale else tuple(_FLOATS)
        return tuple(name for name, dtype in _DTYPES.items() if dtype is self.dtype)


def has_weights(folder: Path) -> bool:
    """Return whether there is a file of weights, or an index of such."""
    return any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """Name -> entry of every tensor in the folder, from the headers alone.

    Raises ModelError when there is no safetensors file, one cannot be read, or files and index disagree.
    """
    index = _read_index(folder)
    entries: dict[str, TensorEntry] = {}
    for file in sorted({folder / name for name in index.values()} if index else {folder / SINGLE_FILE}):
        if not file.is_file():
            raise ModelError(f"{file} does not exist, but {INDEX_FILE} names it: fetch the checkpoint again")
        _check_readable(file)
        try:
            with safe_open(file, framework="pt") as opened:
                offsets = _offsets(file)
                for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                    part = opened.get_slice(name)
                    if name in entries:
                        raise ModelError(f"{file.name}: tensor {name} is also in {entries[name].file.name}")
                    entries[name] = TensorEntry(
                        file, tuple(part.get_shape()), str(part.get_dtype()), offsets[name], name
                    )
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cannot be read as safetensors, fetch it again: {error}") from error
    astray = [name for name, file in index.items() if name not in entries or entries[name].file.name != file]
    if astray:
        raise ModelError(f"{folder / INDEX_FILE}: tensors that are not in the file it names: {listed(astray)}")
    return entries


def _check_readable(file: Path) -> None:
    """Raises ModelError for a file that may not be read, of which safetensors says that it does not exist."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error


def named_anew(
    folder: Path, entries: Mapping[str, TensorEntry], name_of: Callable[[str], str]
) -> dict[str, TensorEntry]:
    """Return the tensors by other names. Raises ModelError where two get the same one: only one would be read."""
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        new = name_of(name)
        if new in found:
            raise ModelError(
                f"{folder}: {found[new].name} and {entry.name} are both read as {new}: delete the one that is not the "
                "model's"
            )
        found[new] = entry
    return found


def add_made(folder: Path, entries: dict[str, TensorEntry], made: Mapping[str, TensorEntry], source: str) -> None:
    """Add tensors that are made of `source`. Raises ModelError where the checkpoint has one of them already."""
    for name, entry in made.items():
        if name in entries:
            raise ModelError(f"{folder}: {name} is there beside {source}, of which it is made: delete one of them")
        entries[name] = entry


def check_entries(
    folder: Path, entries: Mapping[str, TensorEntry], wanted: Mapping[str, Wanted], tolerated: tuple[str, ...]
) -> None:
    """Raise ModelError unless the checkpoint holds exactly the wanted tensors, in their shapes and kinds of numbers.

    tolerated   ends of names that may be there without need
    """
    missing = sorted(wanted.keys() - entries.keys())
    if any(entry.name.endswith(f"{SCALE}{INVERSE}") for entry in entries.values()):
        missing = [name + INVERSE if name.endswith(SCALE) else name for name in missing]
    extra = sorted(entries[name].name for name in entries.keys() - wanted.keys() if not name.endswith(tolerated))
    problems = [f"missing: {listed(missing)}"] if missing else []
    problems += [f"not known to this architecture: {listed(extra)}"] if extra else []
    for name in sorted(wanted.keys() & entries.keys()):
        entry, expected = entries[name], wanted[name].shape
        dtypes = wanted[name].stored_dtypes
        if not wanted[name].fits(entry.shape):
            problems.append(f"{entry.name} in {entry.file.name}: expected shape {expected}, found {entry.shape}")
        if entry.dtype not in dtypes:
            message = f"expected one of {', '.join(dtypes)}, found {entry.dtype}"
            problems.append(f"{entry.name} in {entry.file.name}: {message}")
    if problems:
        todo = "fetch the checkpoint again, or the config.json that belongs to it"
        raise ModelError(f"{folder}: the weights do not fit config.json. {listed(problems, '; ')}: {todo}")


def are_equal(one: TensorEntry, other: TensorEntry) -> bool:
    """Return whether two tensors are the same bytes, read a few megabytes at a time. Raises ModelError."""
    if (one.shape, one.dtype) != (other.shape, other.dtype) or one.dtype not in _DTYPES:
        return False
    num_bytes = math.prod(one.shape) * _DTYPES[one.dtype].itemsize
    try:
        with one.file.open("rb") as first, other.file.open("rb") as second:
            first.seek(one.offset)
            second.seek(other.offset)
            for start in range(0, num_bytes, _PART_BYTES):
                size = min(_PART_BYTES, num_bytes - start)
                if first.read(size) != second.read(size):
                    return False
    except OSError as error:
        raise ModelError(f"{one.file}: cannot be read: {error.strerror}") from error
    return True


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a checkpoint's tensor that fills `target`, whose first dim counts the block's rows.

    name      of the tensor, which is read as a matrix; where it is one number, all rows of `target` get that
    row_size  numbers of one of its rows; None: all but its first dim
    """

    name: str
    target: Tensor
    first_row: int = 0
    first_column: int = 0
    row_size: int | None = None


def copy_pieces(
    entries: Mapping[str, TensorEntry],
    pieces: Sequence[Piece],
    progress: Callable[[int, int], None],
    *,
    num_threads: int = _NUM_THREADS,
    part_bytes: int = _PART_BYTES,
) -> int:
    """Fill the target of each piece, wherever it is: several at once, a few megabytes at a time.

    Only the bytes of the pieces are read, and their number is returned.

    progress    gets the bytes that were filled and those of all targets, from this thread
    part_bytes  of one read; a row that is longer is read at once
    Raises ModelError when a file cannot be read.
    """
    total, done = sum(piece.target.nbytes for piece in pieces), 0
    reader = _Reader()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as threads:
        parts = list(_parts(entries, pieces, part_bytes))
        num_read = sum(part.num_bytes for part, _ in parts)
        copies = [threads.submit(reader.copy, *part) for part in parts]
        try:
            for copied in as_completed(copies):
                done += copied.result()
                progress(done, total)
        finally:
            threads.shutdown(cancel_futures=True)  # where one has failed, the others need not begin
    return num_read


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a block of a tensor in a file, `stride` bytes apart."""

    file: Path
    offset: int  # bytes
    num_rows: int
    row_bytes: int
    stride: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


def _parts(
    entries: Mapping[str, TensorEntry], pieces: Sequence[Piece], part_bytes: int
) -> Iterator[tuple[_Part, Tensor]]:
    """Runs of rows as they follow one another in the files, each with its place."""
    for piece in sorted(pieces, key=lambda it: (entries[it.name].file, entries[it.name].offset, it.first_row)):
        entry, rows = entries[piece.name], piece.target if piece.target.dim() else piece.target.view(1)
        dtype = _DTYPES[entry.dtype]
        row_bytes = rows[0].numel() * dtype.itemsize if rows.numel() else 1
        row_size = math.prod(entry.shape[1:]) if piece.row_size is None else piece.row_size
        stride = row_size * dtype.itemsize if rows.numel() else 1
        first = entry.offset + piece.first_row * stride + piece.first_column * dtype.itemsize
        if math.prod(entry.shape) == 1:  # which all of `target` gets, however its rows lie together
            row_bytes, stride, first = dtype.itemsize, 0, entry.offset
        step = max(1, part_bytes // row_bytes)
        for start in range(0, rows.shape[0], step):
            place = rows[start : start + step]
            yield _Part(entry.file, first + start * stride, place.shape[0], row_bytes, stride, dtype), place


class _Reader:
    """Reads into memory of each thread's own: pinned where the target is on a GPU, which copies while others read."""

    def __init__(self) -> None:
        self._own = threading.local()

    @torch.inference_mode()
    def copy(self, part: _Part, target: Tensor) -> int:
        """Fill the target; returns its bytes."""
        memory = self._memory(part.num_bytes, target.device)
        if part.stride == 0:
            _read(replace(part, num_rows=1, stride=part.row_bytes), memory)
            rows = memory[: part.row_bytes].view(part.dtype).expand(target.shape)
        else:
            _read(part, memory)
            rows = memory[: part.num_bytes].view(part.dtype).view(target.shape)
        if target.device.type != "cuda":
            target.copy_(rows)
            return target.nbytes
        with torch.cuda.stream(self._own.stream):
            target.copy_(rows, non_blocking=True)
            self._own.stream.synchronize()
        return target.nbytes

    def _memory(self, num_bytes: int, device: torch.device) -> Tensor:
        own, is_cuda = self._own, device.type == "cuda"
        if getattr(own, "memory", None) is None or own.memory.numel() < num_bytes:
            own.memory = torch.empty(max(num_bytes, 1), dtype=torch.uint8, pin_memory=is_cuda)
            own.stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        memory: Tensor = own.memory
        return memory


def _read(part: _Part, memory: Tensor) -> None:
    view = memoryview(memory.numpy().data)[: part.num_bytes]
    is_one_run = part.row_bytes == part.stride
    size = part.num_bytes if is_one_run else part.row_bytes
    try:
        with part.file.open("rb", buffering=0) as opened:
            for row in range(1 if is_one_run else part.num_rows):
                done = row * size
                opened.seek(part.offset + row * part.stride)
                while done < (row + 1) * size:
                    num_read = opened.readinto(view[done : (row + 1) * size])
                    if not num_read:
                        end = opened.seek(0, os.SEEK_END)
                        raise ModelError(f"{part.file}: it ends at byte {end}, before its tensors do")
                    done += num_read
    except OSError as error:
        raise ModelError(f"{part.file}: cannot be read: {error}") from error


def read_whole(entry: TensorEntry) -> Tensor:
    """Return a tensor in the memory of a CPU. Raises ModelError when its file cannot be read."""
    dtype = _DTYPES[entry.dtype]
    found = torch.empty(entry.shape, dtype=dtype)
    _read(_Part(entry.file, entry.offset, 1, found.nbytes, found.nbytes, dtype), found.view(-1).view(torch.uint8))
    return found


def _offsets(file: Path) -> dict[str, int]:
    """Return where each tensor begins in a file that safetensors has found in order."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    return {name: 8 + length + it["data_offsets"][0] for name, it in header.items() if name != "__metadata__"}


def tenths(report: Callable[[str], None]) -> Callable[[int, int], None]:
    """Return a progress function that reports each tenth of a checkpoint of a gigabyte or more."""
    reported = 0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        tenth = 10 * done // max(total, 1)
        if tenth > reported and total >= 1e9:
            reported = tenth
            report(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB")

    return progress


def listed(items: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return separator.join(items[:_MAX_LISTED]) + more


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name of a sharded checkpoint; empty for one that is a single file."""
    path = folder / INDEX_FILE
    if not path.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise ModelError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} (other formats are not loaded)")
        return {}
    content = read_json(path)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map must be an object of tensor names and files")
    for name, file in weight_map.items():
        # A file of this folder: an index must not make us open anything else.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{path}: {name} must be in a .safetensors file of this folder, found {file!r}")
    return weight_map
