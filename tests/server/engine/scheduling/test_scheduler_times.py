"""Times under an order of prompts, simulated with the step costs of an 8B on an H200."""

import random
from dataclasses import dataclass, field

from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.sequence import Batch, Sequence
from server.protocol.messages import SamplingParams

PROMPT_TOKEN_S = 20.5e-6  # matmuls: 168 ms for 8192 tokens
DECODE_STEP_S = 5e-3  # reads the weights once; under 250 prompt tokens cost no less
ATTENTION_FLOPS = 500e12
LONG = 32_000


def step_s(batch: Batch) -> float:
    spans = [(n, context) for n, context in zip(batch.query_lens, batch.context_lens, strict=True) if n > 1]
    pairs = sum(n * (context - n / 2) for n, context in spans)
    return max(DECODE_STEP_S, PROMPT_TOKEN_S * batch.num_tokens) + pairs * 4 * 4096 * 32 / ATTENTION_FLOPS


@dataclass(frozen=True)
class Arrival:
    at: float
    num_prompt: int
    num_tokens: int = 1


@dataclass
class Times:
    ttft: list[float]
    gaps: list[float] = field(default_factory=list)  # between tokens of one sequence


def simulate(arrivals: list[Arrival], interleaved: int | None = 2048) -> Times:
    subject = Scheduler(SchedulerLimits(33_000, 256, 8192, interleaved), PagePool(12_500, 64))
    times, last = Times([0.0] * len(arrivals)), [0.0] * len(arrivals)
    now, num_arrived = 0.0, 0
    while num_arrived < len(arrivals) or not subject.is_idle:
        if subject.is_idle:
            now = max(now, arrivals[num_arrived].at)
        while num_arrived < len(arrivals) and arrivals[num_arrived].at <= now:
            it = arrivals[num_arrived]
            params = SamplingParams(max_tokens=it.num_tokens)
            subject.add(Sequence(str(num_arrived), [0] * it.num_prompt, it.num_prompt, params, 0, it.at))
            num_arrived += 1
        batch = subject.plan(now)
        assert batch is not None
        now += step_s(batch)
        subject.advance(batch)
        subject.settle(batch)
        for row in batch.sampled_rows:
            seq, index = batch.sequences[row], int(batch.sequences[row].request_id)
            seq.tokens.append(1)
            if seq.num_generated == 1:
                times.ttft[index] = now - arrivals[index].at
            else:
                times.gaps.append(now - last[index])
            last[index] = now
            if seq.num_generated == seq.sampling.max_tokens:
                subject.finish(seq)
    return times


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def test_a_short_prompt_waits_for_the_running_step_and_its_own() -> None:
    (alone,) = simulate([Arrival(0.0, LONG)]).ttft
    long, early, late = simulate([Arrival(0.0, LONG), Arrival(0.02, 128), Arrival(0.4, 128)]).ttft
    assert alone > 1.0  # what both would wait for in the order of arrival
    assert early < 0.27
    assert late < 0.27
    assert long < 1.03 * alone


def test_neither_a_stream_nor_a_short_prompt_waits_long() -> None:
    streaming = Arrival(0.0, 100, num_tokens=300)
    times = simulate([streaming, Arrival(0.1, LONG), Arrival(0.15, 128), Arrival(0.5, 128)])
    assert max(times.ttft[2:]) < 0.2
    assert max(times.gaps) < 0.11
    assert times.ttft[1] < 1.3
    unbounded = simulate([streaming, Arrival(0.1, LONG), Arrival(0.15, 128)], interleaved=None)
    assert max(unbounded.gaps) > 0.3


def test_a_long_prompt_gets_through_a_flood_of_short_ones() -> None:
    flood = [Arrival(0.0125 * i, 512) for i in range(1, 1000)]  # 41k tokens a second of the 48k that fit
    times = simulate([Arrival(0.0, LONG), *flood])
    assert times.ttft[0] < 5.0
    assert p99(times.ttft[1:]) < 1.0


def test_at_half_load_short_prompts_gain_and_long_lose_little() -> None:
    rng, now, arrivals = random.Random(7), 0.0, []
    for _ in range(700):
        now += rng.expovariate(8.0)
        num_prompt = min(LONG, max(16, int(rng.lognormvariate(6.6, 1.5))))
        arrivals.append(Arrival(now, num_prompt, min(300, max(8, int(rng.lognormvariate(4.5, 0.8))))))
    times = simulate(arrivals)
    # In the order of arrival and without a bound these are 1.6 s, 1.6 s, 2.5 s, and 0.20 s between tokens.
    by_length = [(arrival.num_prompt, ttft) for arrival, ttft in zip(arrivals, times.ttft, strict=True)]
    assert p99([ttft for length, ttft in by_length if length <= 2048]) < 0.3
    assert p99([ttft for length, ttft in by_length if 2048 < length <= 8192]) < 1.3
    assert max(ttft for length, ttft in by_length if length > 8192) < 3.2
    assert p99(times.gaps) < 0.1
