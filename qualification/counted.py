"""HBM bytes of timed calls, by hardware counters: Nsight Compute around a process that makes each call once.

A sample, because every kernel is run anew for it: what serves each shape of prefill and decode, and the longest chunks.
Caches are cold, as in timing; what is still in the L2 cache when a kernel ends counts as not written.
"""

import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from kernels.fingerprint import Fingerprint
from kernels.path import KernelPath
from kernels.shape import AttentionShape, Phase
from qualification.choice import choice_of
from qualification.evidence import Evidence
from qualification.matrix import Key, load_matrix, save_matrix

MARKER = "spin_kernel"  # what `torch.cuda._sleep` launches: between two calls
_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_TIMEOUT_S = 240.0


class CounterError(RuntimeError):
    """Nothing was counted; one line says why."""


def sample_of(evidence: Iterable[Evidence]) -> list[Evidence]:
    """What serves each shape by this evidence, all of it valid; of chunks only those with the longest query."""
    by_shape: dict[AttentionShape, list[Evidence]] = {}
    for entry in evidence:
        by_shape.setdefault(entry.shape, []).append(entry)
    chosen = [choice for entries in by_shape.values() if (choice := choice_of(entries)) is not None]
    longest = max((it.tested_query_tokens for it in chosen if it.shape.phase is Phase.EXTEND), default=0)
    return [it for it in chosen if it.shape.phase is not Phase.EXTEND or it.tested_query_tokens == longest]


def count_into(file: Path, catalog: Iterable[KernelPath], fingerprint: Fingerprint, *, ncu: str | None = None) -> int:
    """Count a sample of what is valid here of `file`'s evidence, and write it there. Returns how many calls it was.

    Raises CounterError, and MatrixError for a file that cannot be read.
    """
    matrix = load_matrix(file)
    by_name = {path.name: path for path in catalog}
    sample = sample_of(
        entry
        for entry in matrix.evidence.values()
        if entry.path in by_name and not entry.differing_fields(by_name[entry.path], fingerprint)
    )
    rows = dict(matrix.evidence)
    for key, num_bytes in count_bytes([(entry.shape, entry.path) for entry in sample], ncu=ncu).items():
        rows[key] = replace(rows[key], measured_bytes=num_bytes)
    save_matrix(file, rows.values(), matrix.model)
    return len(sample)


def count_bytes(pairs: Sequence[Key], *, ncu: str | None = None) -> dict[Key, int]:
    """Bytes read from and written to HBM by the timed call of each pair.

    Raises CounterError.
    """
    program = ncu or shutil.which("ncu")
    if program is None:
        raise CounterError("Nsight Compute (ncu) is not installed")
    with tempfile.TemporaryDirectory(prefix="hallmark-count-") as folder:
        asked, log = Path(folder) / "pairs.json", Path(folder) / "counted.csv"
        asked.write_bytes(msgspec.json.encode([[str(shape), path] for shape, path in pairs]))
        # Clocks are left alone: bytes do not depend on them, and other programs do.
        flags = ["--target-processes", "application-only", "--clock-control", "none", "--profile-from-start", "off"]
        flags += [
            "--metrics",
            ",".join(_METRICS),
            "--csv",
            "--page",
            "raw",
            "--print-units",
            "base",
            "--log-file",
            str(log),
        ]
        command = [program, *flags, sys.executable, "-m", "qualification.counted_calls", str(asked)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise CounterError(f"ncu did not end within {_TIMEOUT_S:g} s") from error
        text = log.read_text(errors="replace") if log.exists() else ""
    counts = bytes_by_call(text)
    if done.returncode != 0 or len(counts) != len(pairs):
        raise CounterError(_reason(done.returncode, text + done.stdout + done.stderr))
    return dict(zip(pairs, counts, strict=True))


def bytes_by_call(text: str) -> list[int]:
    """Of ncu's CSV, a row a kernel: the bytes of all kernels between two markers, for each call in turn."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = csv.DictReader(lines)
    counts: list[int] = []
    for row in rows:
        name = row.get("Kernel Name") or ""
        if not name:  # the row of units
            continue
        if MARKER in name:
            counts.append(0)
        elif counts:
            counts[-1] += sum(round(float((row.get(metric) or "0").replace(",", ""))) for metric in _METRICS)
    return counts


def _reason(code: int, said: str) -> str:
    """The line in which ncu, or the program under it, says what is wrong."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    line = (errors or lines or ["it said nothing"])[-1]
    return f"ncu ended with {code}: {line.removeprefix('==ERROR== ')[:300]}"
