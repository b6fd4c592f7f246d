"""The rows of the start plan as they cross the socket, and what stands against the paths of each."""

from collections.abc import Iterable, Mapping

from kernels.experts.formats import FewBitFormat
from kernels.experts.shape import ExpertsShape
from kernels.linear.shape import FP8_BLOCKS, LinearShape
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.operators import AnyShape, Operator, buckets_of, phase_of
from kernels.vocabulary.path import Reject
from kernels.vocabulary.row_buckets import LinearRows, TokenRows
from kernels.vocabulary.shape import AttentionShape, Mask, Phase
from qualification.decision.decision import Decision
from qualification.evidence.evidence import Evidence, summarize
from qualification.model.packing import Packing
from server.protocol.messages import PlanRow

# Doubts of evidence or of an operator, which may pass while the server runs, or are no bar under DEGRADE.
_MAY_PASS = frozenset(
    it.value for it in (Reject.UNPROVEN, Reject.STALE, Reject.MATRIX_INVALID, Reject.OPERATOR_OVERRIDE)
)
# Codes of a path that will never serve on this machine, or never this phase.
_ELSEWHERE = frozenset({Reject.ARCH.value, Reject.LAYOUT.value})


_FEW_CONTEXTS = (Bucket.LE_2K, Bucket.LE_32K, Bucket.GT_128K)
TOWER = "tower"  # phase of the attention of a tower, in reports: it is no phase of a prompt


def is_of_tower(shape: AnyShape) -> bool:
    """Return whether a shape of attention is that of a tower, whose patches see each other both ways."""
    return isinstance(shape, AttentionShape) and shape.mask is Mask.FULL


def plan_rows(
    decisions: Iterable[Decision[AnyShape]],
    evidence: Mapping[tuple[AnyShape, str], Evidence],
    packing: Packing | None = None,
) -> list[PlanRow]:
    """Return one row for each decision, with a summary of the evidence of its path where there is any.

    packing  of the checkpoint's weights: what is re-encoded is said of each shape that multiplies it
    """
    return [_plan_row(decision, evidence, packing) for decision in decisions]


def _plan_row(
    decision: Decision[AnyShape], evidence: Mapping[tuple[AnyShape, str], Evidence], packing: Packing | None
) -> PlanRow:
    shape = decision.shape
    queries, context = buckets_of(shape)
    found = None if decision.path is None else evidence.get((shape, decision.path))
    return PlanRow(
        shape=str(shape),
        phase=TOWER if is_of_tower(shape) else phase_of(shape),
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
        notes=(*decision.notes, *_reencoded(shape, packing)),
        order=decision.order,
    )


def _reencoded(shape: AnyShape, packing: Packing | None) -> tuple[str, ...]:
    """Return what is said of weights that the file has in another format than the server multiplies."""
    if packing is None or not packing.is_reencoded:
        return ()
    in_blocks = isinstance(shape, LinearShape) and shape.weight_format == FP8_BLOCKS
    in_blocks |= isinstance(shape, ExpertsShape) and shape.format is FewBitFormat.FP8_BLOCKS
    return (f"weights are {packing.value} in the file, and re-encoded in 8 bits",) if in_blocks else ()


def counted_context(phase: str, label: str) -> str:
    """Return the bucket that metrics count attention under: of drafted tokens, and of a tower, one of three.

    One path serves all of them: short ones, long ones, and those beyond.
    """
    if phase not in (Phase.VERIFY.value, TOWER):
        return label
    context = Bucket(label)
    return next(it.label for it in _FEW_CONTEXTS if it.hi is None or (context.hi is not None and context.hi <= it.hi))


def counted_bucket(phase: str, label: str) -> str:
    """Return the bucket that metrics count a shape of the plan under, by the label of its own.

    Products have more buckets of rows than a reader of metrics has questions: they are counted under those of experts.
    """
    if phase != Operator.LINEAR.value:
        return counted_context(phase, label)
    rows = LinearRows(label)
    return next(it for it in TokenRows if it.hi is None or (rows.hi is not None and rows.hi <= it.hi)).label


def possible_paths(row: PlanRow) -> set[str]:
    """Return the paths that may come to serve the shape before the next start."""
    able = {path for path, why in row.rejected.items() if all(code in _MAY_PASS for code, _ in why)}
    return able if row.path is None else able | {row.path}


def of_this_machine(row: PlanRow) -> dict[str, list[tuple[str, str]]]:
    """Rejections of the paths of this machine and phase: on an H200 half of the catalog, on a CPU 2 of 11."""
    return {path: why for path, why in row.rejected.items() if _ELSEWHERE.isdisjoint(code for code, _ in why)}


def rejections_here(row: PlanRow) -> dict[str, list[tuple[str, str]]]:
    """The same for a person, who wants a reason: those of all paths if none is of this machine."""
    return of_this_machine(row) or row.rejected
