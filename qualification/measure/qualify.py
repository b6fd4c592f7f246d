"""A qualification run: every shape, every path that does not reject it, checked and timed into evidence."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import torch

from kernels.collective.inboxes import PeerMemoryError
from kernels.driver.seen import Seen
from kernels.experts.formats import FewBitFormat
from kernels.experts.shape import ExpertsShape
from kernels.linear.shape import FP8_FORMATS, PLAIN, LinearShape
from kernels.system.child_process import python_command
from kernels.system.device import torch_dtype
from kernels.system.device_lost import DeviceLost, loss_of
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.operators import AnyShape, Operator, operator_of
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.path_order import is_chosen_by_time
from kernels.vocabulary.shape import AttentionShape, Dtype
from kernels.vocabulary.value_shape import ValueShape, any_flops, any_hbm_bytes
from qualification.compiling.processes import compiling_ahead
from qualification.evidence.evidence import Check, Evidence, Invariance, Timing
from qualification.measure.checks.references import References, Shelf
from qualification.measure.compiling.compile_worker import calls_of
from qualification.measure.costs.ceilings import Ceilings, ceilings_now
from qualification.measure.costs.profile import calls_seen, temporary_bytes
from qualification.measure.costs.rivals import Rivals
from qualification.measure.costs.timing import Judged, default_budget_s, time_call, time_until_believed
from qualification.measure.faults.attention_faults import narrow_passed_wrongly
from qualification.measure.faults.cache_faults import cache_faults_passed_wrongly
from qualification.measure.faults.indexed_faults import indexed_faults_passed_wrongly
from qualification.measure.faults.latent_faults import latent_faults_passed_wrongly
from qualification.measure.faults.order_faults import orders_passed_wrongly
from qualification.measure.ranks.rank_group import on_ranks
from qualification.measure.trials.failures import KERNEL_ERRORS, QualificationAborted
from qualification.measure.trials.linear_trial import passed_wrongly_in_few_bits
from qualification.measure.trials.trial import TRIALS, Run, trial_of

logger = logging.getLogger(__name__)

_TIME_THAT_CHOOSES_NOTHING = 0.2  # of the budget: it is read by people
_KEPT_BYTES_CPU = 2**28  # of references
_MAX_DETAIL = 300  # characters of an error kept in evidence

Progress = Callable[[int, int, str], None]  # done, total, what is next
Pair = tuple[AnyShape, AnyPath]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Bench:
    """The device of a run, and what stays the same all through it."""

    fingerprint: Fingerprint
    device: torch.device
    seed: int = 0
    commit: str | None = None
    timing_budget_s: float | None = None  # for one pair; None: as `time_call` has it for the device
    command: str | None = None  # what a person typed
    compile_jobs: int = 1  # processes that compile before anything is measured; 1: nothing is compiled ahead
    may_profile: bool = True  # False in a server on a GPU: `kernels/driver/driver_record.py` says why
    checks_orders: bool = True  # whether the bits of paths that claim an order are compared
    rates: Callable[[torch.device, torch.dtype, int], Ceilings | None] = ceilings_now  # that times are judged by
    timer: Callable[..., Timing] = time_call
    at: str = field(default_factory=now)  # when the run began


@dataclass(frozen=True, slots=True)
class _Measured:
    """The measurements of a path besides its errors."""

    timing: Timing
    timed_sequences: int
    floor_us: float | None
    seen: Seen | None
    temporary_bytes: int | None


def qualify(
    pairs: Sequence[Pair],
    bench: Bench,
    *,
    progress: Progress,
    on_evidence: Callable[[Evidence], None],
    check_checker: Callable[..., tuple[object, ...]] | None = None,
) -> None:
    """Give `on_evidence` the evidence of each pair as soon as it is there, failures included.

    Pairs that reject must not be among them. Raises QualificationAborted before anything is measured when the checker
    fails its own trial, and DeviceLost, its evidence given, when a path leaves the device unusable. `check_checker`: in
    place of the trial of each operator.
    """
    if not pairs:
        return
    with on_ranks(pairs, bench.device) as runnable:
        _qualify(runnable, bench, progress, on_evidence, check_checker)


def _abort_for(passed: tuple[object, ...]) -> None:
    if passed:
        raise QualificationAborted(f"the checker failed its own trial, so it proves nothing: {passed}")


def _qualify(
    pairs: Sequence[Pair],
    bench: Bench,
    progress: Progress,
    on_evidence: Callable[[Evidence], None],
    check_checker: Callable[..., tuple[object, ...]] | None,
) -> None:
    progress(0, len(pairs), "wrong kernels, which must be refused")
    dtypes: dict[Operator, set[Dtype]] = {}
    for shape, _ in pairs:
        dtypes.setdefault(operator_of(shape), set()).add(shape.dtype)
    calls = calls_of(pairs) if bench.compile_jobs > 1 else []
    workers = python_command("qualification.measure.compiling.compile_worker", str(bench.seed), bench.device.type)
    with compiling_ahead(calls, workers, num_processes=bench.compile_jobs) as wait:
        for operator, of_operator in dtypes.items():
            check = check_checker or TRIALS[operator].passed_wrongly
            _abort_for(check(frozenset(of_operator), bench.device, seed=bench.seed))
        formats = frozenset(shape.weight_format for shape, _ in pairs if isinstance(shape, LinearShape))
        if check_checker is None and formats - {PLAIN}:
            _abort_for(passed_wrongly_in_few_bits(formats, bench.device, seed=bench.seed))
        cached = frozenset(it.dtype for it, _ in pairs if isinstance(it, AttentionShape) and it.kv_dtype is FP8)
        if check_checker is None and cached:
            _abort_for(cache_faults_passed_wrongly(cached, bench.device, seed=bench.seed))
        values = [(it.values, it.dtype) for it, _ in pairs if isinstance(it, ValueShape)]
        indexed = frozenset(of for it, of in values if it.indexer is not None)
        if check_checker is None and indexed:
            _abort_for(indexed_faults_passed_wrongly(indexed, bench.device, seed=bench.seed))
        latent, narrow = (frozenset(of for it, of in values if it.is_latent is wanted) for wanted in (True, False))
        if check_checker is None and latent:
            _abort_for(latent_faults_passed_wrongly(latent, bench.device, seed=bench.seed))
        if check_checker is None and narrow:
            _abort_for(narrow_passed_wrongly(narrow, bench.device, seed=bench.seed))
        if bench.checks_orders and check_checker is None:
            _try_check_of_orders(pairs, bench)
        wait(lambda what: progress(0, len(pairs), what))
    last = {shape: index for index, (shape, _) in enumerate(pairs)}
    shelf, references = Shelf(_most_kept_bytes(bench.device)), References()
    rivals = Rivals(
        bench.fingerprint.device,
        bench.device,
        lambda shape, run: trial_of(shape).timed_call(shape, run, bench.device, seed=bench.seed)[0],
        bench.timing_budget_s,
    )
    for done, (shape, path) in enumerate(pairs):
        progress(done, len(pairs), f"{path.name}: {shape}")
        latest = pairs[done - 1][0] if done else None
        if shape != latest:
            if latest is not None and last[latest] > done:
                shelf.put(latest, references)
            references = shelf.take(shape)
        try:
            found = qualify_path(shape, path, bench, references)
            on_evidence(found)
            _time_rivals(rivals, path, found, on_evidence)
        except PeerMemoryError as error:  # how this machine is set up is no property of the path
            logger.warning("%s is not measured for %s, GPUs share no memory here: %s", path.name, shape, error)
        except DeviceLost as lost:
            on_evidence(_evidence(shape, path, bench, failure=f"DeviceLost: {lost}"[:_MAX_DETAIL]))
            raise
    progress(len(pairs), len(pairs), "done")


def _try_check_of_orders(pairs: Sequence[Pair], bench: Bench) -> None:
    """Have the check of orders refuse paths whose bits depend on the batch. Raises QualificationAborted."""
    dtypes: dict[Operator, set[Dtype]] = {}
    for shape, path in pairs:
        if path.order is not None:
            dtypes.setdefault(operator_of(shape), set()).add(shape.dtype)
    for operator, of_operator in dtypes.items():
        passed = orders_passed_wrongly(operator, frozenset(of_operator), bench.device, seed=bench.seed)
        if passed:
            raise QualificationAborted(f"the check of orders failed its own trial, so it proves nothing: {passed}")


def _time_rivals(rivals: Rivals, path: AnyPath, found: Evidence, on_evidence: Callable[[Evidence], None]) -> None:
    try:
        for again in rivals.timed_again(path, found):
            on_evidence(again)
    except KERNEL_ERRORS as error:  # of paths that have just been proven: memory, most likely
        logger.warning("%s cannot be timed in turns with its rivals, so its first time stays: %s", path.name, error)


def _most_kept_bytes(device: torch.device) -> int:
    """Return the memory for references: a fifth of the free memory of an H200 holds those of twelve models."""
    return torch.cuda.mem_get_info(device)[0] // 5 if device.type == "cuda" else _KEPT_BYTES_CPU


def qualify_path(shape: AnyShape, path: AnyPath, bench: Bench, references: References | None = None) -> Evidence:
    """Evidence of one pair. A path that raises gives evidence of its failure. Raises DeviceLost, PeerMemoryError.

    `references` are of this shape, kept from one path to the next.
    """
    if path.run is None:
        raise ValueError(f"{path.name} cannot be imported here, so it rejects every shape")
    try:
        given = references or References()
        checks = trial_of(shape).check(shape, path.run, bench.device, seed=bench.seed, references=given)
        invariance = _invariance(shape, path, path.run, bench, checks)
        measured = _measure(shape, path, path.run, bench)
    except PeerMemoryError:
        raise
    except KERNEL_ERRORS as error:
        if (loss := loss_of(bench.device)) is not None:
            message = f"{path.name} broke the device on {shape}: {error}"
            raise DeviceLost(message, [(path.name, str(shape))]) from loss
        failure = f"{type(error).__name__}: {error}"[:_MAX_DETAIL]
        logger.warning("%s cannot serve %s: %s", path.name, shape, failure)
        return _evidence(shape, path, bench, failure=failure)
    return _evidence(shape, path, bench, checks=checks, measured=measured, invariance=invariance)


def _invariance(shape: AnyShape, path: AnyPath, run: Run, bench: Bench, checks: tuple[Check, ...]) -> Invariance | None:
    """Check the order that the path claims; None where it claims none, none is asked for, or its numbers are wrong."""
    if path.order is None or not bench.checks_orders or not all(check.is_passed for check in checks):
        return None
    return trial_of(shape).check_order(shape, run, bench.device, seed=bench.seed, order=path.order)


def _measure(shape: AnyShape, path: AnyPath, run: Run, bench: Bench) -> _Measured:
    """One call on the longest sequences: its time, its memory, and what it and others launch.

    The others are on short sequences, and on one alone, which another kernel may serve than several.
    """
    trial = trial_of(shape)
    call, num_seqs = trial.timed_call(shape, run, bench.device, seed=bench.seed)
    attempt = partial(_time, call, shape, num_seqs, bench)
    judged = time_until_believed(attempt) if is_chosen_by_time(path.name) else attempt(_TIME_THAT_CHOOSES_NOTHING)
    seen = None
    if bench.may_profile and bench.fingerprint.device is not Device.INTERPRETER:  # whose kernels are Python
        others = trial.profiled_calls(shape, run, bench.device, seed=bench.seed)
        seen = calls_seen([*others, call], bench.device)
    return _Measured(
        timing=judged.timing,
        timed_sequences=num_seqs,
        floor_us=judged.floor_us,
        seen=seen,
        temporary_bytes=temporary_bytes(call, bench.device),
    )


def _time(call: Callable[[], None], shape: AnyShape, num_seqs: int, bench: Bench, factor: float) -> Judged:
    """Time in `factor` times the budget, with the machine's rates before and after: clocks and loads change."""
    longest = trial_of(shape).tested(shape, is_cpu=bench.device.type == "cpu")
    num_flops = num_seqs * any_flops(shape, *longest) // _times_16_bits(shape)
    num_bytes = num_seqs * any_hbm_bytes(shape, *longest)[0]
    budget_s = factor * (bench.timing_budget_s or default_budget_s(bench.device))
    dtype = torch_dtype(shape.dtype)
    before = bench.rates(bench.device, dtype, num_bytes)
    timing = bench.timer(call, bench.device, budget_s=budget_s, max_samples=400 * factor)
    after = bench.rates(bench.device, dtype, num_bytes)
    if before is None or after is None:
        return Judged(timing, None)
    return Judged(timing, float(f"{before.or_higher(after).floor_us(num_flops, num_bytes):.4g}"))


