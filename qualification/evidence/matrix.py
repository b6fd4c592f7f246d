"""Evidence on disk: the matrix in git and a machine's own cache share one format. A file that is not whole is refused.

A file is JSON of one evidence a line, sorted, so that a diff of two shows what changed:

    {
    "digest": "<sha256 of the file with this value as 64 zeros>",
    "schema": 2,
    "fingerprint": {...},
    "runs": {
    "1f0c9a2e": {"at": ..., "suite": 3, "commit": ..., "command": ..., "sources": {"triton.decode": "<sha256>"}}
    },
    "model": {...} or null,
    "evidence": [
    {"shape": "decode bf16 ...", "path": "triton.decode", "run": "1f0c9a2e", ...},
    {...}
    ]
    }
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

import msgspec

from kernels.system.whole_file import write_whole
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.path import Reject, Rejection
from qualification.common.regular_file import read_regular
from qualification.evidence.evidence import SUITE, Evidence
from qualification.evidence.full_model import FullModel
from qualification.evidence.gpu_folder import gpu_folder
from qualification.evidence.matrix_rows import Row, Run, evidence_of, rows_of
from qualification.evidence.possible import refuse_impossible, refuse_impossible_model

SCHEMA = 2
MATRICES = Path(__file__).parent.parent / "matrices"  # those that ship

Key = tuple[AnyShape, str]  # shape, name of the path

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
    model: FullModel | None = None  # of one file: what the attention measured here means for the whole model


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    schema: int
    fingerprint: Fingerprint
    runs: dict[str, Run]
    model: FullModel | None
    evidence: list[Row]


class _RawRows(msgspec.Struct, frozen=True):
    evidence: list[msgspec.Raw]


class _RowName(msgspec.Struct, frozen=True):
    shape: object
    path: str


class _AnySchema(msgspec.Struct, frozen=True):
    schema: int


def save_matrix(path: Path, evidence: Iterable[Evidence], model: FullModel | None = None) -> str:
    """Write the file whole or not at all, over an older one. Returns its digest.

    Raises ValueError when the evidence is none at all, or of more than one machine, and OSError, which names the file.
    """
    text = _encode(list(evidence), model)
    try:
        write_whole(path, text.encode())
    except OSError as error:  # of a full disk it would name none
        raise OSError(error.errno, error.strerror, str(path)) from error
    return _digest_in(text)


def load_matrix(path: Path, *, now: datetime | None = None) -> Matrix:
    """Read one file. `now` None: by this machine's clock.

    Raises MatrixError for one that is truncated, tampered with, of another schema or inconsistent, or that holds what
    no run writes.
    """
    try:
        text = read_regular(path).decode("utf-8")
        schema = msgspec.json.decode(text, type=_AnySchema).schema
    except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise MatrixError(f"{path.name} cannot be read, perhaps it is truncated: {error}") from error
    if schema != SCHEMA:
        raise MatrixError(f"{path.name} has schema {schema}, this version reads {SCHEMA}: qualify again")
    if not text.startswith(_HEAD) or _digest_of(text) != _digest_in(text):
        raise MatrixError(f"{path.name} does not match its digest: it was changed after it was written")
    try:
        file = msgspec.json.decode(text, type=_File)
        entries = evidence_of(file.evidence, file.runs, file.fingerprint)
        _refuse_doubled_names(text)
        for entry in entries:
            refuse_impossible(entry, now=now)
        if file.model is not None:
            refuse_impossible_model(file.model, now=now)
    except (msgspec.DecodeError, ValueError, LookupError, RecursionError) as error:
        raise MatrixError(f"{path.name} holds no evidence: {error}") from error
    found = {(entry.shape, entry.path): entry for entry in entries}
    if len(found) != len(entries):
        raise MatrixError(f"{path.name} says of one shape and path two things")
    return Matrix(MappingProxyType(found), _digest_in(text), model=file.model)


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
        digest.update(path.name.encode() + b"\0")
        try:
            digest.update(read_regular(path) + b"\0")
            matrix = load_matrix(path)
            _refuse_foreign(path, matrix, fingerprint)
        except (MatrixError, OSError) as error:
            problems.append(Rejection(Reject.MATRIX_INVALID, _one_line(path, error)))
            continue
        for key, evidence in matrix.evidence.items():
            older = found.get(key)
            if older is None or _weight(evidence, fingerprint) > _weight(older, fingerprint):
                found[key] = evidence
    return Matrix(MappingProxyType(found), digest.hexdigest() if files else None, tuple(problems))


def _refuse_doubled_names(text: str) -> None:
    """Refuse an object with two equal names, of which msgspec would read the last. Raises ValueError."""
    doubled = _doubled_name(text)
    if doubled is None:
        return
    for row in msgspec.json.decode(text, type=_RawRows).evidence:
        if (name := _doubled_name(bytes(row))) is not None:
            of = msgspec.json.decode(row, type=_RowName)
            raise ValueError(f"{of.path} of {of.shape}: {name!r} stands twice")
    raise ValueError(f"{doubled!r} stands twice in one object")


def _doubled_name(text: str | bytes) -> str | None:
    found: list[str] = []

    def look(pairs: list[tuple[str, object]]) -> None:
        names = Counter(name for name, _ in pairs)
        found.extend(name for name, count in names.items() if count > 1)

    json.loads(text, object_pairs_hook=look, parse_int=str, parse_float=str)
    return found[0] if found else None


def _one_line(path: Path, error: MatrixError | OSError) -> str:
    return str(error) if isinstance(error, MatrixError) else f"{path.name} cannot be read: {error.strerror}"


def _refuse_foreign(path: Path, matrix: Matrix, fingerprint: Fingerprint) -> None:
    for evidence in matrix.evidence.values():
        if evidence.fingerprint.gpu != fingerprint.gpu:
            raise MatrixError(f"{path.name} was measured on {evidence.fingerprint.gpu}, this is {fingerprint.gpu}")


def _weight(evidence: Evidence, fingerprint: Fingerprint) -> tuple[bool, bool, str]:
    is_ours = not evidence.fingerprint.differing_fields(fingerprint) and evidence.suite == SUITE
    return (is_ours, not evidence.is_proven, evidence.at)


def _encode(evidence: list[Evidence], model: FullModel | None) -> str:
    machines = {entry.fingerprint for entry in evidence}
    if len(machines) != 1:
        raise ValueError(f"a file holds evidence of one machine, got {len(machines)}")
    rows, runs = rows_of(evidence)
    machine = msgspec.json.encode(machines.pop().values()).decode()  # in the order of its fields
    head = f'{_HEAD}{_ZEROS}",\n"schema": {SCHEMA},\n"fingerprint": {machine},\n'
    run_lines = ",\n".join(f'"{name}": {_json(runs[name])}' for name in sorted(runs))
    row_lines = ",\n".join(_json(row) for row in rows)
    middle = f'"runs": {{\n{run_lines}\n}},\n"model": {_json(model)},\n'
    text = f'{head}{middle}"evidence": [\n{row_lines}\n]\n}}\n'
    return text.replace(_ZEROS, _digest_of(text), 1)


def _json(value: object) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def _digest_in(text: str) -> str:
    return text[len(_HEAD) : len(_HEAD) + 64]


def _digest_of(text: str) -> str:
    blank = _HEAD + _ZEROS + text[len(_HEAD) + 64 :]
    return hashlib.sha256(blank.encode()).hexdigest()
