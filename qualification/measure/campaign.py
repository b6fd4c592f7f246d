"""Qualifying one model or several on this machine, as `hallmark qualify` does it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.system.device_lost import DeviceLost
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.operators import AnyShape, Operator, phase_of
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.shape import Dtype
from kernels.vocabulary.value_shape import any_flops
from qualification.common.exit_code import ExitCode
from qualification.common.progress import ProgressLine
from qualification.decision.defaults import Choices, limits_of
from qualification.decision.model_shapes import plan_shapes
from qualification.evidence.evidence import Evidence
from qualification.evidence.gpu_folder import gpu_folder
from qualification.evidence.ledger import Ledger, Target, missing_of
from qualification.evidence.matrix import MatrixError
from qualification.evidence.summary import counts, summary
from qualification.evidence.verdicts import Finding, judge
from qualification.measure.qualify import Pair
from qualification.measure.trials.failures import QualificationAborted
from qualification.measure.trials.trial import trial_of
from qualification.model.cached_layers import FLAG, skipping_fp8_cache
from qualification.model.config import ModelConfig
from qualification.model.draft_head import may_round_logits, with_draft_head
from qualification.model.families.quantization import rounded_at_load
from qualification.model.families.reader import read_model
from qualification.model.families.towers import with_known_tower
from qualification.model.fields import ModelConfigError
from qualification.model.shard import shard_of

_MAX_FINDINGS = 20  # lines
# In flops, of a shape however small: on an H200 0.5 s, in which fp64 and fp32 references compute so much.
_COST_OF_ANY = 2e12

# qualify's own arguments, the bench left out
Measure = Callable[[Sequence[Pair], ProgressLine, Callable[[Evidence], None]], None]


class OutOfTime(Exception):
    """The operator's time is spent. What was measured is on disk."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions and data that a run uses."""

    catalog: Sequence[AnyPath]  # every path there is
    paths: Sequence[AnyPath]  # those asked for
    fingerprint: Fingerprint
    measure: Measure
    progress: ProgressLine
    say: Callable[[str], None]
    clock: Callable[[], float]  # seconds


def targets_of(
    models: Mapping[str, Mapping[str, object]],
    choices: Choices,
    *,
    device_type: str,
    phases: Collection[str],
    paths: Sequence[AnyPath],
    file_of: Callable[[str], Path],
    tensor_parallel_size: int = 1,
) -> list[Target]:
    """A target for each parsed config.json, by name: the shapes of these phases which any of these paths serves.

    phases  of attention, and the names of other operators

    With several ranks the shapes are those of each rank's part. Raises ModelConfigError, and ValueError for
    layers that cannot be kept out of a cache of 8 bits.
    """
    found = []
    for name, config in models.items():
        model = skipping_fp8_cache(with_known_tower(read_model(config), config), choices.kv_skip_layers)
        model = rounded_at_load(model) if choices.rounds_at_load else model
        limits = limits_of(model, device_type, choices)
        if choices.max_drafted_tokens:
            model = _with_draft_head(model, limits.dtype, device_type)
        part = shard_of(model, 0, tensor_parallel_size).local_config
        if choices.kv_skip_layers and limits.kv_dtype is not FP8:
            raise ValueError(
                f"{FLAG} is set, and the KV cache of {name} is {limits.kv_dtype.value}: add --kv-cache-dtype fp8"
            )
        shapes = plan_shapes(part, limits, device_type, tensor_parallel_size)
        wanted = tuple(it for it in shapes if phase_of(it) in phases and any(path.serves(it) for path in paths))
        of_ranks = name if tensor_parallel_size == 1 else f"{name}-tp{tensor_parallel_size}"
        found.append(Target(of_ranks, file_of(of_ranks), wanted))
    return found


def _with_draft_head(model: ModelConfig, dtype: Dtype, device_type: str) -> ModelConfig:
    """Return the model with a draft head, as a server has it that drafts by it; the model itself where it has none."""
    try:
        found = with_draft_head(model)
    except ModelConfigError:
        return model
    return replace(found, rounds_draft_logits=device_type == "cuda" and may_round_logits(found, dtype))


def shard_of_targets(targets: Sequence[Target], index: int, number: int, *, is_cpu: bool) -> list[Target]:
    """The targets with the shapes of one of `number` shards, which take about as long to measure; none without shapes.

    The costliest shape goes first, each to the shard that has least. What is measured already does not matter, so that
    a shard goes on with its own shapes where it was interrupted.
    """

    def cost(shape: AnyShape) -> float:
        return _COST_OF_ANY + any_flops(shape, *trial_of(shape).tested(shape, is_cpu=is_cpu))

    costs, dealt = [0.0] * number, set[AnyShape]()
    for shape in sorted({it for target in targets for it in target.shapes}, key=lambda it: (-cost(it), str(it))):
        least = costs.index(min(costs))
        costs[least] += cost(shape)
        if least == index:
            dealt.add(shape)
    parts = (replace(target, shapes=tuple(it for it in target.shapes if it in dealt)) for target in targets)
    return [part for part in parts if part.shapes]


