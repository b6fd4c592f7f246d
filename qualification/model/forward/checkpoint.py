"""A checkpoint's tensors by the names of its files, read from those files themselves."""

import json
import struct
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I32": torch.int32,
}
_NUM_THREADS = 8
_PART_BYTES = 32 * 2**20  # of one read
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "output.weight", "embed_out.weight")


class CheckpointError(Exception):
    """A file that cannot be read as safetensors, or a tensor that is not there."""


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a folder of safetensors files. `prefix`: of the names of the text part, "model." in most files."""

    def __init__(
        self, folder: Path, device: torch.device, embedding: str = "embed_tokens", layers: str = "layers"
    ) -> None:
        """Read the headers. `embedding`: the end of its name; `layers`: what names of layers begin with.

        Raises CheckpointError.
        """
        self.device = device
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="reference")
        try:
            self._places = _places(folder)
        except (OSError, ValueError, LookupError, struct.error) as error:
            raise CheckpointError(f"{folder}: cannot be read as safetensors: {error}") from error
        end = f"{embedding}.weight"
        embeddings = [name for name in self._places if name.endswith(end)]
        self.head = next((name for name in _HEADS if name in self._places), None)
        if not embeddings and self.head is None:
            raise CheckpointError(f"{folder}: no tensor is called {end}")
        self.embedding = min(embeddings, key=len) if embeddings else str(self.head)
        self.prefix = self.embedding.removesuffix(end) if embeddings else self._beginning(f"{layers}.0.")

    def _beginning(self, part: str) -> str:
        """Return what stands before a part of a name, in the shortest name that has it; "model." where none has."""
        names = [name for name in self._places if part in name]
        return min(names, key=len).partition(part)[0] if names else "model."

    def has(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises CheckpointError."""
        return self._place(name).shape

    def names(self, beginning: str) -> list[str]:
        """Return the names that begin so."""
        return [name for name in self._places if name.startswith(beginning)]

    def tensor(self, name: str, rows: range | None = None) -> Tensor:
        """Return a tensor, or some of its rows, as it is stored. Raises CheckpointError."""
        return _placed(self._begun(name, rows), self.device)

    def begin(self, names: Iterable[str]) -> dict[str, "Reading"]:
        """Begin to read tensors, several at once."""
        return {name: Reading(self._begun(name, None), self.device) for name in names}

    def close(self) -> None:
        """End the threads that read."""
        self._threads.shutdown(cancel_futures=True)

    def picked_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return single rows [n, ...] of a tensor, each read by itself."""
        found = {row: self._begun(name, range(row, row + 1)) for row in sorted(set(rows.tolist()))}
        return torch.cat([_placed(found[row], self.device) for row in rows.tolist()])

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise CheckpointError(f"the checkpoint has no tensor {name}, which its family's definition needs")
        return self._places[name]

    def _begun(self, name: str, rows: range | None) -> "_Begun":
        place = self._place(name)
        shape, offset = place.shape, place.offset
        if rows is not None:
            size = place.dtype.itemsize
            for dim in shape[1:]:
                size *= dim
            shape, offset = (len(rows), *shape[1:]), offset + rows.start * size
        memory = torch.empty(shape, dtype=place.dtype, pin_memory=self.device.type == "cuda")
        view = memoryview(memory.view(-1).view(torch.uint8).numpy().data) if memory.numel() else memoryview(b"")
        parts = range(0, len(view), _PART_BYTES)
        reads = [
            self._threads.submit(_read, place.file, offset + start, view[start : start + _PART_BYTES])
            for start in parts
        ]
        return _Begun(memory, reads)


class Reading:
    """A tensor whose bytes are on their way."""

    def __init__(self, begun: "_Begun", device: torch.device) -> None:
        self._begun = begun
        self._device = device
        self._found: Tensor | None = None

    def tensor(self) -> Tensor:
        """Wait for it, and return it on the device. Raises CheckpointError."""
        if self._found is None:
            self._found = _placed(self._begun, self._device)
        return self._found


@dataclass(frozen=True, slots=True)
class _Begun:
    """Memory of the host, and the reads that fill it."""

    memory: Tensor
    reads: list[Future[None]]


def _placed(begun: _Begun, device: torch.device) -> Tensor:
    for read in begun.reads:
        read.result()
    return begun.memory.to(device)


def _read(file: Path, offset: int, view: memoryview) -> None:
    done = 0
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            while done < len(view):
                count = opened.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{file}: it ends before its tensors do")
                done += count
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _places(folder: Path) -> dict[str, _Place]:
    index = folder / "model.safetensors.index.json"
    files = {folder / "model.safetensors"}
    if index.is_file():
        files = {folder / name for name in json.loads(index.read_bytes())["weight_map"].values()}
    found: dict[str, _Place] = {}
    for file in sorted(files):
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size))
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] in _DTYPES:
                start = 8 + size + entry["data_offsets"][0]
                found[name] = _Place(file, start, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return found
