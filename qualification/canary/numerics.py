"""Compare a server with the reference: log probabilities of given tokens, and greedy answers."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from qualification.canary.golden import GoldenPrompt
from qualification.canary.verdict import Outcome, Stage, Verdict

# Greedy answers elsewhere, or in 16 bits: a near-tie may fall otherwise, and the rest of the answer with it. A wrong
# kernel disagrees from the first tokens on.
MIN_AGREEMENT = 0.7


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits of |log probability - the reference's| in nats, over the places of a bucket's prompts."""

    mean: float
    worst: float


# Sums of another order differ by some rounding units of the logits, which are 10 to 30: 2^-24 of them in fp32, 2^-11 in
# fp16, 2^-8 in bf16; the errors of a hundred operations in a row add up like their root. Measured (CPU): the demo model
# in bf16 is off from fp32 by 0.014 in the mean and 0.09 at worst, over 1,538 places.
TOLERANCES = {
    "fp32": Tolerance(1e-4, 1e-2),
    "fp16": Tolerance(5e-3, 0.25),
    "bf16": Tolerance(2e-2, 0.5),
}


@dataclass(frozen=True, slots=True)
class QuantizedTolerance:
    """Limits of a candidate in 8 or 4 bits beside answers of 16: it computes another model, close to that one.

    mean      of |log probability - the reference's|, nats
    same_top  the least share of places at which both have the same likeliest token
    """

    mean: float
    same_top: float


# Measured (CPU): the demo model in fp32, its products rounded to 8 bits by `--quantization fp8`, is off from itself by
# 0.07 in the mean, and has the same likeliest token at 98% of 130 places and 93% of 384. It is small: larger models
# move less. Those of 4 bits were not measured; a wrong scale gives nats, and a few percent of the tokens.
QUANTIZED = {8: QuantizedTolerance(0.15, 0.85), 4: QuantizedTolerance(0.3, 0.75)}


@dataclass(frozen=True, slots=True)
class QuantizedFormats:
    """The formats of a candidate's weights, of 8 or 4 bits, by their names."""

    names: tuple[str, ...]

    @property
    def limits(self) -> QuantizedTolerance:
        """Return the limits of the fewest bits among them."""
        return QUANTIZED[4 if any(name.startswith("int4") for name in self.names) else 8]


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of one prompt's tokens after the first, with the likeliest token at each place."""

    logprobs: list[float | None]  # None: not finite
    likeliest: list[int | None]


@dataclass(frozen=True, slots=True)
class Reply:
    """The candidate's answer to one golden prompt; None: an error, named in `error`."""

    prompt: GoldenPrompt
    scores: Scores | None
    text: str | None
    error: str | None = None


def judge_numerics(
    replies: Sequence[Reply],
    *,
    dtype: str | None,
    is_same_machine: bool,
    is_same_build: bool = False,
    quantized: QuantizedFormats | None = None,
) -> list[Verdict]:
    """A verdict for each bucket, shortest first; without any prompt one that there is no data.

    quantized      of the candidate, where the reference is the same model in 16 bits: limits of its own, on divergence
                   and on the likeliest tokens, and greedy answers, which part sooner or later, decide nothing
    is_same_build  the operator says that nothing has changed that computes: then 16 bits round as they did, and a
                   difference that rounding could explain is still one
    """
    buckets = list(dict.fromkeys(reply.prompt.bucket for reply in replies))
    if not buckets:
        return [Verdict(Stage.NUMERICS, Outcome.NO_DATA, "there is no golden prompt that fits the context")]
    if quantized is not None:
        return [
            _judge_quantized(bucket, [reply for reply in replies if reply.prompt.bucket == bucket], quantized)
            for bucket in buckets
        ]
    if dtype not in TOLERANCES:
        return [Verdict(Stage.NUMERICS, Outcome.NO_DATA, f"no tolerance is known for dtype {dtype}")]
    limits = TOLERANCES["fp32" if is_same_build else dtype]
    is_exact = is_same_build or (is_same_machine and dtype == "fp32")
    return [
        _judge_bucket(bucket, [reply for reply in replies if reply.prompt.bucket == bucket], limits, is_exact)
        for bucket in buckets
    ]


