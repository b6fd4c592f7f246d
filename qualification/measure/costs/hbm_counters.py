"""HBM bytes of timed calls, by hardware counters: Nsight Compute around a process that makes each call once.

A sample of the evidence is counted, because every kernel runs again for it: the path that serves each shape of prefill
and decode, and the longest chunks. Caches are cold, as in timing; bytes that are still in the L2 cache when a kernel
ends count as not written.

`python -m qualification.measure.costs.hbm_counters PAIRS.json SECONDS` is that process: it makes the timed call of each
(shape, path) between two calls of the CUDA profiler's API, a marker kernel before it, and starts none after so many
seconds. It prints a line before and after each call.
"""

import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Timer

import msgspec
import torch

from kernels.catalog import any_path_named
from kernels.system.child_process import python_command
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyShape, phase_of
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.shape import Phase
from qualification.evidence.choice import choice_of
from qualification.evidence.evidence import Evidence
from qualification.evidence.matrix import Key, load_matrix, save_matrix
from qualification.evidence.shape_text import parse_shape
from qualification.measure.trials.trial import trial_of

MARKER = "spin_kernel"  # what `torch.cuda._sleep` launches: between two calls
STARTED, BEGUN, COUNTED = "hallmark-pid ", "hallmark-call ", "hallmark-counted"  # lines of the process that is counted
_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")  # both in one pass, so that no kernel runs twice
_LIMIT_S = 120.0  # of all calls of a file, the start not counted; the next run goes on
_SILENCE_S = 45.0  # from one line to the next; the start and an input of 4 GB take some 15 s under ncu
_END_S = 30.0  # for ncu to write down what it has, once nothing runs any more

Say = Callable[[str], None]


class CounterError(RuntimeError):
    """Report that nothing was counted; one line says why."""


def sample_of(evidence: Iterable[Evidence]) -> list[Evidence]:
    """Return the entries that serve each shape, from valid evidence; of chunks only those with the longest query."""
    by_shape: dict[AnyShape, list[Evidence]] = {}
    for entry in evidence:
        by_shape.setdefault(entry.shape, []).append(entry)
    chosen = [choice for entries in by_shape.values() if (choice := choice_of(entries)) is not None]
    longest = max((it.tested_query_tokens for it in chosen if phase_of(it.shape) == Phase.EXTEND.value), default=0)
    return [it for it in chosen if phase_of(it.shape) != Phase.EXTEND.value or it.tested_query_tokens == longest]


def count_into(
    file: Path, catalog: Iterable[AnyPath], fingerprint: Fingerprint, *, say: Say = print, ncu: str | None = None
) -> tuple[int, int]:
    """Count a sample of what is valid here of `file`'s evidence, and write it there.

    What was counted before stays. Returns how many calls of the sample are counted now, and how many it has. Raises
    CounterError, and MatrixError for a file that cannot be read.
    """
    matrix = load_matrix(file)
    by_name = {path.name: path for path in catalog}
    sample = sample_of(
        entry
        for entry in matrix.evidence.values()
        if entry.path in by_name and not entry.differing_fields(by_name[entry.path], fingerprint)
    )
    missing = [(entry.shape, entry.path) for entry in sample if entry.measured_bytes is None]
    if not missing:
        return len(sample), len(sample)
    counted = count_bytes(missing, say=say, ncu=ncu)
    rows = dict(matrix.evidence)
    for key, num_bytes in counted.items():
        rows[key] = replace(rows[key], measured_bytes=num_bytes)
    save_matrix(file, rows.values(), matrix.model)
    return len(sample) - len(missing) + len(counted), len(sample)


def count_bytes(
    pairs: Sequence[Key], *, say: Say = print, ncu: str | None = None, silence_s: float = _SILENCE_S
) -> dict[Key, int]:
    """Bytes read from and written to HBM by the timed call of each pair; of the first ones where time runs out.

    Raises CounterError where it is none at all.
    """
    program = ncu or shutil.which("ncu")
    if program is None:
        raise CounterError("Nsight Compute (ncu) is not installed")
    with tempfile.TemporaryDirectory(prefix="hallmark-count-") as folder:
        asked, log = Path(folder) / "pairs.json", Path(folder) / "counted.csv"
        asked.write_bytes(msgspec.json.encode([[str(shape), path] for shape, path in pairs]))
        code, num_counted, said = _run(_command(program, log, asked), say, silence_s)
        text = log.read_text(errors="replace") if log.exists() else ""
    counts = bytes_by_call(text)[:num_counted]
    if not counts or len(counts) < num_counted:
        raise CounterError(_reason(code, text + "\n" + said))
    return dict(zip(pairs, counts, strict=False))


def _command(program: str, log: Path, asked: Path) -> Sequence[str]:
    # Clocks are left alone: bytes do not depend on them, and other programs do.
    flags = ["--target-processes", "application-only", "--clock-control", "none", "--profile-from-start", "off"]
    flags += ["--metrics", ",".join(_METRICS), "--csv", "--page", "raw", "--print-units", "base"]
    flags += ["--log-file", str(log)]
    return python_command(
        "qualification.measure.costs.hbm_counters", str(asked), str(_LIMIT_S), under=[program, *flags]
    )


def _run(command: Sequence[str], say: Say, silence_s: float) -> tuple[int, int, str]:
    """(exit code, calls that were counted, what else was said). A program that falls silent is ended.

    Only the program is, at first: ncu writes down what it has when that has ended.
    """
    pid, num_counted, rest = None, 0, []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", process_group=0
    ) as process:
        assert process.stdout is not None
        try:
            while line := _line_within(process, pid, silence_s):
                if line.startswith(STARTED):
                    pid = int(line.removeprefix(STARTED))
                elif line.startswith(BEGUN):
                    say(f"counting HBM bytes: {line.removeprefix(BEGUN).rstrip()}")
                elif line.startswith(COUNTED):
                    num_counted += 1
                else:
                    rest.append(line)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, num_counted, "".join(rest[-20:])


def _line_within(process: "subprocess.Popen[str]", pid: int | None, silence_s: float) -> str:
    """The next line; empty at the end, which comes when nothing was said for so long."""
    assert process.stdout is not None

    def end(target: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)

    timers = [Timer(silence_s, end, [pid])] if pid is not None else []
    timers.append(Timer(silence_s + _END_S, end, [process.pid]))
    for timer in timers:
        timer.start()
    try:
        return process.stdout.readline()
    finally:
        for timer in timers:
            timer.cancel()


def bytes_by_call(text: str) -> list[int]:
    """Sum, from ncu's CSV (a row a kernel), the bytes of all kernels between two markers, for each call in turn."""
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


def main(file: Path, limit_s: float) -> None:
    """Make each timed call once more. Its errors are not caught: only proven paths are counted."""
    print(f"{STARTED}{os.getpid()}", flush=True)
    device = torch.device("cuda")
    began = time.monotonic()
    pairs = msgspec.json.decode(file.read_bytes(), type=list[tuple[str, str]])
    for number, (text, name) in enumerate(pairs, 1):
        if time.monotonic() - began > limit_s:
            return
        print(f"{BEGUN}{number} of {len(pairs)}, {name}: {text}", flush=True)
        _count(parse_shape(text), name, device)
        print(COUNTED, flush=True)
        torch.cuda.empty_cache()


def _count(shape: AnyShape, name: str, device: torch.device) -> None:
    run = any_path_named(name).run
    assert run is not None
    call, _ = trial_of(shape).timed_call(shape, run, device, seed=0)
    call()  # what is compiled and loaded once
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    cudart.cudaProfilerStart()
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    cudart.cudaProfilerStop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
