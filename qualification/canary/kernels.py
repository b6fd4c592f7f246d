"""The kernels of layers with a state, and of drafts, that answered a canary, by the plan, counts and attestation.

Attention and products serve every step. These serve some: golden prompts that no such kernel computed show none.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kernels.vocabulary.operators import Operator
from kernels.vocabulary.recurrence_operator import CONVOLUTION, RECURRENCE
from kernels.vocabulary.shape import Phase
from qualification.canary.plan import Row
from qualification.canary.verdict import Outcome, Stage, Verdict
from qualification.model.draft_head import DRAFT_HEAD

DRAFTS = "drafts"  # in the place of a bucket
_NGRAM = "ngram"


def judge_kernels(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Verdict]:
    """Return what GET /plan says of them before and after prompts were answered; nothing of a server without."""
    rows = after.get("shapes")
    shapes, launches = rows if isinstance(rows, list) else [], (_launches(before), _launches(after))
    found = [_of_states(operator, shapes, *launches) for operator in (RECURRENCE, CONVOLUTION)]
    return [it for it in (*found, _drafts(after)) if it is not None]


def _of_states(
    operator: Operator, rows: Sequence[Row], before: Mapping[str, int], after: Mapping[str, int]
) -> Verdict | None:
    """Return what is said of an operator whose layers keep a state; None of a model without."""
    own = [row for row in rows if row.get("phase") == operator.value]
    if not own:
        return None
    counts = {str(row["path"]): 0 for row in own if row.get("path") is not None}
    counts = {path: after.get(path, 0) - before.get(path, 0) for path in counts}
    detail = f"{len(own)} shapes, launches while it was asked: {_listed(counts)}"
    if not any(counts.values()):
        why = f"answers were given, and no launch of a {operator.value} was counted"
        return Verdict(Stage.PLAN, Outcome.FAIL, detail, (why,), operator.value)
    return Verdict(Stage.PLAN, Outcome.PASS, detail, bucket=operator.value)


def _drafts(report: Mapping[str, Any]) -> Verdict | None:
    drafts, attestation = report.get("drafts"), report.get("attestation")
    if not isinstance(drafts, Mapping):
        return None
    method, most = drafts.get("method"), drafts.get("max_seqs")
    up_to = "" if most is None else f" up to {most} sequences"
    detail = f"{drafts.get('num_tokens')} tokens by {method}{up_to}"
    if not isinstance(attestation, Mapping):
        return Verdict(Stage.PLAN, Outcome.SKIPPED, f"{detail}; nothing was attested", bucket=DRAFTS)
    # What verifies is a step of the model; a head's own passes beside them.
    wanted = [Phase.VERIFY.value] if method == _NGRAM else [Phase.VERIFY.value, DRAFT_HEAD]
    batches = [it for it in attestation.get("batches", ()) if it.get("phase") in wanted]
    names: Counter[str] = Counter()
    for it in batches:
        names.update(it.get("kernels", {}))
    detail += f"; attested {len(batches)} times: {_listed(names)}"
    wrong = [f"{it['phase']}: {it.get('detail')}" for it in batches if it.get("result") != "match"]
    seen = {it.get("phase") for it in batches}
    wrong += [f"{phase}: no kernel of it was attested" for phase in wanted if phase not in seen]
    outcome = Outcome.FAIL if wrong else Outcome.PASS
    return Verdict(Stage.PLAN, outcome, detail, tuple(wrong), DRAFTS)


def _launches(report: Mapping[str, Any]) -> Mapping[str, int]:
    found = report.get("launches")
    return found if isinstance(found, dict) else {}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
