"""A qualification run: every shape, every path that does not reject it, checked and timed into evidence."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from kernels.fingerprint import Fingerprint
from kernels.launch import TritonError
from kernels.path import KernelPath, RunAttention
from kernels.shape import AttentionShape, Phase, flops, hbm_bytes_tiled
from qualification.checks import check_path
from qualification.evidence import Check, Evidence, Timing
from qualification.inputs import cases, long_case, longest_lengths
from qualification.timing import time_call
from qualification.wrong import passed_wrongly

logger = logging.getLogger(__name__)

# What a kernel raises that cannot compute, or cannot be compiled or launched; it is evidence, not our own failure.
_KERNEL_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, ArithmeticError, TritonError)
_DECODE_SEQUENCES = {"cpu": 2, "cuda": 8}  # in the timed batch
_MAX_DETAIL = 300  # characters of an error kept in evidence

Progress = Callable[[int, int, str], None]  # done, total, what is next
Pair = tuple[AttentionShape, KernelPath]


class QualificationAborted(RuntimeError):
    """The run can prove nothing: its checker passes a wrong kernel (or refuses a right one)."""


class DeviceLost(RuntimeError):
    """A path broke the device's context: nothing more can run in this process."""

    def __init__(self, path: str, shape: AttentionShape, cause: BaseException) -> None:
        super().__init__(f"{path} broke the device on {shape}: {cause}")
        self.path = path
        self.shape = shape


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a run takes place, and what stays the same all through it."""

    fingerprint: Fingerprint
    device: torch.device
    seed: int = 0
    commit: str | None = None
    timing_budget_s: float | None = None  # for one pair; None: as `time_call` has it for the device


def qualify(
    pairs: Sequence[Pair],
    bench: Bench,
    *,
    progress: Progress,
    on_evidence: Callable[[Evidence], None],
    check_checker: Callable[..., tuple[object, ...]] = passed_wrongly,
) -> None:
    """Give `on_evidence` the evidence of each pair as soon as it is there, failures included.

    Pairs that reject must not be among them. Raises QualificationAborted before anything is measured when the checker
    fails its own trial, and DeviceLost, its evidence given, when a path leaves the device unusable.
    """
    if not pairs:
        return
    progress(0, len(pairs), "wrong kernels, which must be refused")
    dtypes = frozenset(shape.dtype for shape, _ in pairs)
    passed = check_checker(dtypes, bench.device, seed=bench.seed)
    if passed:
        raise QualificationAborted(f"the checker failed its own trial, so it proves nothing: {passed}")
    for done, (shape, path) in enumerate(pairs):
        progress(done, len(pairs), f"{path.name}: {shape}")
        try:
            on_evidence(qualify_path(shape, path, bench))
        except DeviceLost as lost:
            on_evidence(_evidence(shape, path, bench, failure=f"DeviceLost: {lost}"[:_MAX_DETAIL]))
            raise
    progress(len(pairs), len(pairs), "done")


def qualify_path(shape: AttentionShape, path: KernelPath, bench: Bench) -> Evidence:
    """Evidence of one pair. A path that raises gives evidence of its failure. Raises DeviceLost."""
    if path.run is None:
        raise ValueError(f"{path.name} cannot be imported here, so it rejects every shape")
    try:
        checks = check_path(path.run, cases(shape, bench.device, seed=bench.seed))
        timing, tflops, bandwidth = _measure(shape, path.run, bench)
    except _KERNEL_ERRORS as error:
        _release(path, shape, bench.device, error)
        failure = f"{type(error).__name__}: {error}"[:_MAX_DETAIL]
        logger.warning("%s cannot serve %s: %s", path.name, shape, failure)
        return _evidence(shape, path, bench, failure=failure)
    return _evidence(shape, path, bench, checks=checks, timing=timing, tflops=tflops, bytes_per_second=bandwidth)


def _measure(shape: AttentionShape, run: RunAttention, bench: Bench) -> tuple[Timing, float, float]:
    """(time of one call on the longest sequences, FLOP/s in 1e12, bytes/s by the IO model)."""
    num_seqs = _DECODE_SEQUENCES[bench.device.type] if shape.phase is Phase.DECODE else 1
    case = long_case(shape, bench.device, seed=bench.seed, num_seqs=num_seqs)
    out = torch.empty_like(case.q)
    timing = time_call(
        lambda: run(case.q, case.k, case.v, case.batch, case.flags, out), bench.device, budget_s=bench.timing_budget_s
    )
    longest = longest_lengths(shape, is_cpu=bench.device.type == "cpu")
    seconds = timing.p50_us * 1e-6 / num_seqs
    tflops = flops(shape, longest.queries, longest.keys) / seconds / 1e12
    bandwidth = hbm_bytes_tiled(shape, longest.queries, longest.keys) / seconds
    return timing, float(f"{tflops:.4g}"), float(f"{bandwidth:.4g}")  # more digits would only make diffs unreadable


def _evidence(
    shape: AttentionShape,
    path: KernelPath,
    bench: Bench,
    *,
    checks: tuple[Check, ...] = (),
    timing: Timing | None = None,
    tflops: float | None = None,
    bytes_per_second: float | None = None,
    failure: str | None = None,
) -> Evidence:
    longest = longest_lengths(shape, is_cpu=bench.device.type == "cpu")
    return Evidence(
        shape=shape,
        path=path.name,
        source_digest=path.source_digest,
        fingerprint=bench.fingerprint,
        checks=checks,
        tested_query_tokens=longest.queries,
        tested_context_tokens=longest.keys,
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        timing=timing,
        tflops=tflops,
        bytes_per_second=bytes_per_second,
        failure=failure,
        commit=bench.commit,
    )


def _release(path: KernelPath, shape: AttentionShape, device: torch.device, error: BaseException) -> None:
    """After a failure: give memory back, and learn whether the device still works."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as lost:
        raise DeviceLost(path.name, shape, error) from lost
