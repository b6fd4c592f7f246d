"""Rows of `hallmark bench steps`, and the file that holds them. Imports no torch."""

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

import msgspec

SCHEMA = 1


class Sweep(Enum):
    BATCH = "batch"
    CONTEXT = "context"


class Samples(msgspec.Struct, frozen=True):
    """Milliseconds, in the order they were taken."""

    p50: float
    spread: float  # half the 95% confidence interval of the median, as a share of it
    all: list[float]

    @property
    def n(self) -> int:
        return len(self.all)

    @property
    def best(self) -> float:
        """Return the smallest sample: whatever else the machine does only adds to a time."""
        return min(self.all)


class Inside(msgspec.Struct, frozen=True):
    """The time of each part of decode steps, or of steps under load."""

    parts_ms: dict[str, float]  # Part -> median of a step, exclusive of the parts inside of it
    host: Samples  # processor time of the stepping thread, but for waiting and for what is the device's work
    busy: float | None  # share of the time that the device was at a step, not between two


class PrefillRow(msgspec.Struct, frozen=True):
    """One prompt alone, from its submission to its first token."""

    tokens: int
    steps: int  # that its chunks take
    time: Samples
    cpu: Samples  # processor time of all threads
    floor_ms: float | None  # no machine of these rates is faster; None where the rates are not known
    paths: list[str]


class DecodeRow(msgspec.Struct, frozen=True):
    """Steps of `batch` sequences, each with about `context` tokens, from the end of one to the end of the next."""

    sweep: Sweep
    batch: int
    context: int
    mean_context: float  # as it was while measured
    time: Samples
    cpu: Samples
    floor_ms: float | None
    paths: list[str]
    inside: Inside

    @property
    def x(self) -> int:
        return self.batch if self.sweep is Sweep.BATCH else self.context


class LoadRow(msgspec.Struct, frozen=True):
    """Requests that come as others end, prompts and decoding mixed."""

    streams: int
    prompt: int
    output: int
    tokens_per_s: float
    time: Samples  # of a step
    inside: Inside


class StepsFile(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    command: str
    at: str  # ISO 8601, UTC
    commit: str | None
    machine: dict[str, str | int | float | None]
    model: dict[str, str | int | float | None]
    ceilings: dict[str, float] | None  # rates that the floors are made of
    skipped: list[str]
    prefill: list[PrefillRow]
    decode: list[DecodeRow]
    load: list[LoadRow]

    def cost_of(self, row: PrefillRow | DecodeRow) -> float:
        """Return the cost by which growth is judged: time on a GPU; processor time on a CPU, which others use too."""
        return (row.cpu if self.machine["device"] == "cpu" else row.time).best

    def decodes(self, sweep: Sweep) -> list[DecodeRow]:
        return sorted((row for row in self.decode if row.sweep is sweep), key=lambda row: row.x)


def save(path: Path, file: StepsFile, derived: Mapping[str, object]) -> None:
    """Write JSON, a row a line, with what was `derived` from the rows."""
    head = {name: getattr(file, name) for name in file.__struct_fields__ if name not in _LISTS}
    parts = [f" {_json(name)}: {_json(value)}" for name, value in {**head, "derived": derived}.items()]
    parts += [f" {_json(name)}: {_lines(getattr(file, name))}" for name in _LISTS]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def load(path: Path) -> StepsFile:
    """Read a file of steps. Raises ValueError for any other file."""
    return msgspec.json.decode(path.read_bytes(), type=StepsFile)


_LISTS = ("prefill", "decode", "load")


def _lines(rows: Sequence[object]) -> str:
    return "[\n" + ",\n".join(f"  {_json(row)}" for row in rows) + "\n ]" if rows else "[]"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
