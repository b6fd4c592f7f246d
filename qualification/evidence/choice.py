"""What evidence alone says of a shape: which path it chooses, and whether that is what a qualification wants."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kernels.fingerprint import Device, Fingerprint
from kernels.path import KernelPath, Tier
from kernels.shape import AttentionShape
from qualification.evidence.evidence import Evidence
from qualification.evidence.matrix import Key
from qualification.evidence.order import Rated, first_of
from qualification.exit_code import ExitCode

# Starts of the names of the catalog's paths, in its order; a test holds this to it.
_ORDER = ("gluon.", "triton.", "sdpa.cpu", "sdpa.cudnn", "sdpa.flash", "sdpa.efficient", "sdpa.math")


def tier_of(path: str) -> Tier:
    """The tier by the path's name alone, so that a matrix can be read without the catalog (and its torch).

    PyTorch's kernels on a GPU are fallbacks; a test holds this to the catalog.
    """
    return Tier.FALLBACK if path.startswith("sdpa.") and path != "sdpa.cpu" else Tier.FIRST


def may_compete(path: str, device: Device) -> bool:
    """Whether a fallback serves before the first tier where it is clearly faster; by its name alone, as `tier_of`."""
    return path == "sdpa.math" and device is Device.CPU


def time_of(evidence: Evidence) -> float:
    """Microseconds; infinite where it was not timed, or its time is not believed."""
    timing = evidence.believed_timing
    return float("inf") if timing is None else timing.p50_us


def choice_of(entries: Iterable[Evidence]) -> Evidence | None:
    """Of one shape's evidence, all of it valid, what serves."""
    rated = [
        Rated(
            of=entry,
            index=_place(entry.path),
            timing=entry.believed_timing,
            is_fallback=tier_of(entry.path) is Tier.FALLBACK,
            may_compete=may_compete(entry.path, entry.fingerprint.device),
        )
        for entry in sorted(entries, key=lambda entry: entry.path)
        if entry.is_proven
    ]
    chosen = first_of(rated)
    return None if chosen is None else chosen.of


def is_left_to_fallback(chosen: Evidence, entries: Iterable[Evidence]) -> bool:
    """Whether a fallback serves because nothing of the first tier is proven, and not because it is clearly faster."""
    proven_tiers = {tier_of(entry.path) for entry in entries if entry.is_proven}
    return tier_of(chosen.path) is Tier.FALLBACK and Tier.FIRST not in proven_tiers


def _place(path: str) -> int:
    """In the catalog's order, as far as it matters inside a tier."""
    return next((index for index, start in enumerate(_ORDER) if path.startswith(start)), len(_ORDER))


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a shape is not what a qualification wants."""

    code: ExitCode
    shape: AttentionShape
    detail: str

    def __str__(self) -> str:
        return f"{self.code.name.lower()}: {self.shape}: {self.detail}"


_GRAVEST_FIRST = (ExitCode.NUMERICS, ExitCode.ENVIRONMENT, ExitCode.INCONCLUSIVE)


def judge(
    shapes: Iterable[AttentionShape],
    known: Mapping[Key, Evidence],
    *,
    paths: Sequence[KernelPath],
    fingerprint: Fingerprint,
) -> list[Finding]:
    """What keeps a run from passing, gravest first; empty: a path of the first tier is proven for every shape.

    `known` holds valid evidence only, `paths` those that were asked for. A fallback path with wrong numbers is no
    finding while another serves: nothing will ever choose it.
    """
    found = []
    for shape in shapes:
        able = [path for path in paths if path.run is not None and not path.rejects(shape, fingerprint)]
        has_first = any(path.tier is Tier.FIRST and shape.phase in path.limits.phases for path in paths)
        found += _findings(shape, able, known, has_first=has_first)
    return sorted(found, key=lambda finding: _GRAVEST_FIRST.index(finding.code))


def _findings(
    shape: AttentionShape, able: list[KernelPath], known: Mapping[Key, Evidence], *, has_first: bool
) -> list[Finding]:
    entries = [known[shape, path.name] for path in able if (shape, path.name) in known]
    missing = [path.name for path in able if (shape, path.name) not in known]
    wrong = [entry for entry in entries if entry.failure is None and not entry.is_proven]
    chosen = choice_of(entries)
    found = [
        Finding(ExitCode.NUMERICS, shape, f"{entry.path} fails its checks")
        for entry in wrong
        if chosen is None or tier_of(entry.path) is Tier.FIRST
    ]
    if missing:
        found.append(Finding(ExitCode.INCONCLUSIVE, shape, f"not measured: {', '.join(missing)}"))
    elif chosen is None and not wrong:
        raised = "; ".join(f"{entry.path}: {entry.failure}" for entry in entries)
        found.append(Finding(ExitCode.ENVIRONMENT, shape, f"no path serves it ({raised or 'every path rejects it'})"))
    elif chosen is not None and has_first and is_left_to_fallback(chosen, entries):
        found.append(Finding(ExitCode.ENVIRONMENT, shape, f"only the fallback {chosen.path} serves it"))
    return found
