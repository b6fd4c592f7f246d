"""The scenarios of `hallmark bench serve`, as rounds of requests that each side gets in turn. No torch."""

from dataclasses import dataclass

import msgspec

from kernels.vocabulary.buckets import bucket_of
from qualification.load.sample import LoadRequest
from qualification.load.served import Scenario, ServePlan
from qualification.load.trace import Lengths, Seed, at_once, open_loop, shared_prefix, stratified

_LONG_TOKENS = 8192  # from here on a third of the samples do
_MIN_LONG_SAMPLES = 5  # a median needs them
_WARM_REQUESTS, _WARM_TOKENS = 64, 8
_PREFIX_OWN_TOKENS, _PREFIX_FOLLOWERS = 64, 4


@dataclass(frozen=True, slots=True)
class ServeCase:
    """A scenario. Each round is sent to one side, then to the other, after the round before has ended."""

    scenario: Scenario
    x: float  # tokens of a prompt, streams, or requests a second
    rounds: tuple[tuple[LoadRequest, ...], ...]
    warm_up: tuple[LoadRequest, ...]  # sent first, not counted
    is_in_turn: bool = False  # within a round each request waits for the answer to the one before

    @property
    def name(self) -> str:
        return f"{self.scenario.value} {self.x:g}"

    @property
    def longest(self) -> int:
        """Tokens of the longest request with its answer."""
        return max(len(request.token_ids) + request.max_tokens for part in self.rounds for request in part)

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.rounds))

    def groups(self, num_prompt_tokens: int, label: str) -> tuple[str, ...]:
        """The rows that a request counts in."""
        if self.scenario is Scenario.MIX:
            return "all", bucket_of(num_prompt_tokens).label
        return (label or "all",)


def cases_of(plan: ServePlan, salt: str) -> list[ServeCase]:
    """Return each case of the plan; `salt` decides the token ids and nothing else."""
    wanted = set(plan.scenarios)
    cases: list[ServeCase] = []
    if Scenario.TTFT in wanted:
        cases += [_ttft(plan, salt, length) for length in plan.lengths]
    if Scenario.TPOT in wanted:
        tokens = plan.tpot_input, plan.tpot_output
        cases += [_together(Scenario.TPOT, plan, salt, batch, plan.tpot_rounds, tokens) for batch in plan.batches]
    if Scenario.THROUGHPUT in wanted:
        rounds, tokens = plan.throughput_rounds, (plan.throughput_input, plan.throughput_output)
        cases += [_together(Scenario.THROUGHPUT, plan, salt, streams, rounds, tokens) for streams in plan.streams]
    if Scenario.MIX in wanted:
        cases.append(_mix(plan, salt))
    if Scenario.PREFIX in wanted:
        cases.append(_prefix(plan, salt))
    return cases


def _ttft(plan: ServePlan, salt: str, length: int) -> ServeCase:
    num_samples = plan.samples if length < _LONG_TOKENS else max(_MIN_LONG_SAMPLES, plan.samples // 3)
    seed = _seed(plan, salt, f"ttft {length}")
    requests = at_once(seed, num_requests=num_samples + 2, num_input=length, num_output=1)
    return ServeCase(Scenario.TTFT, length, tuple((request,) for request in requests[2:]), tuple(requests[:2]), True)


def _together(
    scenario: Scenario, plan: ServePlan, salt: str, streams: int, num_rounds: int, lengths: tuple[int, int]
) -> ServeCase:
    """`streams` requests at once in each round; `lengths`: tokens in and out."""
    rounds = tuple(
        tuple(
            at_once(
                _seed(plan, salt, f"{scenario.value} {streams} {n}"),
                num_requests=streams,
                num_input=lengths[0],
                num_output=lengths[1],
            )
        )
        for n in range(num_rounds + 1)
    )
    return ServeCase(scenario, streams, rounds[1:], _shortened(rounds[0]))


def _mix(plan: ServePlan, salt: str) -> ServeCase:
    each = -(-plan.requests // plan.mix_rounds)
    rounds = tuple(tuple(_mixed(plan, _seed(plan, salt, f"mix {n}"), each)) for n in range(plan.mix_rounds + 1))
    return ServeCase(Scenario.MIX, plan.rate, rounds[1:], _shortened(rounds[0][:16]))


def _mixed(plan: ServePlan, seed: Seed, num_requests: int) -> list[LoadRequest]:
    if plan.mix_lengths:
        num_each = -(-num_requests // len(plan.mix_lengths))
        return stratified(seed, rate=plan.rate, lengths=plan.mix_lengths, num_each=num_each, num_output=plan.mix_output)
    return open_loop(
        seed,
        rate=plan.rate,
        num_requests=num_requests,
        inputs=Lengths(plan.mix_input, plan.mix_sigma, plan.mix_input_most),
        outputs=Lengths(plan.mix_output, plan.mix_sigma, plan.mix_output_most),
    )


def _prefix(plan: ServePlan, salt: str) -> ServeCase:
    rounds = tuple(
        tuple(
            shared_prefix(
                _seed(plan, salt, f"prefix {n}"),
                num_followers=_PREFIX_FOLLOWERS,
                num_shared=plan.prefix_tokens,
                num_own=_PREFIX_OWN_TOKENS,
                num_output=1,
            )
        )
        for n in range(plan.prefix_groups + 1)
    )
    return ServeCase(Scenario.PREFIX, plan.prefix_tokens, rounds[1:], rounds[0], is_in_turn=True)


def _seed(plan: ServePlan, salt: str, of: str) -> Seed:
    return Seed(f"{plan.seed} {of}", salt, plan.vocab_size)


def _shortened(requests: tuple[LoadRequest, ...]) -> tuple[LoadRequest, ...]:
    return tuple(
        msgspec.structs.replace(request, max_tokens=min(_WARM_TOKENS, request.max_tokens))
        for request in requests[:_WARM_REQUESTS]
    )
