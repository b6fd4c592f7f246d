"""The verdict on a receipt: its signature, then its answers computed again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qualification.common.exit_code import ExitCode
from qualification.receipt.content import Content, UsedDecision
from qualification.receipt.given import Compared, check_given
from qualification.receipt.keys import PublicKey
from qualification.receipt.replay import (
    ATTENTION_PHASES,
    Difference,
    RefusedReplay,
    ReplayServer,
    decisions_at,
)
from qualification.receipt.signed import Receipt, check_consistent, check_signature

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for a receipt, and the exit code that says it."""

    code: ExitCode
    detail: str  # one line
    reasons: tuple[str, ...] = ()  # one line each


def verify(receipt: Receipt, keys: Sequence[PublicKey], server: ReplayServer, say: Say) -> ExitCode:
    """Check the signature, compute the answers again, and say a line on each.

    Raises ReceiptError for a receipt that none of `keys` has signed as it is, that contradicts itself, or that came in
    an answer of another text; and ServerError.
    """
    key = check_signature(receipt, keys)
    check_consistent(receipt.content)
    say(f"signature: PASS: key {key.key_id} signed it, sha256:{receipt.digest}")
    compared = check_given(receipt)
    if compared is not Compared.NOTHING:
        left_out = "; its calls were not compared" if compared is Compared.TEXTS else ""
        say(f"answer: PASS: the receipt is of the texts around it{left_out}")
    verdict = judge(receipt.content, server)
    say(f"replay: {_NAMES[verdict.code]}: {verdict.detail}")
    for reason in verdict.reasons:
        say(f"    {reason}")
    name = "UNSERVABLE" if verdict.code is ExitCode.PERFORMANCE else verdict.code.name
    say(f"verdict: {name} (exit {verdict.code.value})")
    return verdict.code


_NAMES = {ExitCode.PASS: "PASS", ExitCode.INCONCLUSIVE: "NO DATA"} | dict.fromkeys(
    (ExitCode.NUMERICS, ExitCode.PERFORMANCE, ExitCode.ENVIRONMENT), "FAIL"
)


def judge(content: Content, server: ReplayServer) -> Verdict:
    """Compute the answers of a receipt again. Raises ServerError."""
    if not content.answers:
        return Verdict(ExitCode.INCONCLUSIVE, "the receipt holds no answer")
    if any(answer.token_ids is None for answer in content.answers):
        detail = "the receipt holds digests only (--no-receipt-token-ids): its answers cannot be computed again"
        return Verdict(ExitCode.INCONCLUSIVE, detail)
    now = server.identity()
    changes = () if now is None else differences_of(content, now)
    if now is not None and is_another_model(content, now):
        return Verdict(ExitCode.ENVIRONMENT, "the server has another model than the receipt is of", changes)
    num_tokens, num_logprobs, served = 0, 0, now
    for place in range(len(content.answers)):
        try:
            replayed = server.replay(content, place, has_receipts=now is not None)
        except RefusedReplay as refusal:
            return Verdict(ExitCode.PERFORMANCE, f"the server does not serve its answer {place}: {refusal}", changes)
        served = replayed.content or served
        if replayed.difference is not None:
            return _differs(content, served, replayed.difference, changes)
        num_tokens += replayed.num_tokens
        num_logprobs += replayed.num_tokens if replayed.has_logprobs else 0
    answers = "1 answer" if len(content.answers) == 1 else f"{len(content.answers)} answers"
    what = f"{answers}, {num_tokens} tokens and {num_logprobs} log probabilities are equal"
    return Verdict(ExitCode.PASS, what, changes)


def is_another_model(content: Content, now: Content) -> bool:
    """Return whether weights or tokenizer are known to be others."""
    pairs = ((content.weights_digest, now.weights_digest), (content.tokenizer_digest, now.tokenizer_digest))
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def differences_of(content: Content, now: Content) -> tuple[str, ...]:
    """A line for each thing that computes and is not what the receipt names."""
    named = {
        "model": (content.model, now.model),
        "weights": (content.weights_digest, now.weights_digest),
        "tokenizer": (content.tokenizer_digest, now.tokenizer_digest),
        "server version": (content.server_version, now.server_version),
        "matrix": (content.matrix_digest, now.matrix_digest),
        **_fields(content.fingerprint, now.fingerprint),
    }
    lines = [f"{name}: {_text(a)} in the receipt, {_text(b)} now" for name, (a, b) in named.items() if a != b]
    if content.reproducible != now.reproducible:
        lines.append(f"reproducible: {content.reproducible} in the receipt, {now.reproducible} now".lower())
    if has_other_settings(content, now):
        pairs = _fields(content.settings, now.settings).items()
        lines += [f"setting {name}: {_given(a)} in the receipt, {_given(b)} now" for name, (a, b) in pairs if a != b]
    return tuple(lines)


def has_other_settings(content: Content, now: Content) -> bool:
    """Return whether settings that decide numbers are known to differ: a receipt of version 1 names none."""
    return 1 not in (content.version, now.version) and content.settings != now.settings


def _given(value: object) -> str:
    return "left out" if value is None else _text(value)


def _fields(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    return {name: (before.get(name), now.get(name)) for name in dict.fromkeys((*before, *now))}


def _differs(content: Content, now: Content | None, difference: Difference, changes: tuple[str, ...]) -> Verdict:
    """A difference is wrong numbers only where nothing else explains it."""
    before = decisions_at(content.decisions, difference.position)
    after = [] if now is None else decisions_at(now.decisions, difference.position)
    detail = f"answer {difference.answer} differs from its token {difference.position} on: {difference.what}"
    reasons = (
        *changes,
        *(f"computed by {line} in the receipt" for line in before),
        *(f"computed by {line} now" for line in after),
    )
    if now is None:
        return Verdict(ExitCode.INCONCLUSIVE, f"{detail}; the server does not say what computes", reasons)
    is_promised = content.reproducible and now.reproducible
    if not is_promised:
        return Verdict(ExitCode.INCONCLUSIVE, f"{detail}; without --reproducible bits may depend on the batch", reasons)
    is_another = _environment(content) != _environment(now) or has_other_settings(content, now)
    if is_another or has_other_sums(content.decisions, now.decisions):
        return Verdict(ExitCode.ENVIRONMENT, f"{detail}; something else computes than did", reasons)
    return Verdict(ExitCode.NUMERICS, detail, reasons)


def has_other_sums(before: Sequence[UsedDecision], now: Sequence[UsedDecision]) -> bool:
    """Return whether decisions sum in other orders, or by paths of other sources.

    One order promises equal bits whichever path and phase: a prompt that is computed alone is prefilled, where it was
    extended behind a prefix hit.
    """
    digests = {it.path: it.source_digest for it in before}
    is_changed = any(it.path in digests and digests[it.path] != it.source_digest for it in now)
    return is_changed or _orders(before) != _orders(now)


def _orders(decisions: Sequence[UsedDecision]) -> set[tuple[str, str | None]]:
    """The orders of each operator."""
    return {("attention" if it.phase in ATTENTION_PHASES else it.phase, it.order) for it in decisions}


def _environment(content: Content) -> tuple[object, ...]:
    """All that bits may depend on beside the request and the order of sums."""
    return (content.weights_digest, content.tokenizer_digest, content.server_version, content.fingerprint)


def _text(value: object) -> str:
    """A value in a line; a digest by its first digits."""
    text = "none" if value is None else str(value)
    is_digest = len(text) == 64 and all(char in "0123456789abcdef" for char in text)
    return text[:12] if is_digest else text[:64].encode("ascii", "backslashreplace").decode()
