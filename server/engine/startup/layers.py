"""The check of the layers at a start: made, or taken from what an earlier start on this machine has proven."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from kernels.catalog import ALL_PATHS
from kernels.system.device import torch_dtype
from kernels.system.whole_file import write_whole
from qualification.decision.decision import Policy
from qualification.measure.start_plan import own_file
from qualification.model.config import num_parameters
from qualification.model.draft_head import draft_head_of, without_draft_head
from qualification.model.forward.checkpoint import CheckpointError
from qualification.model.forward.head import HeadReference
from qualification.model.forward.model import ForwardReference
from qualification.model.forward.tower import TowerReference
from server.engine.execution.followed_steps import FollowedSteps
from server.engine.execution.runner import ModelRunner
from server.engine.proof.layer_check import LayerCheck, LayersChecked
from server.engine.proof.layer_steps import CheckedStep, LayerSteps, TooSmall
from server.engine.proof.tower_check import TowerCheck, checked_grid
from server.engine.startup.plan import Progress, Unservable, cache_folder
from server.engine.startup.subject import Subject
from server.errors import LayersFailed
from server.model.load.digests import known_weights_digest
from server.model.vision.tower import Pixels, Tower
from server.protocol.messages import LayersReport, LayersStatus, PlanRow
from server.settings import LoadFormat, Settings

logger = logging.getLogger(__name__)

_CODE = ("kernels", "qualification/model", "server/model", "server/engine")  # what computes a layer, and its check
_MOST_KEPT = 64  # results in the file
_FEW_PARAMETERS = 2**27  # a model of fewer: threads of a CPU would wait for each other longer than they compute


def check_layers(settings: Settings, subject: Subject, runner: ModelRunner, progress: Progress) -> LayersReport:
    """Hold the layers to the plain forward pass, unless an earlier start has with the same of everything.

    Raises BatchError, NoPathError and DeviceLost where a step cannot run.
    """
    reason = _why_not(settings)
    if reason is not None:
        return LayersReport(LayersStatus.NOT_CHECKED, reason)
    file = own_file(cache_folder(settings), "layers", subject.fingerprint)
    key = _key(subject, runner)
    known = None if key is None else _read(file).get(key)
    if known is not None:
        return msgspec.structs.replace(known, is_cached=True)
    progress("checking", "layers against the plain forward pass")
    report = _checked(subject, runner, progress)
    if key is not None and report.status is LayersStatus.PROVEN:
        _keep(file, key, report)
    return report


def refuse_failed(report: LayersReport, policy: Policy, rows: Callable[[], list[PlanRow]]) -> None:
    """Log a failed check, and end or hold back the start as the policy says. `rows` gives the plan.

    Raises LayersFailed under REFUSE, and Unservable under QUALIFY.
    """
    if report.status is LayersStatus.NOT_CHECKED:
        logger.warning("layers: not checked: %s", report.detail)
    if report.status is not LayersStatus.FAILED:
        return
    message = f"layers: failed: {report.detail}"
    advice = "the served model does not compute what its files say"
    if policy is Policy.REFUSE:
        raise LayersFailed(f"{message}; {advice}")
    if policy is Policy.QUALIFY:
        raise Unservable(f"{message}; {advice}", rows())
    logger.error("%s; served nevertheless, by --on-unproven degrade", message)


def _why_not(settings: Settings) -> str | None:
    if not settings.layer_check:
        return "--no-layer-check"
    if settings.load_format is LoadFormat.DUMMY:
        return "dummy weights have no files to be held to"
    return None


def _checked(subject: Subject, runner: ModelRunner, progress: Progress) -> LayersReport:
    limits = subject.limits
    try:
        steps = _steps(subject, runner)
        reference = ForwardReference(
            subject.folder,
            without_draft_head(subject.model),
            torch_dtype(limits.dtype),
            subject.device,
            context=limits.max_model_len,
            ranks=subject.shard.world,
        )
    except (TooSmall, CheckpointError) as error:
        return LayersReport(LayersStatus.NOT_CHECKED, str(error))
    check = LayerCheck(
        runner,
        reference,
        None if subject.pools else runner.worker.logits,
        kv_dtype=torch_dtype(limits.kv_dtype),
        progress=lambda done, total: progress("checking", f"{done} of {total} layers"),
    )
    try:
        with _threads_for(subject):
            found = check.run(steps)
            if runner.worker.head is not None:
                found = _with_head(found, subject, runner, reference, steps)
            if runner.worker.tower is not None and subject.pixels is not None:
                found = _with_tower(found, runner.worker.tower, subject.pixels, reference)
    except CheckpointError as error:
        return LayersReport(LayersStatus.FAILED, str(error), at=time.time())
    except torch.OutOfMemoryError as error:
        return LayersReport(LayersStatus.NOT_CHECKED, f"no memory for it: {error}"[:200])
    finally:
        reference.close()
        if subject.device.type == "cuda":
            torch.cuda.empty_cache()
    logger.info("layers: checked in %.1f s, the largest share of a limit: %s", found.seconds, found.largest)
    return _report(found)


def _with_tower(found: LayersChecked, tower: Tower, pixels: Pixels, reference: ForwardReference) -> LayersChecked:
    """Return the result with that of this rank's tower. Raises CheckpointError."""
    grid, precision = checked_grid(tower), reference.precision
    plain = TowerReference(reference.checkpoint, tower.config, precision, grid)
    of_tower = TowerCheck(tower, plain, pixels).run()
    wrong = (it for it in of_tower.differences if it.factor > 1)
    return replace(
        found,
        first=found.first or next(wrong, None),
        largest=max((found.largest, *of_tower.differences), key=lambda it: it.factor),
        num_numbers=found.num_numbers + of_tower.num_numbers,
    )


