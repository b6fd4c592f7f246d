"""A mix: golden requests of every kind, asked all at once and each held against its answer of when it was asked alone.

Prompts asked one after another show no fault of what requests share: rows of a batch, pages, copies of pages, seeds,
penalties, grammars. A chat shows template, special tokens and generation config.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from qualification.canary.client import Candidate, RequestFailed
from qualification.canary.golden import GoldenRequest, MixAnswer
from qualification.canary.numerics import TOLERANCES
from qualification.canary.verdict import Outcome, Stage, Verdict

NUM_ROUNDS = 2  # the second one finds the pages of the first
MIX = "mix"  # in the place of a bucket
_PREFIX_TOKENS, _TAIL_TOKENS = 96, 16  # a few pages that several requests begin with, and what differs behind them
LEAST_CONTEXT = 192  # tokens that the longest of the requests needs, with its answer
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_GREEDY: Mapping[str, object] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
# Texts that spell end tokens of well-known families: where a message may do that, the prompt has fewer tokens.
_SPELLED = "<|im_end|> <|eot_id|> </s> <end_of_turn> <|end|>"


@dataclass(frozen=True, slots=True)
class MixReply:
    """The candidate's answers to one request of a mix; None: an error, named in `error`."""

    request: GoldenRequest
    found: GoldenRequest | None
    error: str | None = None


def mix_requests(known: Sequence[int]) -> list[GoldenRequest]:
    """Return the requests of a mix, without answers, from the tokens of a text."""
    prefix = (list(known) * (1 + _PREFIX_TOKENS // len(known)))[:_PREFIX_TOKENS]

    def prompt(place: int) -> list[int]:
        tail = [known[(place + n) % len(known)] for n in range(_TAIL_TOKENS)]
        return [*prefix, *tail]

    def completion(name: str, token_ids: list[int], *, salt: str = "", **more: object) -> GoldenRequest:
        body = {"prompt": token_ids, **_GREEDY, **more}
        return GoldenRequest(name, _COMPLETIONS, body, salt)

    messages = [
        {"role": "system", "content": "You keep a lighthouse."},
        {"role": "user", "content": f"What did you write down today? {_SPELLED}"},
    ]
    return [
        completion("greedy", prompt(3)),
        completion("another prompt", prompt(5)[_TAIL_TOKENS:]),
        completion("n = 3", prompt(11), temperature=1.0, seed=1, n=3),
        completion("shared prefix", prompt(17)),
        completion("shared prefix, another salt", prompt(17), salt="another"),
        completion("seeded draw", prompt(23), temperature=0.8, top_p=0.9, seed=7, n=2),
        completion("penalties", prompt(29), frequency_penalty=1.0, presence_penalty=0.5),
        completion("grammar", prompt(31), ignore_eos=False, structured_outputs={"regex": "[a-z ]{8,60}"}),
        GoldenRequest("chat", _CHAT, {"messages": messages, "max_tokens": 24, "seed": 5}),
    ]


def record_mix(candidate: Candidate, requests: Iterable[GoldenRequest]) -> tuple[list[GoldenRequest], list[str]]:
    """Ask each request alone. Returns those that are answered, and what kept the others from it."""
    answered, refused = [], []
    for request in requests:
        try:
            answered.append(candidate.answer(request))
        except RequestFailed as error:  # such as a model without a chat template
            refused.append(f"{request.name}: {error}")
    return answered, refused


def ask_mix(
    candidate: Candidate, requests: Sequence[GoldenRequest], progress: Callable[[int, int, str], None]
) -> list[MixReply]:
    """Ask all requests at once, and that as often as there are rounds."""
    replies: list[MixReply] = []
    with ThreadPoolExecutor(len(requests)) as threads:
        for n in range(NUM_ROUNDS):
            progress(n, NUM_ROUNDS, f"{len(requests)} requests at once")
            replies += threads.map(lambda request: _ask(candidate, request), requests)
    return replies


def _ask(candidate: Candidate, request: GoldenRequest) -> MixReply:
    try:
        return MixReply(request, candidate.answer(request))
    except RequestFailed as error:
        return MixReply(request, None, str(error))


def judge_mix(replies: Sequence[MixReply], *, dtype: str | None, is_exact: bool) -> Verdict:
    """Return the verdict on a mix.

    is_exact  answers must be equal; else a greedy one may depart where both tokens are about as likely, and in 16 bits
              a drawn or penalised one, if not all answers of its request do from the first token on
    """
    if dtype not in TOLERANCES:
        return Verdict(Stage.NUMERICS, Outcome.NO_DATA, f"no tolerance is known for dtype {dtype}", bucket=MIX)
    worst = TOLERANCES[dtype].worst
    wrong = [
        f"{reply.request.name}: {why}"
        for reply in replies
        if reply.found is not None
        and (why := _why_wrong(reply.request, reply.found, worst=worst, is_exact=is_exact or _is_even(reply, dtype)))
    ]
    unanswered = [f"{reply.request.name}: {reply.error}" for reply in replies if reply.error is not None]
    num_names = len({reply.request.name for reply in replies})
    detail = f"{num_names} requests at once, {NUM_ROUNDS} times, each beside its answer alone"
    if wrong:
        return Verdict(Stage.NUMERICS, Outcome.FAIL, detail, (*dict.fromkeys(wrong), *unanswered), MIX)
    if unanswered:
        return Verdict(Stage.NUMERICS, Outcome.NO_DATA, detail, tuple(unanswered), MIX)
    return Verdict(Stage.NUMERICS, Outcome.PASS, detail, bucket=MIX)


def _is_even(reply: MixReply, dtype: str) -> bool:
    """Return whether the answers of a request are the same wherever they are computed.

    In fp32 rounding as good as never decides between two draws; greedily chosen tokens may be equally likely.
    """
    return dtype == "fp32" and not reply.request.is_greedy


def _why_wrong(golden: GoldenRequest, found: GoldenRequest, *, worst: float, is_exact: bool) -> str | None:
    if golden.num_prompt_tokens != found.num_prompt_tokens:
        return f"its prompt has {found.num_prompt_tokens} tokens, {golden.num_prompt_tokens} were recorded"
    if len(golden.answers) != len(found.answers):
        return f"{len(found.answers)} answers, {len(golden.answers)} were recorded"
    pairs = list(zip(golden.answers, found.answers, strict=True))
    for number, (before, now) in enumerate(pairs):
        apart = max((abs(a - b) for a, b in _common_logprobs(before, now)), default=0.0)
        if apart > worst:
            return f"answer {number}: log probabilities of the same tokens are {apart:.3g} apart"
    if is_exact:
        changed = [number for number, (before, now) in enumerate(pairs) if before != now and before.text != now.text]
        return f"answer {changed[0]} is another one" if changed else None
    if golden.is_greedy:
        for number, (before, now) in enumerate(pairs):
            place = _departure(before, now)
            if place is not None and abs(before.logprobs[place] - now.logprobs[place]) > 2 * worst:
                return f"answer {number} departs at token {place}, where its tokens are not equally likely"
        return None
    if golden.path == _COMPLETIONS and all(_departure(before, now) == 0 for before, now in pairs):
        return "no answer begins as it was recorded"
    return None


def _common_logprobs(before: MixAnswer, now: MixAnswer) -> list[tuple[float, float]]:
    end = _departure(before, now)
    return list(zip(before.logprobs[:end], now.logprobs[:end], strict=False))


def _departure(before: MixAnswer, now: MixAnswer) -> int | None:
    """Return the place of the first token that differs, None where there is none."""
    pairs = zip(before.token_ids, now.token_ids, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), None)
