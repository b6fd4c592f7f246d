"""Writing down what a trusted server answers, so that others can be compared with it."""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta

from kernels.vocabulary.buckets import bucket_of
from qualification.canary.client import CanaryError, Candidate, Model, RequestFailed, RequestTimedOut
from qualification.canary.golden import SCHEMA, Golden, GoldenPrompt, GoldenRequest, Times
from qualification.canary.mix import LEAST_CONTEXT, mix_requests
from qualification.canary.numerics import Reply

ANSWER_TOKENS = 24
# Tokens of recorded prompts: two in each bucket, one beside an edge.
PROMPT_TOKENS = (5, 127, 129, 400, 600, 1900, 2049, 3500, 8193, 20000, 32769)
# Of a prompt whose log probabilities are kept, spread evenly: enough for a mean, few enough for a diff.
_MAX_PLACES = 256
_MAX_SILENT = 2  # prompts in a row without an answer in time: eleven of them would take 22 minutes

_TEXT = (
    "The keeper of the lighthouse wrote down everything that passed. In spring the fishing boats went out before dawn, "
    "and he counted their lamps; in autumn he counted the geese. Nobody had asked him to. When the inspector came he "
    "turned the pages slowly, year by year, and found that every ship which had gone missing was there, with the hour "
    "at which it had last been seen, the wind, and the colour of the sea. "
)
Say = Callable[[int, int, str], None]  # progress: done, total, what


def draw_prompts(candidate: Candidate, model: Model) -> list[GoldenPrompt]:
    """Prompts of every bucket that the context takes, from our own text. Raises RequestFailed and CanaryError."""
    longest = model.max_model_len - ANSWER_TOKENS
    lengths = [length for length in PROMPT_TOKENS if length <= longest]
    known = candidate.tokenize(_TEXT)
    # One text as often as it takes: a prompt of every length begins at another place in it.
    return [
        GoldenPrompt(
            name=f"{bucket_of(length).label}-{length}",
            bucket=bucket_of(length).label,
            token_ids=(known[n % len(known) :] + known * (length // len(known) + 1))[:length],
            max_tokens=ANSWER_TOKENS,
            text="",
            places=places_of(length),
            logprobs=[],
            likeliest=[],
        )
        for n, length in enumerate(lengths)
    ]


def draw_mix(candidate: Candidate, model: Model) -> list[GoldenRequest]:
    """Return the requests of a mix from our own text; none where the context is too short for them.

    Raises RequestFailed.
    """
    return mix_requests(candidate.tokenize(_TEXT)) if model.max_model_len >= LEAST_CONTEXT else []


def places_of(num_tokens: int) -> list[int]:
    """Positions whose log probability is kept: all of a short prompt, else evenly spread and the last one."""
    num_places = min(_MAX_PLACES, num_tokens - 1)
    return [1 + (num_tokens - 2) * n // max(1, num_places - 1) for n in range(num_places)]


def answer(candidate: Candidate, prompt: GoldenPrompt) -> GoldenPrompt:
    """The prompt with what the server makes of it. Raises RequestFailed."""
    text = candidate.complete(prompt.token_ids, prompt.max_tokens)
    scores = candidate.score(prompt.token_ids)
    logprobs = [scores.logprobs[place - 1] for place in prompt.places]
    likeliest = [scores.likeliest[place - 1] for place in prompt.places]
    finite = [value for value in logprobs if value is not None]
    if len(finite) < len(logprobs) or None in likeliest:
        raise RequestFailed(f"{prompt.name} has a log probability that is not finite")
    return GoldenPrompt(
        name=prompt.name,
        bucket=prompt.bucket,
        token_ids=prompt.token_ids,
        max_tokens=prompt.max_tokens,
        text=text,
        places=prompt.places,
        logprobs=[round(value, 5) for value in finite],
        likeliest=[token_id for token_id in likeliest if token_id is not None],
    )


def record(
    candidate: Candidate,
    model: Model,
    prompts: Iterable[GoldenPrompt],
    *,
    fingerprint: Mapping[str, object],
    times: dict[str, Times],
    valid_days: int | None,
    progress: Say,
    model_digests: Mapping[str, str],
    mix: list[GoldenRequest],
) -> Golden:
    """Record the answers of a trusted server. `times` is by bucket, already measured, `mix` is answered.

    Raises RequestFailed.
    """
    prompts = list(prompts)
    answered = []
    for n, prompt in enumerate(prompts):
        progress(n, len(prompts), f"recording {prompt.name}")
        answered.append(answer(candidate, prompt))
    now = datetime.now(UTC)
    ends = None if valid_days is None else (now + timedelta(days=valid_days)).isoformat(timespec="seconds")
    return Golden(
        schema=SCHEMA,
        model=model.name,
        recorded_at=now.isoformat(timespec="seconds"),
        expires_at=ends,
        fingerprint={name: value if isinstance(value, str | int) else None for name, value in fingerprint.items()},
        prompts=answered,
        times=times,
        model_digests=dict(model_digests),
        mix=mix,
        max_model_len=model.max_model_len,
    )


def ask(candidate: Candidate, prompts: Iterable[GoldenPrompt], model: Model, progress: Say) -> list[Reply]:
    """Ask the candidate each golden prompt that fits its context. Raises CanaryError when it hangs."""
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) + prompt.max_tokens <= model.max_model_len]
    replies: list[Reply] = []
    num_silent = 0
    for n, prompt in enumerate(fitting):
        progress(n, len(fitting), f"numerics of {prompt.name}")
        scores, text, error = None, None, None
        try:
            text = candidate.complete(prompt.token_ids, prompt.max_tokens)
            scores = candidate.score(prompt.token_ids)
        except RequestFailed as failure:
            error = str(failure)
            num_silent = num_silent + 1 if isinstance(failure, RequestTimedOut) else 0
            if num_silent == _MAX_SILENT:
                raise CanaryError(f"the server hangs: {num_silent} golden prompts in a row {failure}") from failure
        else:
            num_silent = 0
        replies.append(Reply(prompt, scores, text, error))
    return replies


def fingerprint_of(report: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fingerprint that GET /attention holds. Raises CanaryError."""
    found = report.get("fingerprint")
    if not isinstance(found, Mapping):
        raise CanaryError("/attention has no fingerprint: is the server ready?")
    return found