def default_file(out_dir: Path, gpu: str, name: str) -> Path:
    """Return the file in which a server with --matrix OUT_DIR looks."""
    return out_dir / gpu_folder(gpu) / f"{name}.json"


def is_misnamed(path: AnyPath, evidence: Evidence) -> bool:
    """Return whether no kernel that a path launched has one of the names of its catalog entry.

    An attestation without evidence goes by them. Of operators other than attention a CPU's are PyTorch's, which their
    entries, written for GPUs, do not name.
    """
    is_named_there = evidence.fingerprint.device is not Device.CPU or path.operator is Operator.ATTENTION
    seen = evidence.all_kernels
    return bool(seen and path.kernel_names and is_named_there) and not any(
        name in kernel for kernel in seen or () for name in path.kernel_names
    )


def conduct(
    targets: Sequence[Target],
    tools: Tools,
    *,
    time_limit_s: float | None = None,
    is_retrying: bool = False,
    beside: Sequence[Path] = (),
) -> ExitCode:
    """Measure what is missing, write it down, and say how it stands. Raises OSError where a file cannot be written.

    beside  files of other models, whose proofs of the same shapes serve as well
    """
    started = tools.clock()
    try:
        ledger = Ledger(targets, catalog=tools.catalog, fingerprint=tools.fingerprint, beside=beside)
    except MatrixError as error:
        tools.say(f"{error}. Nothing is overwritten: remove the file to measure it anew")
        return ExitCode.ENVIRONMENT
    for name, fields in ledger.replaced.items():
        tools.say(f"{name} was measured on another stack ({', '.join(fields)} differ) and is measured anew")
    shapes = [shape for target in targets for shape in target.shapes]
    pairs = missing_of(shapes, ledger.known, paths=tools.paths, fingerprint=tools.fingerprint, is_retrying=is_retrying)
    num_valid = sum(entry.shape in set(shapes) for entry in ledger.known.values())
    names = ", ".join(target.name for target in targets)
    tools.say(f"{len(set(shapes))} shapes of {names}: {len(pairs)} pairs to measure, {num_valid} already valid")

    misnamed: set[str] = set()

    def add(evidence: Evidence) -> None:
        ledger.add(evidence)
        path = next((it for it in tools.catalog if it.name == evidence.path), None)
        if path is not None and path.name not in misnamed and is_misnamed(path, evidence):
            misnamed.add(path.name)
            seen, names = ", ".join(evidence.all_kernels or ()), ", ".join(path.kernel_names)
            correct = "correct kernel_names in its catalog entry"
            tools.say(f"{path.name} launched {seen}: no name has one of {names}; {correct}")
        if time_limit_s is not None and tools.clock() - started > time_limit_s:
            raise OutOfTime

    ended_by = _measure(pairs, tools, add)
    findings = _report(targets, ledger, tools, shapes)
    code = ended_by or (findings[0].code if findings else ExitCode.PASS)
    tools.say(f"verdict: {code.name} (exit {code.value})")
    return code


def _measure(pairs: Sequence[Pair], tools: Tools, add: Callable[[Evidence], None]) -> ExitCode | None:
    """The code that its end demands; None when it came to its end, or was stopped and may be continued."""
    try:
        tools.measure(pairs, tools.progress, add)
    except QualificationAborted as error:
        tools.progress.close()
        tools.say(f"aborted: {error}")
        return ExitCode.INCONCLUSIVE
    except DeviceLost as error:
        tools.progress.close()
        tools.say(f"{error}. That is on record; the same command goes on without it")
        return ExitCode.ENVIRONMENT
    except (OutOfTime, KeyboardInterrupt) as error:
        tools.progress.close()
        why = "the time is up" if isinstance(error, OutOfTime) else "interrupted"
        tools.say(f"{why}: all that was measured is kept, the same command goes on from here")
        return None
    tools.progress.close()
    return None


def _report(targets: Sequence[Target], ledger: Ledger, tools: Tools, shapes: Iterable[AnyShape]) -> list[Finding]:
    """Tables for a single model; for several a line each, as `hallmark matrix show` has the rest."""
    tools.say("")
    if len(targets) == 1:
        for line in summary(ledger.evidence_of(targets[0])):
            tools.say(line)
    for target in targets:
        written = f" -> {target.file}" if target.file.exists() else ""
        tools.say(f"{target.name}: {counts(ledger.evidence_of(target))}{written}")
    findings = judge(dict.fromkeys(shapes), ledger.known, paths=tools.paths, fingerprint=tools.fingerprint)
    for finding in findings[:_MAX_FINDINGS]:
        tools.say(f"    {finding}")
    if len(findings) > _MAX_FINDINGS:
        tools.say(f"    and {len(findings) - _MAX_FINDINGS} more")
    return findings
