"""Digests of what a model folder holds, for the canary: has the tokenizer, or have the weights changed?"""

import hashlib
import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path

from server.errors import ModelError
from server.model.load.tokenizer_files import tokenizer_digest

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"  # as server/model/load/checkpoint.py reads them, which needs torch
INDEX_FILE = "model.safetensors.index.json"
DUMMY = "dummy"  # in the place of a digest of weights
_SAMPLE_BYTES = 4096  # of each tensor, from its middle; a whole tensor where it has no more
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it


def model_digests(folder: Path, *, has_weights: bool) -> dict[str, str | None]:
    """`tokenizer` and `weights`, each None where there are none or they cannot be read.

    has_weights   False for dummy weights: they are the same for every start
    """
    return {
        "tokenizer": _or_none(folder, tokenizer_digest),
        "weights": known_weights_digest(folder) if has_weights else DUMMY,
    }


def known_weights_digest(folder: Path) -> str | None:
    """`weights_digest`; None too where the weights cannot be read."""
    return _or_none(folder, weights_digest)


def weights_digest(folder: Path) -> str | None:
    """SHA-256 of each tensor's name, dtype, shape and some of its bytes, whatever file it is in; None without any.

    Some hundred reads, where reading all would take as long as loading. A training step, a merged adapter or another
    rounding change every sample of a tensor; a change of single elements elsewhere is not seen.
    Raises OSError and ValueError.
    """
    found: dict[str, str] = {}
    for file in _weight_files(folder):
        with file.open("rb") as opened:
            (num_bytes,) = struct.unpack("<Q", _exactly(opened.read(8), 8))
            if num_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"{file}: a header of {num_bytes} bytes, the limit is {_MAX_HEADER_BYTES}")
            header = json.loads(_exactly(opened.read(num_bytes), num_bytes))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                skipped = max(0, end - begin - _SAMPLE_BYTES) // 2
                opened.seek(8 + num_bytes + begin + skipped)
                length = min(_SAMPLE_BYTES, end - begin)
                sample = hashlib.sha256(_exactly(opened.read(length), length)).hexdigest()
                found[name] = f"{entry['dtype']} {entry['shape']} {sample}"
    if not found:
        return None
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files that are loaded; a folder may hold the same weights in other formats."""
    index = folder / INDEX_FILE
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
    return [folder / SINGLE_FILE] if (folder / SINGLE_FILE).is_file() else []


def _exactly(data: bytes, num_bytes: int) -> bytes:
    if len(data) != num_bytes:
        raise ValueError(f"the file ends {num_bytes - len(data)} bytes early")
    return data


def _or_none(folder: Path, digest: Callable[[Path], str | None]) -> str | None:
    """A folder that cannot be read is the engine's to refuse, with its own message."""
    try:
        return digest(folder)
    except (ModelError, OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        logger.debug("no digest of %s: %s", folder, error)
        return None
