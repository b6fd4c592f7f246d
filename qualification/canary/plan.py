"""Compare the plan of a server with what was reviewed. No requests are sent here."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kernels.experts.formats import FewBitFormat
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import AnyShape, Operator
from qualification.canary.numerics import QuantizedFormats
from qualification.canary.verdict import Outcome, Stage, Verdict
from qualification.evidence.choice import choice_of
from qualification.evidence.matrix import Matrix, load_matrices
from qualification.evidence.shape_text import parse_shape

Row = Mapping[str, object]  # of GET /attention
_WITH_WEIGHTS = (Operator.LINEAR.value, Operator.EXPERTS.value)  # the third word of whose shapes is their format


@dataclass(frozen=True, slots=True)
class Reviewed:
    """The matrix that the operator trusts: its digest, and where it is at hand, itself."""

    digest: str
    matrix: Matrix | None = None
    fingerprint: Fingerprint | None = None  # of the server; with `matrix`


def reviewed_matrix(folder: Path, fingerprint: Mapping[str, object]) -> Reviewed:
    """The files of `folder` for the server's GPU. Raises ValueError where there is none, or one is damaged."""
    machine = msgspec.convert(dict(fingerprint), Fingerprint)
    matrix = load_matrices(folder, machine)
    if matrix.problems:
        raise ValueError("; ".join(problem.detail for problem in matrix.problems))
    if matrix.digest is None:
        raise ValueError(f"{folder} holds no matrix for {machine.gpu}")
    return Reviewed(matrix.digest, matrix, machine)


def judge_layers(report: Mapping[str, object]) -> Verdict | None:
    """GET /attention says whether the layers compute what the checkpoint's own tensors do; None from an older server.

    What was not checked is no failure: dummy weights have nothing to be held to.
    """
    layers = report.get("layers")
    if not isinstance(layers, dict):
        return None
    status, detail = layers.get("status"), str(layers.get("detail"))
    if status == "failed":
        return Verdict(Stage.PLAN, Outcome.FAIL, "not what the model's files say", (detail,), "layers")
    why = f": {detail}" if detail else ""
    outcome = Outcome.PASS if status == "proven" else Outcome.SKIPPED
    return Verdict(Stage.PLAN, outcome, f"{status}{why}", bucket="layers")


def judge_plan(
    rows: Sequence[Row], *, must_be_reviewed: bool, reviewed: Reviewed | None = None, digest: str | None = None
) -> Verdict:
    """Rows of GET /attention: each shape has a path, proven, and the wanted one.

    must_be_reviewed  what only the server itself has proven does not do; so it is wherever `reviewed` is given
    digest            of the matrix that the server decided by; it must be the reviewed one
    """
    if not rows:
        return Verdict(Stage.PLAN, Outcome.NO_DATA, "the plan is empty")
    if reviewed is not None and not (digest or "").startswith(reviewed.digest):
        detail = f"the server decided by matrix {_short(digest)}, reviewed is {_short(reviewed.digest)}"
        return Verdict(Stage.PLAN, Outcome.FAIL, detail)
    is_strict = must_be_reviewed or reviewed is not None
    good = {"proven"} if is_strict else {"proven", "provisional"}  # an unknown status is no proof
    reasons = []
    for row in rows:
        if not isinstance(row.get("status"), str) or not isinstance(row.get("fallback_reasons"), list):
            return Verdict(Stage.PLAN, Outcome.NO_DATA, "a row of the plan has no status or no fallback_reasons")
        reason = _against(row, good) or _against_choice(row, reviewed)
        reasons += [reason] if reason is not None else []
    if reasons:
        return Verdict(Stage.PLAN, Outcome.FAIL, f"{len(reasons)} of {len(rows)} shapes", tuple(reasons))
    num_own = sum(row["status"] == "provisional" for row in rows)
    by = "the matrix" if reviewed is None else f"the reviewed matrix {_short(reviewed.digest)}"
    detail = f"{len(rows)} shapes, no fallback, {len(rows) - num_own} proven by {by}, {num_own} by the server itself"
    return Verdict(Stage.PLAN, Outcome.PASS, detail)


def dtype_of(rows: Sequence[Row]) -> str | None:
    """Return the dtype of the model's attention, as shapes name it."""
    words = str(rows[0].get("shape")).split() if rows else []
    return words[1].split("/")[0] if len(words) > 1 else None


def quantized_formats(rows: Sequence[Row]) -> QuantizedFormats | None:
    """Return the formats of 8 or 4 bits among the plan's weights; None where all have 16 bits or more."""
    known = {it.value for it in FewBitFormat}
    shapes = [str(row.get("shape")).split() for row in rows]
    names = {words[2] for words in shapes if words[0] in _WITH_WEIGHTS and words[2] in known}
    return QuantizedFormats(tuple(sorted(names))) if names else None


def _against(row: Row, good: Set[object]) -> str | None:
    path, status, shape, codes = (row.get(name) for name in ("path", "status", "shape", "fallback_reasons"))
    why = f" ({', '.join(map(str, codes))})" if isinstance(codes, list) and codes else ""
    if path is None:
        return f"{shape}: no path{why}"
    if why:
        return f"{shape}: falls back from {row.get('wanted')} to {path}{why}"
    return f"{shape}: {path} is {status}" if status not in good else None


def _against_choice(row: Row, reviewed: Reviewed | None) -> str | None:
    """Compare the server's path with the choice of the matrix, read here."""
    if reviewed is None or reviewed.matrix is None or reviewed.fingerprint is None:
        return None
    try:
        shape = parse_shape(str(row.get("shape")))
    except ValueError as error:
        return str(error)
    choice = _choice(reviewed.matrix, shape, reviewed.fingerprint)
    if choice == row.get("path"):
        return None
    return f"{shape}: {row.get('path')} serves, the reviewed matrix chooses {choice or 'no path'}"


def _choice(matrix: Matrix, shape: AnyShape, fingerprint: Fingerprint) -> str | None:
    entries = (
        entry
        for (of, _), entry in matrix.evidence.items()
        if of == shape and not entry.fingerprint.differing_fields(fingerprint)
    )
    chosen = choice_of(entries)
    return None if chosen is None else chosen.path


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
