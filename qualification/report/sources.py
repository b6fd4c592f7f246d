"""The sources of a report: evidence, results of benches and a live server. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx2
import msgspec

from kernels.vocabulary.fingerprint import Fingerprint
from qualification.canary.client import CanaryError, Candidate
from qualification.evidence.full_model import FullModel
from qualification.evidence.matrix import MatrixError, load_matrix, matrix_files
from qualification.load.discovery import client_of
from qualification.load.served import ServedSide, ServeFile
from qualification.report.views import ModelView

_TIMEOUT_S = 10.0
Kind = TypeVar("Kind")


class ReportError(ValueError):
    """The report cannot be made; one line."""


class PeerRow(msgspec.Struct, frozen=True):
    """The fields that a report reads of a row of `hallmark bench attention`."""

    phase: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    lengths: str
    window: int | None
    softcap: float | None
    sinks: bool
    longest_query: int
    longest_context: int
    sequences: int
    contender: str
    is_peer: bool
    is_right: bool
    tflops: float
    bytes_per_second: float
    best_peer: str | None
    ratio_to_best_peer: float | None

    @property
    def is_plain(self) -> bool:
        return self.lengths == "fixed" and self.window is None and self.softcap is None and not self.sinks

    @property
    def rate(self) -> float:
        """TFLOP/s, in decode TB/s."""
        return self.bytes_per_second / 1e12 if self.phase == "decode" else self.tflops


class BenchFile(msgspec.Struct, frozen=True):
    command: str
    at: str
    rows: list[PeerRow]


@dataclass(frozen=True, slots=True)
class Live:
    """A running server, by its own endpoints."""

    url: str
    attention: dict[str, object]
    counters: dict[str, float]  # what must not grow, since its start


@dataclass(frozen=True, slots=True)
class Sources:
    models: tuple[ModelView, ...]
    fingerprint: Fingerprint
    digests: tuple[tuple[str, str], ...]  # file and digest
    refused: tuple[str, ...]  # files that were not read, with the reason
    gains: tuple[FullModel, ...]
    benches: tuple[BenchFile, ...]
    served: tuple[ServedSide, ...]
    live: Live | None


def gather(place: Path, benches: Sequence[Path], served: Sequence[Path], url: str | None) -> Sources:
    """Read all sources. Raises ReportError: no readable evidence, a file is no result, or no server answers."""
    models, digests, refused, gains, machines = [], [], [], [], set()
    try:
        files = matrix_files(place)
    except MatrixError as error:
        raise ReportError(str(error)) from error
    for path in files:
        try:
            matrix = load_matrix(path)
        except MatrixError as error:
            refused.append(str(error))
            continue
        models.append(ModelView(path.stem, tuple(matrix.evidence.values())))
        digests.append((path.name, matrix.digest or ""))
        gains += [] if matrix.model is None else [matrix.model]
        machines |= {entry.fingerprint for entry in matrix.evidence.values()}
    if not machines and refused:
        raise ReportError(f"{place}: no file of evidence can be read: {'; '.join(refused)}")
    if len(machines) != 1:
        found = ", ".join(sorted(str(machine.gpu) for machine in machines)) or "none"
        folders = sorted({str(path.parent) for path in files})
        advice = f"; name one of {', '.join(folders)}" if len(folders) > 1 else ""
        raise ReportError(
            f"a report is of one machine and one stack, {place} holds evidence of {len(machines)}: {found}{advice}"
        )
    sides = tuple(side for path in served for side in _decode(path, ServeFile).sides)
    if len(sides) == 1:
        raise ReportError(f"--served has {sides[0].name} alone, and no server to show beside it")
    return Sources(
        tuple(models),
        machines.pop(),
        tuple(digests),
        tuple(refused),
        tuple(gains),
        tuple(_decode(path, BenchFile) for path in benches),
        sides,
        None if url is None else ask(url),
    )


def ask(url: str) -> Live:
    """Ask a live server for its plan. Raises ReportError."""
    try:
        with client_of(url, timeout_s=_TIMEOUT_S) as client:
            server = Candidate(client, client)
            attention, counters = server.attention(), server.counters()
    except (CanaryError, httpx2.InvalidURL) as error:
        raise ReportError(f"{url} does not report its plan: {error}") from error
    return Live(url, attention, counters)


def _decode(path: Path, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ReportError(f"{path} cannot be used: {error}") from error
