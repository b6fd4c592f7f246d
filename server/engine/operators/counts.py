"""Launches of products and experts in a step, counted from its decisions: a CUDA graph makes no call to count."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kernels.vocabulary.operators import buckets_of, phase_of
from qualification.decision.decision import Decision
from server.protocol.messages import DispatchCount, PathUse
from server.protocol.plan_rows import counted_bucket


@dataclass(frozen=True, slots=True)
class ServedShape:
    """A decision that serves a step, and how often its path is launched in it."""

    decision: Decision[Any]
    num_launches: int


def use_of(decision: Decision[Any]) -> PathUse:
    """Return what a request says of a decision that served it."""
    assert decision.path is not None
    reasons = [reason.value for reason in decision.fallback_reasons]
    return PathUse(phase_of(decision.shape), decision.path, decision.status.value, reasons)


def fallback_uses(served: Iterable[ServedShape]) -> list[PathUse]:
    """Return the distinct decisions that are fallbacks, or whose evidence does not hold."""
    found: list[PathUse] = []
    for it in served:
        if it.decision.path is not None and (it.decision.is_fallback or not it.decision.status.is_valid):
            use = use_of(it.decision)
            found += [] if use in found else [use]
    return found


def dispatch_counts(served: Iterable[ServedShape], num_tokens: int, num_sequences: int) -> list[DispatchCount]:
    """Return one count for the decisions that metrics cannot distinguish, with the launches of all of them."""
    launches: dict[tuple[str, str, str, str, str, tuple[str, ...]], int] = {}
    for it in served:
        decision = it.decision
        if decision.path is not None:
            reasons = tuple([reason.value for reason in decision.fallback_reasons])
            phase = phase_of(decision.shape)
            bucket = counted_bucket(phase, buckets_of(decision.shape)[0].label)
            key = phase, bucket, decision.path, decision.status.value, decision.wanted, reasons
            launches[key] = launches.get(key, 0) + it.num_launches
    return [
        DispatchCount(phase, bucket, path, status, wanted, [*reasons], num_sequences, num_tokens, num_launches)
        for (phase, bucket, path, status, wanted, reasons), num_launches in launches.items()
    ]
