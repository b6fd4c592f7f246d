"""The rows of the start plan as they cross the socket, and what stands against the paths of each."""

from collections.abc import Iterable, Mapping

from kernels.operators import AnyShape, buckets_of, phase_of
from kernels.path import Reject
from kernels.shape import AttentionShape
from qualification.decision.decision import Decision
from qualification.evidence.evidence import Evidence, summarize
from server.protocol.messages import PlanRow

# Codes of a path that will never serve on this machine, or never this phase.
_ELSEWHERE = frozenset({Reject.ARCH.value, Reject.LAYOUT.value})


def plan_rows(
    decisions: Iterable[Decision[AnyShape]], evidence: Mapping[tuple[AnyShape, str], Evidence]
) -> list[PlanRow]:
    """Return one row for each decision, with a summary of the evidence of its path where there is any."""
    return [_plan_row(decision, evidence) for decision in decisions]


def _plan_row(decision: Decision[AnyShape], evidence: Mapping[tuple[AnyShape, str], Evidence]) -> PlanRow:
    shape = decision.shape
    queries, context = buckets_of(shape)
    found = None if decision.path is None else evidence.get((shape, decision.path))
    return PlanRow(
        shape=str(shape),
        phase=phase_of(shape),
        query_bucket=queries.label,
        context_bucket=context.label,
        head_dim=shape.head_dim if isinstance(shape, AttentionShape) else None,
        path=decision.path,
        status=decision.status.value,
        wanted=decision.wanted,
        fallback_reasons=[reason.value for reason in decision.fallback_reasons],
        rejected={
            candidate.path: [(rejection.code.value, rejection.detail) for rejection in candidate.rejections]
            for candidate in decision.candidates
        },
        matrix_digest=decision.matrix_digest,
        evidence=None if found is None else summarize(found),
        notes=decision.notes,
    )


def of_this_machine(row: PlanRow) -> dict[str, list[tuple[str, str]]]:
    """Rejections of the paths of this machine and phase: on an H200 half of the catalog, on a CPU 2 of 11."""
    return {path: why for path, why in row.rejected.items() if _ELSEWHERE.isdisjoint(code for code, _ in why)}


def rejections_here(row: PlanRow) -> dict[str, list[tuple[str, str]]]:
    """The same for a person, who wants a reason: those of all paths if none is of this machine."""
    return of_this_machine(row) or row.rejected
