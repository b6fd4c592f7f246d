"""`hallmark doctor`: this machine, the attention paths that can run on it, why the others cannot, and a verdict."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernels.buckets import Bucket
from kernels.fingerprint import Fingerprint
from kernels.path import KernelPath, Tier
from kernels.shape import AttentionShape, Dtype, Phase
from qualification.common.table import table


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Lines to print; the last one is the verdict."""

    lines: list[str]
    can_serve: bool  # every phase has a path


def diagnose(fingerprint: Fingerprint, paths: Iterable[KernelPath]) -> Diagnosis:
    """The fingerprint's fields, a line for each path, and whether a server can run here."""
    paths = list(paths)
    usable = {path.name: _usable_dtypes(path, fingerprint) for path in paths}
    rows = [_row(path, fingerprint, usable[path.name]) for path in paths]
    can_run = [path for path in paths if usable[path.name]]
    missing = [phase.value for phase in Phase if not any(phase in path.limits.phases for path in can_run)]
    lines = table(("machine", ""), [(name, _text(value)) for name, value in fingerprint.values().items()])
    lines += ["", *table(("path", "tier", "phases", "here"), rows), "", _verdict(can_run, len(paths), missing)]
    return Diagnosis(lines, not missing)


def _verdict(can_run: Sequence[KernelPath], num_paths: int, missing: Sequence[str]) -> str:
    if missing:
        return f"Verdict: no server can run here: nothing computes {' and '.join(missing)}."
    num_first = sum(path.tier is Tier.FIRST for path in can_run)
    tiers = f"{num_first} wanted, {len(can_run) - num_first} fallback"
    slow = "" if num_first else " It will be slow: every answer falls back."
    return f"Verdict: a server can run here, on {len(can_run)} of {num_paths} attention paths ({tiers}).{slow}"


def _usable_dtypes(path: KernelPath, fingerprint: Fingerprint) -> list[str]:
    phase = next(phase for phase in Phase if phase in path.limits.phases)
    return [dtype.value for dtype in Dtype if not path.rejects(_plain_shape(path, phase, dtype), fingerprint)]


def _row(path: KernelPath, fingerprint: Fingerprint, usable: Sequence[str]) -> tuple[str, str, str, str]:
    phases = [phase for phase in Phase if phase in path.limits.phases]
    whys = []
    for dtype in Dtype:
        rejections = path.rejects(_plain_shape(path, phases[0], dtype), fingerprint)
        if rejections:
            whys.append({f"{rejection.code.value}: {rejection.detail}": None for rejection in rejections})
    # What stands against every dtype is the machine's; that some are not taken besides says nothing of it.
    reasons = [why for why in whys[0] if all(why in others for others in whys)] if whys else []
    reasons = reasons or list(dict.fromkeys(why for each in whys for why in each))
    verdict = f"yes, in {', '.join(usable)}" if usable else f"no ({'; '.join(reasons)})"
    return path.name, path.tier.value, " ".join(phase.value for phase in phases), verdict


def _plain_shape(path: KernelPath, phase: Phase, dtype: Dtype) -> AttentionShape:
    """A shape that only the machine or the dtype can make `path` reject."""
    return AttentionShape(
        phase=phase,
        dtype=dtype,
        kv_dtype=dtype,
        num_heads=8 * path.limits.group_multiple,
        num_kv_heads=8,
        head_dim=path.limits.max_head_dim,
        query_bucket=Bucket.LE_128,
        context_bucket=Bucket.LE_128,
        page_size=None if phase is Phase.PREFILL else path.limits.page_size_multiple,
        window=path.limits.max_window,
    )


def _text(value: object) -> str:
    return "none" if value is None else str(value)
