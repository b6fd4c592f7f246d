"""Measuring a case: every contender prepared and checked by itself, then all of them timed in rounds."""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.attention.cases import BenchCase
from bench.attention.inputs import Inputs, make_inputs
from bench.attention.measure import errors_of, graphed, kernels_seen, temporary_bytes
from bench.attention.peers import Call, Peer, Prepared, Unavailable
from bench.attention.row import Absence, Outcome, Row
from kernels.reference.compare import Errors, Reference, reference_of
from kernels.system.device_lost import DeviceLost, loss_of
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.path import KernelPath, Tier
from kernels.vocabulary.shape import PLANNED_PHASES, Phase
from qualification.evidence.evidence import Timing
from qualification.measure.costs.ceilings import Ceilings
from qualification.measure.costs.timing import time_together
from qualification.measure.trials.failures import KERNEL_ERRORS

logger = logging.getLogger(__name__)

_MAX_SPREAD = 0.005  # of a median: contenders are often within a few percent
_MAX_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class Contender:
    """A catalog path or a peer. `prepare` raises Unavailable; `is_capturable`: never waits for the device."""

    name: str
    is_peer: bool
    is_capturable: bool
    phases: frozenset[Phase]
    prepare: Callable[[Inputs], Prepared]


@dataclass(frozen=True, slots=True)
class CaseBench:
    """The device and the settings of a run. `ceilings` None: the machine's rates are not known."""

    device: torch.device
    ceilings: Ceilings | None
    seed: int = 0
    budget_s: float | None = None  # of timing, for each contender of a case


@dataclass(frozen=True, slots=True)
class _Measured:
    """The measurements of a contender before it is timed. `call` is what will be timed."""

    contender: Contender
    call: Call
    is_graphed: bool
    kernels: tuple[str, ...]
    temporary_bytes: int | None
    errors: Errors


def contenders_of(paths: Sequence[KernelPath], peers: Sequence[Peer], fingerprint: Fingerprint) -> list[Contender]:
    """Paths first, then peers. A first-tier path never waits for the device, those of SDPA read lengths on the host."""
    ours = [
        Contender(path.name, False, path.tier is Tier.FIRST, path.limits.phases, _prepare_path(path, fingerprint))
        for path in paths
    ]
    return [*ours, *(Contender(peer.name, True, True, frozenset(PLANNED_PHASES), peer.prepare) for peer in peers)]


def measure_all(
    cases: Sequence[BenchCase],
    contenders: Sequence[Contender],
    bench: CaseBench,
    *,
    time_limit_s: float | None,
    say: Callable[[str], None],
) -> Outcome:
    """Measure case by case until all are done, the time is spent (no case starts after that), or the device is lost."""
    gc.collect()  # what is frozen is never collected, and holds its memory on the GPU
    gc.freeze()  # every capture collects garbage first, which takes as long as there are objects of imports to look at
    rows: list[Row] = []
    absences: list[Absence] = []
    started = time.monotonic()
    for done, case in enumerate(cases):
        if time_limit_s is not None and time.monotonic() - started > time_limit_s:
            return Outcome(tuple(rows), tuple(absences), tuple(cases[done:]))
        try:
            found, missing = measure_case(case, contenders, bench)
        except DeviceLost as lost:
            return Outcome(tuple(rows), tuple(absences), tuple(cases[done:]), str(lost))
        rows += found
        absences += missing
        times = ", ".join(f"{row.contender} {row.timing.p50_us:.4g} us" for row in found)
        say(f"[{done + 1}/{len(cases)}] {case}: {times}")
    return Outcome(tuple(rows), tuple(absences))


