"""The five questions of a design review, answered from evidence. No torch."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernels.vocabulary.operators import AnyShape, phase_of
from kernels.vocabulary.path import Tier
from kernels.vocabulary.path_order import tier_of
from kernels.vocabulary.recurrence_operator import place_of_phase
from qualification.evidence.choice import choice_of, is_left_to_fallback, time_of
from qualification.evidence.evidence import Evidence
from qualification.evidence.full_model import Attention, FullModel
from qualification.evidence.summary import measured_text
from qualification.evidence.verdicts import SPEED_TOLERANCE
from qualification.report.views import ModelView


@dataclass(frozen=True, slots=True)
class Serving:
    """The path that serves a shape, and the one that would if it could not."""

    shape: str
    path: str  # "none" where nothing is proven
    kernels: str
    time: str
    next_path: str
    next_ratio: float | None  # the next path's time over this one's


@dataclass(frozen=True, slots=True)
class PhaseGain:
    """The gain of the chosen paths over the best proven fallback, of the kernels alone."""

    phase: str
    shapes: int
    geometric_mean: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class ModelGain:
    """The gain of whole forward passes: times by the plan and, where it was timed too, by the fallback."""

    model: str
    phase: str
    tokens: int
    sequences: int
    plan_ms: float
    attention_ms: float | None  # of plan_ms
    fallback_ms: float | None

    @property
    def gain(self) -> float | None:
        """The fallback's time over the plan's."""
        return None if self.fallback_ms is None else self.fallback_ms / self.plan_ms


def servings(model: ModelView) -> list[Serving]:
    """One for each shape, in the plan's order."""
    return [_serving(str(shape), entry, entries) for shape, entry, entries in _by_shape(model)]


def phase_gains(models: Sequence[ModelView]) -> list[PhaseGain]:
    """Return the gain of each phase; without shapes that have no timed proven fallback."""
    found: dict[str, list[float]] = {}
    for model in models:
        for shape, chosen, entries in _by_shape(model):
            others = [entry for entry in entries if tier_of(entry.path) is Tier.FALLBACK]
            other = choice_of(entry for entry in others if entry is not chosen)
            if chosen is not None and other is not None and math.isfinite(time_of(other) + time_of(chosen)):
                found.setdefault(phase_of(shape), []).append(time_of(other) / time_of(chosen))
    return [
        PhaseGain(phase, len(gains), math.exp(sum(map(math.log, gains)) / len(gains)), min(gains), max(gains))
        for phase, gains in sorted(found.items(), key=lambda item: place_of_phase(item[0]))
    ]


def model_gains(models: Sequence[FullModel]) -> list[ModelGain]:
    return [
        ModelGain(
            model.name, it.phase.value, it.tokens, it.sequences, it.p50_ms, it.attention_ms, model.fallback_ms(it)
        )
        for model in models
        for it in model.timings
        if it.attention is Attention.PLAN
    ]


def where_gained(gains: Sequence[ModelGain]) -> str:
    """The answer for whole forward passes in words; empty where none was timed by the fallback too."""
    found: dict[str, list[float]] = {}
    for it in gains:
        if it.gain is not None:
            found.setdefault(it.phase, []).append(it.gain)
    gaining = [phase for phase, each in found.items() if statistics.geometric_mean(each) > 1 + SPEED_TOLERANCE]
    where = "In both" if len(gaining) > 1 else f"In {gaining[0]} alone" if gaining else "In neither"
    ranges = ", ".join(f"{phase} {min(each):.2f} to {max(each):.2f} times" for phase, each in found.items())
    return f"{where}: {ranges}." if found else ""


def statuses(model: ModelView) -> Counter[str]:
    """Count the shapes with a proven path of the first tier, with only a fallback, and with none."""
    words = (_word(entry, entries) for _, entry, entries in _by_shape(model))
    return Counter(words)


def _word(entry: Evidence | None, entries: Sequence[Evidence]) -> str:
    if entry is None:
        return "nothing"
    return Tier.FALLBACK.value if is_left_to_fallback(entry, entries) else Tier.FIRST.value


def _by_shape(model: ModelView) -> Iterator[tuple[AnyShape, Evidence | None, list[Evidence]]]:
    """Group by shape the entry that serves and all evidence."""
    chosen = model.chosen
    for shape in model.shapes:
        yield shape, chosen[shape], model.entries_of(shape)


def _serving(shape: str, entry: Evidence | None, entries: Sequence[Evidence]) -> Serving:
    if entry is None:
        return Serving(shape, "none", "", "", "none", None)
    following = choice_of(other for other in entries if other is not entry)
    ratio = None
    if following is not None and math.isfinite(time_of(following) + time_of(entry)):
        ratio = time_of(following) / time_of(entry)
    return Serving(
        shape,
        entry.path,
        "not recorded" if entry.all_kernels is None else ", ".join(entry.all_kernels),
        measured_text(entry),
        "none" if following is None else following.path,
        ratio,
    )
