"""The tensors of a folder of safetensors files, read by name. Nothing that could hold code is opened."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from server.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32")
_MAX_LISTED = 10  # names in one message
_NUM_THREADS = 8  # one waits for the disk, or for a copy from memory that is not pinned, at a fraction of their speed
_GROUP_BYTES = 64 * 2**20  # of one task


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor is, from its file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """Name -> entry of every tensor in the folder, from the headers alone.

    Raises ModelError when there is no safetensors file, one cannot be read, or files and index disagree.
    """
    index = _read_index(folder)
    entries: dict[str, TensorEntry] = {}
    for file in sorted({folder / name for name in index.values()} if index else {folder / SINGLE_FILE}):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                    part = opened.get_slice(name)
                    if name in entries:
                        raise ModelError(f"{file.name}: tensor {name} is also in {entries[name].file.name}")
                    entries[name] = TensorEntry(file, tuple(part.get_shape()), str(part.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error
    astray = [name for name, file in index.items() if name not in entries or entries[name].file.name != file]
    if astray:
        raise ModelError(f"{folder / INDEX_FILE}: tensors that are not in the file it names: {listed(astray)}")
    return entries


def check_entries(
    folder: Path, entries: Mapping[str, TensorEntry], wanted: Mapping[str, Tensor], tolerated: tuple[str, ...]
) -> None:
    """Raise ModelError unless the checkpoint holds exactly the wanted tensors, in their shapes, as plain floats.

    tolerated   ends of names that may be there without need
    """
    missing = sorted(wanted.keys() - entries.keys())
    extra = sorted(name for name in entries.keys() - wanted.keys() if not name.endswith(tolerated))
    problems = [f"missing: {listed(missing)}"] if missing else []
    problems += [f"not known to this architecture: {listed(extra)}"] if extra else []
    for name in sorted(wanted.keys() & entries.keys()):
        entry, expected = entries[name], tuple(wanted[name].shape)
        if entry.shape != expected:
            problems.append(f"{name} in {entry.file.name}: expected shape {expected}, found {entry.shape}")
        if entry.dtype not in _DTYPES:
            problems.append(f"{name} in {entry.file.name}: expected one of {', '.join(_DTYPES)}, found {entry.dtype}")
    if problems:
        raise ModelError(f"{folder}: the weights do not fit config.json. {listed(problems, '; ')}")


def copy_tensors(
    entries: Mapping[str, TensorEntry],
    targets: Mapping[str, Tensor],
    progress: Callable[[int, int], None],
    *,
    num_threads: int = _NUM_THREADS,
    group_bytes: int = _GROUP_BYTES,
) -> None:
    """Fill each target, wherever it is, with the tensor of its name: several at once, mapped from disk and not held.

    progress     gets the bytes that were filled and those of all targets, from this thread
    group_bytes  of one task, about
    Raises ModelError when a file cannot be read.
    """
    total, done = sum(target.nbytes for target in targets.values()), 0
    with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as threads:
        groups = _groups(entries, targets, group_bytes)
        copies = [threads.submit(_copy_group, file, group) for file, group in groups]
        try:
            for copied in as_completed(copies):
                done += copied.result()
                progress(done, total)
        finally:
            threads.shutdown(cancel_futures=True)  # where one has failed, the others need not begin


def _groups(
    entries: Mapping[str, TensorEntry], targets: Mapping[str, Tensor], group_bytes: int
) -> list[tuple[Path, dict[str, Tensor]]]:
    """The targets of one file at a time, in parts that are worth a task."""
    groups: list[tuple[Path, dict[str, Tensor]]] = []
    num_bytes = 0
    for name, target in sorted(targets.items(), key=lambda item: (entries[item[0]].file, item[0])):
        file = entries[name].file
        if not groups or groups[-1][0] != file or num_bytes >= group_bytes:
            groups.append((file, {}))
            num_bytes = 0
        groups[-1][1][name] = target
        num_bytes += target.nbytes
    return groups


@torch.inference_mode()
def _copy_group(file: Path, targets: dict[str, Tensor]) -> int:
    """Returns the bytes it filled."""
    try:
        with safe_open(file, framework="pt") as opened:
            for name, target in targets.items():
                target.copy_(opened.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error
    return sum(target.nbytes for target in targets.values())


def tenths(tell: Callable[[str], None]) -> Callable[[int, int], None]:
    """A progress that tells each tenth of a checkpoint of a gigabyte or more."""
    told = 0

    def progress(done: int, total: int) -> None:
        nonlocal told
        tenth = 10 * done // max(total, 1)
        if tenth > told and total >= 1e9:
            told = tenth
            tell(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB")

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
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map must be an object of tensor names and files")
    for name, file in weight_map.items():
        # A file of this folder: an index must not make us open anything else.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{path}: {name} must be in a .safetensors file of this folder, found {file!r}")
    return weight_map
