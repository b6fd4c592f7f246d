"""Golden receipts: answers of a trusted server that a candidate must compute again to the bit."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from qualification.canary.golden import GoldenPrompt
from qualification.canary.verdict import Outcome, Stage, Verdict
from qualification.common.exit_code import ExitCode
from qualification.receipt.content import Content
from qualification.receipt.replay import ReplayServer
from qualification.receipt.signed import receipt_of
from qualification.receipt.verify import judge

LONGEST_PROMPT = 4096  # tokens; a receipt repeats its prompt
BUCKET = "receipts"  # in the place of a bucket of prompt tokens
_DRAWN = {"temperature": 1.0, "top_p": 0.95, "seed": 20261128}
_GREEDY = {"temperature": 0.0}
Progress = Callable[[int, int, str], None]


def record_receipts(server: ReplayServer, prompts: Iterable[GoldenPrompt], progress: Progress) -> list[dict[str, Any]]:
    """Receipts of greedy answers and of drawn ones; none of a server that does not promise equal bits.

    Raises ServerError and RefusedReplay.
    """
    identity = server.identity()
    if identity is None or not identity.reproducible:
        return []
    asked = [
        (prompt, sampling)
        for prompt in prompts
        if len(prompt.token_ids) <= LONGEST_PROMPT
        for sampling in (_GREEDY, _DRAWN)
    ]
    found = []
    for n, (prompt, sampling) in enumerate(asked):
        progress(n, len(asked), f"receipt of {prompt.name}")
        found.append(server.answer(prompt.token_ids, prompt.max_tokens, sampling))
    return found


def judge_receipts(
    receipts: Sequence[dict[str, Any]], server: ReplayServer, *, max_model_len: int, progress: Progress
) -> Verdict:
    """The verdict on all golden receipts that fit the context. Raises ServerError."""
    contents = [content for content in map(_content, receipts) if _num_tokens(content) <= max_model_len]
    if not contents:
        reason = "the golden file has no receipt that fits: record it from a server that runs with --reproducible"
        return Verdict(Stage.NUMERICS, Outcome.SKIPPED, reason, bucket=BUCKET)
    failed: list[str] = []
    stage, outcome = Stage.NUMERICS, Outcome.PASS
    for n, content in enumerate(contents):
        progress(n, len(contents), f"receipt {n + 1}")
        found = judge(content, server)
        if found.code is ExitCode.PASS:
            continue
        failed += [f"receipt {n + 1}: {found.detail}", *found.reasons]
        if found.code is ExitCode.NUMERICS:
            stage, outcome = Stage.NUMERICS, Outcome.FAIL
            break
        if found.code is ExitCode.ENVIRONMENT:
            stage, outcome = Stage.ENVIRONMENT, Outcome.FAIL
            break
        outcome = Outcome.NO_DATA
    detail = f"{len(contents)} golden receipts, tokens and log probabilities to the bit"
    return Verdict(stage, outcome, detail, tuple(failed), BUCKET)


def _content(receipt: dict[str, Any]) -> Content:
    return receipt_of(receipt).content


def _num_tokens(content: Content) -> int:
    return max(content.prompts[it.prompt].num_tokens + it.num_tokens for it in content.answers)
