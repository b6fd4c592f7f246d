"""Evidence on disk: the matrix in git and a machine's own cache share one format. A file that is not whole is refused.

A file is JSON of one evidence a line, sorted, so that a diff of two shows what changed:

    {
    "digest": "<sha256 of the file with this value as 64 zeros>",
    "schema": 1,
    "fingerprint": {...},
    "evidence": [
    {...},
    {...}
    ]
    }
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec

from kernels.fingerprint import Fingerprint
from kernels.path import Reject, Rejection
from kernels.shape import AttentionShape
from qualification.evidence import SUITE, Check, Evidence, Timing

SCHEMA = 1
MATRICES = Path(__file__).parent / "matrices"  # those that ship

Key = tuple[AttentionShape, str]  # shape, name of the path

_HEAD = '{\n"digest": "'
_ZEROS = "0" * 64


class MatrixError(ValueError):
    """A file of evidence is refused. `rejection` says why, naming the file."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.rejection = Rejection(Reject.MATRIX_INVALID, detail)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Evidence of one file or of a whole folder."""

    evidence: Mapping[Key, Evidence] = field(default_factory=lambda: MappingProxyType({}))
    digest: str | None = None  # None: there is no file
    problems: tuple[Rejection, ...] = ()  # files that were refused, their evidence not among `evidence`


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """An `Evidence` without what the file says once."""

    shape: AttentionShape
    path: str
    source_digest: str
    checks: tuple[Check, ...]
    tested_query_tokens: int
    tested_context_tokens: int
    at: str
    timing: Timing | None = None
    tflops: float | None = None
    bytes_per_second: float | None = None
    failure: str | None = None
    suite: int
    commit: str | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    schema: int
    fingerprint: Fingerprint
    evidence: list[_Row]


class _AnySchema(msgspec.Struct, frozen=True):
    schema: int


def save_matrix(path: Path, evidence: Iterable[Evidence]) -> str:
    """Write the file whole or not at all, over an older one. Returns its digest.

    Raises ValueError when the evidence is none at all, or of more than one machine.
    """
    text = _encode(list(evidence))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return _digest_in(text)


def load_matrix(path: Path) -> Matrix:
    """Read one file. Raises MatrixError for one that is truncated, tampered with, of another schema or inconsistent."""
    try:
        text = path.read_bytes().decode("utf-8")
        schema = msgspec.json.decode(text, type=_AnySchema).schema
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise MatrixError(f"{path.name} cannot be read, perhaps it is truncated: {error}") from error
    if schema != SCHEMA:
        raise MatrixError(f"{path.name} has schema {schema}, this version reads {SCHEMA}")
    if not text.startswith(_HEAD) or _digest_of(text) != _digest_in(text):
        raise MatrixError(f"{path.name} does not match its digest: it was changed after it was written")
    try:
        file = msgspec.json.decode(text, type=_File)
    except msgspec.DecodeError as error:
        raise MatrixError(f"{path.name} holds no evidence: {error}") from error
    found = {(row.shape, row.path): _evidence_of(row, file.fingerprint) for row in file.evidence}
    if len(found) != len(file.evidence):
        raise MatrixError(f"{path.name} says of one shape and path two things")
    return Matrix(MappingProxyType(found), file.digest)


def matrix_files(place: Path) -> list[Path]:
    """A file itself, or every one below a folder. Raises MatrixError where there is neither."""
    if not place.exists():
        raise MatrixError(f"{place} does not exist")
    return sorted(place.rglob("*.json")) if place.is_dir() else [place]


def load_matrices(folder: Path, fingerprint: Fingerprint) -> Matrix:
    """All evidence for this machine's GPU: every file of `folder/<gpu>/`, and nothing from a file that is refused.

    Where two files speak of one shape and path, what this very machine's stack measured counts more than what another
    did, then a failure more than a success, then the later one. `digest` is over all files, refused ones included.
    """
    found: dict[Key, Evidence] = {}
    problems: list[Rejection] = []
    digest = hashlib.sha256()
    files = sorted((folder / gpu_folder(fingerprint.gpu)).glob("*.json"))
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        try:
            matrix = load_matrix(path)
            _refuse_foreign(path, matrix, fingerprint)
        except MatrixError as error:
            problems.append(error.rejection)
            continue
        for key, evidence in matrix.evidence.items():
            older = found.get(key)
            if older is None or _weight(evidence, fingerprint) > _weight(older, fingerprint):
                found[key] = evidence
    return Matrix(MappingProxyType(found), digest.hexdigest() if files else None, tuple(problems))


def gpu_folder(gpu: str) -> str:
    """The folder of a GPU's matrix files: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unnamed"


def _refuse_foreign(path: Path, matrix: Matrix, fingerprint: Fingerprint) -> None:
    for evidence in matrix.evidence.values():
        if evidence.fingerprint.gpu != fingerprint.gpu:
            raise MatrixError(f"{path.name} was measured on {evidence.fingerprint.gpu}, this is {fingerprint.gpu}")


def _weight(evidence: Evidence, fingerprint: Fingerprint) -> tuple[bool, bool, str]:
    is_ours = not evidence.fingerprint.differing_fields(fingerprint) and evidence.suite == SUITE
    return (is_ours, not evidence.is_proven, evidence.at)


def _encode(evidence: list[Evidence]) -> str:
    machines = {entry.fingerprint for entry in evidence}
    if len(machines) != 1:
        raise ValueError(f"a file holds evidence of one machine, got {len(machines)}")
    rows = sorted((str(entry.shape), entry.path, _json(_row_of(entry))) for entry in evidence)
    body = ",\n".join(line for _, _, line in rows)
    head = f'{_HEAD}{_ZEROS}",\n"schema": {SCHEMA},\n"fingerprint": {_json(machines.pop())},\n'
    text = f'{head}"evidence": [\n{body}\n]\n}}\n'
    return text.replace(_ZEROS, _digest_of(text), 1)


def _row_of(evidence: Evidence) -> _Row:
    return _Row(**{name: getattr(evidence, name) for name in _Row.__struct_fields__})


def _evidence_of(row: _Row, fingerprint: Fingerprint) -> Evidence:
    return Evidence(fingerprint=fingerprint, **{name: getattr(row, name) for name in _Row.__struct_fields__})


def _json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def _digest_in(text: str) -> str:
    return text[len(_HEAD) : len(_HEAD) + 64]


def _digest_of(text: str) -> str:
    blank = _HEAD + _ZEROS + text[len(_HEAD) + 64 :]
    return hashlib.sha256(blank.encode()).hexdigest()
