"""Check that a server serves the tokenizer and the weights of the golden file. No requests are sent here."""

from collections.abc import Mapping

from qualification.canary.golden import Golden
from qualification.canary.verdict import Outcome, Stage, Verdict

_WEIGHTS = "weights"
NAMES = ("tokenizer", _WEIGHTS)


def digests_of(report: Mapping[str, object]) -> dict[str, str]:
    """Return the digests that GET /attention holds."""
    found = report.get("model_digests")
    known = found if isinstance(found, Mapping) else {}
    return {name: known[name] for name in NAMES if isinstance(known.get(name), str)}


def judge_model(
    golden: Golden, digests: Mapping[str, str], *, max_model_len: int, quantized: str | None = None
) -> Verdict:
    """FAIL names what has changed. A golden file without digests is of before there were any: nothing is judged.

    quantized  the formats of a candidate that is the golden file's model in fewer bits: its weights are others
    """
    if golden.max_model_len is not None and max_model_len < golden.max_model_len:
        detail = f"the context is {max_model_len} tokens, {golden.max_model_len} were recorded"
        return Verdict(Stage.MODEL, Outcome.FAIL, detail)
    if not golden.model_digests:
        detail = f"the golden file of {golden.recorded_at} has no digests of tokenizer and weights: record it anew"
        return Verdict(Stage.MODEL, Outcome.SKIPPED, detail)
    compared = {name: known for name, known in golden.model_digests.items() if quantized is None or name != _WEIGHTS}
    changed = [name for name, known in compared.items() if digests.get(name, known) != known]
    missing = [name for name in compared if name not in digests]
    if changed:
        reasons = tuple(
            f"{name}: {digests[name][:12]} is served, {golden.model_digests[name][:12]} was recorded"
            for name in changed
        )
        detail = f"the {' and the '.join(changed)} changed since {golden.recorded_at}"
        return Verdict(Stage.MODEL, Outcome.FAIL, detail, reasons)
    if missing:
        return Verdict(Stage.MODEL, Outcome.NO_DATA, f"/attention has no digest of {', '.join(missing)}")
    words = ", ".join(f"{name} {known[:12]}" for name, known in compared.items())
    if quantized is not None:
        words = f"{words}; weights are in {quantized}, and are not compared by their digest"
    return Verdict(Stage.MODEL, Outcome.PASS, f"as recorded: {words}")