def measure_case(
    case: BenchCase, contenders: Sequence[Contender], bench: CaseBench
) -> tuple[tuple[Row, ...], tuple[Absence, ...]]:
    """The rows of those that ran, and why the others of the phase did not. Raises DeviceLost."""
    contenders = [one for one in contenders if case.shape.phase in one.phases]
    try:
        inputs = make_inputs(case, bench.device, seed=bench.seed)
        reference = reference_of(inputs.q, inputs.k, inputs.v, inputs.batch, inputs.flags, rows=inputs.rows)
    except RuntimeError as error:
        _check_device("making inputs", bench.device, error)
        return (), tuple(Absence(case, one.name, f"no memory for inputs: {_line(error)}") for one in contenders)
    measured: list[_Measured] = []
    absent: list[Absence] = []
    for contender in contenders:
        try:
            measured.append(_measure(contender, inputs, reference, bench))
        except Unavailable as unavailable:
            absent.append(Absence(case, contender.name, str(unavailable)))
        except KERNEL_ERRORS as error:
            _check_device(contender.name, bench.device, error)
            logger.warning("%s cannot compute %s: %s", contender.name, case, _line(error))
            absent.append(Absence(case, contender.name, _line(error)))
    calls = {m.contender.name: m.call for m in measured}
    timings = time_together(calls, bench.device, max_spread=_MAX_SPREAD, budget_s=bench.budget_s)
    best = _best_peer(measured, timings)
    rows = tuple(_row(case, m, timings[m.contender.name], bench, best) for m in measured)
    return rows, tuple(absent)


def joined(first: Outcome, second: Outcome) -> Outcome:
    """Return the results of two runs as one."""
    return Outcome(
        (*first.rows, *second.rows),
        (*first.absences, *second.absences),
        (*first.unmeasured, *second.unmeasured),
        first.lost or second.lost,
    )


def _prepare_path(path: KernelPath, fingerprint: Fingerprint) -> Callable[[Inputs], Prepared]:
    def prepare(inputs: Inputs) -> Prepared:
        rejections = path.rejects(inputs.case.shape, fingerprint)
        run = path.run
        if rejections or run is None:
            raise Unavailable("; ".join(f"{r.code.value}: {r.detail}" for r in rejections) or "cannot be imported here")
        if inputs.case.shape.phase is Phase.DECODE and max(inputs.case.queries) > path.max_queries:
            raise Unavailable(f"takes at most {path.max_queries} query tokens a sequence of decode")
        out = torch.empty_like(inputs.q)

        def call() -> torch.Tensor:
            run(inputs.q, inputs.k, inputs.v, inputs.batch, inputs.flags, out)
            return out

        return Prepared(call, lambda output: output, is_preallocated=True)

    return prepare


def _measure(contender: Contender, inputs: Inputs, reference: Reference, bench: CaseBench) -> _Measured:
    prepared = contender.prepare(inputs)
    prepared.call()  # compiles
    memory = temporary_bytes(prepared, bench.device)
    kernels = kernels_seen(prepared.call, bench.device)
    is_decode = inputs.case.shape.phase is Phase.DECODE
    is_graphed = bench.device.type == "cuda" and is_decode and contender.is_capturable
    call = graphed(prepared, bench.device) if is_graphed else prepared.call
    errors = errors_of(prepared, call, reference, inputs.rows)
    return _Measured(contender, call, is_graphed, kernels, memory, errors)


def _best_peer(measured: Sequence[_Measured], timings: dict[str, Timing]) -> tuple[str, float] | None:
    """(name, us) of the fastest peer that computes what was asked for."""
    peers = [m.contender.name for m in measured if m.contender.is_peer and m.errors.is_within_rule]
    return min(((name, timings[name].p50_us) for name in peers), key=lambda peer: peer[1], default=None)


def _row(case: BenchCase, m: _Measured, timing: Timing, bench: CaseBench, best: tuple[str, float] | None) -> Row:
    seconds = timing.p50_us * 1e-6
    floor_us = None if bench.ceilings is None else bench.ceilings.floor_us(case.flops, case.num_bytes)
    return Row(
        case=case,
        contender=m.contender.name,
        is_peer=m.contender.is_peer,
        is_graphed=m.is_graphed,
        kernels=m.kernels,
        timing=timing,
        tflops=case.flops / seconds / 1e12,
        bytes_per_second=case.num_bytes / seconds,
        floor_us=floor_us,
        temporary_bytes=m.temporary_bytes,
        max_error=m.errors.max_error,
        error_share=m.errors.worst,
        bias_share=abs(m.errors.bias) / m.errors.bias_limit,
        num_nonfinite=m.errors.num_nonfinite,
        best_peer=None if best is None else best[0],
        ratio=None if best is None else best[1] / timing.p50_us,
    )


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON]


def _check_device(name: str, device: torch.device, error: BaseException) -> None:
    """Raise DeviceLost where a failure of `name` has broken the device."""
    if (loss := loss_of(device)) is not None:
        raise DeviceLost(f"{name} broke the device: {_line(error)}") from loss