def _judge_bucket(bucket: str, replies: Sequence[Reply], limits: Tolerance, is_exact: bool) -> Verdict:
    unanswered = [f"{reply.prompt.name}: {reply.error}" for reply in replies if reply.error is not None]
    differences, num_equal_top, nonfinite = _differences(replies)
    answered = [reply for reply in replies if reply.text is not None]
    wrong, late = list(nonfinite), []
    detail = f"{len(replies)} prompts"
    if differences:
        mean, worst = statistics.fmean(differences), max(differences)
        detail += (
            f", {len(differences)} places: |log p - reference| {mean:.2g} in the mean (at most {limits.mean:g}), "
            f"{worst:.2g} at worst ({limits.worst:g}), {num_equal_top / len(differences):.1%} the same likeliest token"
        )
        if mean > limits.mean or worst > limits.worst:
            wrong.append(f"log probabilities are off by {mean:.3g} in the mean and {worst:.3g} at worst")
    if answered:
        agreement = statistics.fmean(_agreement(reply) for reply in answered)
        late = [_difference(reply) for reply in answered if reply.text != reply.prompt.text]
        detail += f"; {len(answered) - len(late)} of {len(answered)} greedy answers equal"
        if late if is_exact else agreement < MIN_AGREEMENT:
            wrong += late
    if wrong:
        return Verdict(Stage.NUMERICS, Outcome.FAIL, detail, (*wrong, *unanswered), bucket)
    if unanswered or not differences:  # who did not answer was not wrong
        reasons = (*unanswered, *(() if differences else ("no log probability was compared",)))
        return Verdict(Stage.NUMERICS, Outcome.NO_DATA, detail, reasons, bucket)
    return Verdict(Stage.NUMERICS, Outcome.PASS, detail, tuple(late), bucket)


def _judge_quantized(bucket: str, replies: Sequence[Reply], quantized: QuantizedFormats) -> Verdict:
    limits = quantized.limits
    unanswered = [f"{reply.prompt.name}: {reply.error}" for reply in replies if reply.error is not None]
    differences, num_equal_top, wrong = _differences(replies)
    detail = f"{', '.join(quantized.names)} beside answers of 16 bits, under limits of its own: {len(replies)} prompts"
    if differences:
        mean, share = statistics.fmean(differences), num_equal_top / len(differences)
        detail += (
            f", {len(differences)} places: |log p - reference| {mean:.2g} in the mean (at most {limits.mean:g}), "
            f"{share:.1%} the same likeliest token (at least {limits.same_top:.0%})"
        )
        if mean > limits.mean:
            wrong.append(f"log probabilities are off by {mean:.3g} in the mean, at most {limits.mean:g} may be")
        if share < limits.same_top:
            wrong.append(f"the likeliest token is the same at {share:.1%}, at least {limits.same_top:.0%} must be")
    answered = [reply for reply in replies if reply.text is not None]
    detail += f"; {sum(reply.text == reply.prompt.text for reply in answered)} of {len(answered)} greedy answers equal"
    if wrong:
        return Verdict(Stage.NUMERICS, Outcome.FAIL, detail, (*wrong, *unanswered), bucket)
    if unanswered or not differences:
        reasons = (*unanswered, *(() if differences else ("no log probability was compared",)))
        return Verdict(Stage.NUMERICS, Outcome.NO_DATA, detail, reasons, bucket)
    return Verdict(Stage.NUMERICS, Outcome.PASS, detail, bucket=bucket)


def _differences(replies: Sequence[Reply]) -> tuple[list[float], int, list[str]]:
    """|difference| at each recorded place, how many places have the same likeliest token, and what is not finite."""
    found, num_equal, nonfinite = [], 0, []
    for reply in replies:
        if reply.scores is None:
            continue
        for place, expected, likeliest in zip(
            reply.prompt.places, reply.prompt.logprobs, reply.prompt.likeliest, strict=True
        ):
            got = reply.scores.logprobs[place - 1]
            if got is None:
                nonfinite.append(f"{reply.prompt.name}: the log probability of token {place} is not finite")
                break
            found.append(abs(got - expected))
            num_equal += reply.scores.likeliest[place - 1] == likeliest
    return found, num_equal, nonfinite


def _agreement(reply: Reply) -> float:
    """Share of the expected text that the candidate's begins with; of an empty one, whether it is empty too."""
    if not reply.prompt.text:
        return float(reply.text == "")
    return _common_prefix(reply) / len(reply.prompt.text)


def _difference(reply: Reply) -> str:
    return f"{reply.prompt.name}: differs from character {_common_prefix(reply)} of {len(reply.prompt.text)} on"


def _common_prefix(reply: Reply) -> int:
    """Characters that both texts begin with."""
    pairs = zip(reply.prompt.text, reply.text or "", strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