def _with_head(
    found: LayersChecked, subject: Subject, runner: ModelRunner, reference: ForwardReference, steps: list[CheckedStep]
) -> LayersChecked:
    """Return the result with that of the draft head. Raises CheckpointError."""
    head = HeadReference(reference, draft_head_of(subject.model))
    # Logits of several ranks are asked for by what the model hands out, and the product is the model's.
    own = runner.worker.head
    logits = own.logits if own is not None and subject.shard.world == 1 else None
    check = LayerCheck(FollowedSteps(runner, head), head, logits, kv_dtype=torch_dtype(subject.limits.kv_dtype))
    of_head = check.run(steps)
    named = [
        None if it is None else replace(it, section=f"draft head, {it.section}")
        for it in (of_head.first, of_head.largest)
    ]
    largest = named[1] if named[1] is not None and named[1].factor > found.largest.factor else found.largest
    return replace(
        found,
        first=found.first or named[0],
        largest=largest,
        num_layers=found.num_layers + of_head.num_layers,
        num_numbers=found.num_numbers + of_head.num_numbers,
        num_unjudged=found.num_unjudged + of_head.num_unjudged,
        seconds=found.seconds + of_head.seconds,
    )


def _report(found: LayersChecked) -> LayersReport:
    return LayersReport(
        LayersStatus.PROVEN if found.first is None else LayersStatus.FAILED,
        "" if found.first is None else str(found.first),
        at=time.time(),
        num_layers=found.num_layers,
        num_numbers=found.num_numbers,
        largest=found.largest.factor,
        seconds=round(found.seconds, 3),
    )


def _steps(subject: Subject, runner: ModelRunner) -> list[CheckedStep]:
    limits = subject.limits
    return LayerSteps(
        vocab_size=subject.model.vocab_size,
        page_size=limits.page_size,
        num_pages=runner.num_pages,
        max_len=min(limits.max_model_len, runner.num_pages * limits.page_size),
        max_tokens=limits.max_num_batched_tokens,
        max_rows=limits.max_num_seqs,
        num_slots=None if runner.worker.states is None else runner.worker.states.num_slots,
        chunk=subject.model.chunk,
        has_spans=subject.model.has_image_spans,
    ).all()


@contextmanager
def _threads_for(subject: Subject) -> Iterator[None]:
    """Compute with one thread inside, where a CPU has a small model."""
    before = torch.get_num_threads()
    is_small = subject.device.type == "cpu" and num_parameters(subject.model) < _FEW_PARAMETERS
    try:
        torch.set_num_threads(1 if is_small else before)
        yield
    finally:
        torch.set_num_threads(before)


def _key(subject: Subject, runner: ModelRunner) -> str | None:
    """Return a digest of all that a result depends on beside the fingerprint; None without a digest of the weights."""
    weights = known_weights_digest(subject.folder)
    if weights is None:
        return None
    sources = {path.name: path.source_digest for path in ALL_PATHS}
    decisions = sorted((str(it.shape), it.path, sources.get(it.path or "")) for it in runner.dispatcher.all_decisions)
    parts = [weights, code_digest(), repr(subject.model), repr(subject.limits), subject.shard.world, decisions]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def code_digest() -> str:
    """Return the SHA-256 of the sources that compute layers and check them."""
    root = Path(__file__).parents[3]
    found = hashlib.sha256()
    for folder in _CODE:
        for file in sorted((root / folder).rglob("*.py")):
            found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()


def _read(file: Path) -> dict[str, LayersReport]:
    """Return what earlier starts have proven; nothing where the file cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, LayersReport])
    except (OSError, msgspec.DecodeError) as error:
        logger.debug("no results of earlier checks of layers in %s: %s", file, error)
        return {}


def _keep(file: Path, key: str, report: LayersReport) -> None:
    """Keep a result beside those that are there; where that fails the next start checks again."""
    known = [it for it in _read(file).items() if it[0] != key]
    kept = dict([*known[1 - _MOST_KEPT :], (key, report)])
    try:
        write_whole(file, msgspec.json.encode(kept))
    except OSError as error:
        logger.warning("%s cannot be written, so that the next start checks the layers again: %s", file, error)