def _times_16_bits(shape: AnyShape) -> int:
    """At how many times the rate of 16 bits, which `Ceilings` has, matrix units may multiply it: 2 in 8 bits."""
    if isinstance(shape, LinearShape):
        return 2 if shape.weight_format in FP8_FORMATS else 1
    if isinstance(shape, ExpertsShape) and isinstance(shape.format, FewBitFormat):
        return 2 if shape.format.of_weights in FP8_FORMATS else 1
    return 1


def _evidence(
    shape: AnyShape,
    path: AnyPath,
    bench: Bench,
    *,
    checks: tuple[Check, ...] = (),
    measured: _Measured | None = None,
    invariance: Invariance | None = None,
    failure: str | None = None,
) -> Evidence:
    queries, keys = trial_of(shape).tested(shape, is_cpu=bench.device.type == "cpu")
    seen = None if measured is None else measured.seen
    return Evidence(
        shape=shape,
        path=path.name,
        source_digest=path.source_digest,
        fingerprint=bench.fingerprint,
        checks=checks,
        tested_query_tokens=queries,
        tested_context_tokens=keys,
        at=bench.at,
        timing=None if measured is None else measured.timing,
        timed_sequences=1 if measured is None else measured.timed_sequences,
        floor_us=None if measured is None else measured.floor_us,
        kernels=None if seen is None else seen.always,
        kernels_sometimes=() if seen is None else seen.sometimes,
        temporary_bytes=None if measured is None else measured.temporary_bytes,
        failure=failure,
        commit=bench.commit,
        command=bench.command,
        invariance=invariance,
    )
