"""Rows of numbers from the samples of a load, as data. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.serve.cases import ServeCase
from kernels.vocabulary.buckets import bucket_of
from qualification.common.quantiles import quantile
from qualification.load.client import joined
from qualification.load.sample import ClientLag, LoadResult, Sample
from qualification.load.served import Scenario, ServeRow

_MS = 1e3


@dataclass(frozen=True, slots=True)
class LatencyObjectives:
    """Latency limits that a user sets; an answer within all of them is good."""

    ttft_ms: Mapping[str, float]  # by bucket; none for a bucket: any time will do
    tpot_ms: float

    def is_good(self, sample: Sample) -> bool:
        if sample.error is not None or sample.ttft_s is None:
            return False
        limit_ms = self.ttft_ms.get(bucket_of(sample.num_prompt_tokens).label, math.inf)
        return sample.ttft_s * _MS <= limit_ms and (sample.tpot_s or 0.0) * _MS <= self.tpot_ms


def rows_of(case: ServeCase, rounds: Sequence[LoadResult], objectives: LatencyObjectives) -> list[ServeRow]:
    """A row for each group, in the order of prompts' lengths."""
    steady = [_steady_tpots(result.samples) if case.scenario is Scenario.TPOT else None for result in rounds]
    tpots = [
        tpot
        for result, found in zip(rounds, steady, strict=True)
        for tpot in (found if found is not None else [sample.tpot_s for sample in result.samples])
    ]
    whole = joined(rounds)
    duration_s = math.fsum(result.duration_s for result in rounds)
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(whole.samples):
        for group in case.groups(sample.num_prompt_tokens, sample.label):
            groups.setdefault(group, []).append(index)
    shortest = {group: min(whole.samples[i].num_prompt_tokens for i in found) for group, found in groups.items()}
    return [
        _row(
            case,
            group,
            [whole.samples[index] for index in groups[group]],
            [tpots[index] for index in groups[group]],
            duration_s=duration_s if group == "all" and not case.is_in_turn else None,
            objectives=objectives,
            lag=whole.lag,
        )
        for group in sorted(groups, key=lambda group: (group != "all", shortest[group], group))
    ]


def _row(
    case: ServeCase,
    group: str,
    samples: Sequence[Sample],
    tpots: Sequence[float | None],
    *,
    duration_s: float | None,
    objectives: LatencyObjectives,
    lag: ClientLag,
) -> ServeRow:
    ttft = [sample.ttft_s * _MS for sample in samples if sample.ttft_s is not None]
    tpot = [value * _MS for value in tpots if value is not None]
    good = [sample for sample in samples if sample.error is None]
    gaps = [gap * _MS for sample in good for gap in sample.gaps_s]
    num_tokens, num_good = sum(sample.num_tokens for sample in good), sum(map(objectives.is_good, samples))
    return ServeRow(
        case=case.name,
        scenario=case.scenario,
        x=case.x,
        group=group,
        num_requests=len(samples),
        num_errors=len(samples) - len(good),
        first_error=next((sample.error for sample in samples if sample.error is not None), None),
        ttft_ms=[round(value, 3) for value in ttft],
        ttft_p50_ms=quantile(ttft, 0.5),
        ttft_p90_ms=quantile(ttft, 0.9),
        ttft_p99_ms=quantile(ttft, 0.99),
        tpot_ms=[round(value, 4) for value in tpot],
        tpot_p50_ms=quantile(tpot, 0.5),
        num_gaps=len(gaps),
        gap_p50_ms=quantile(gaps, 0.5),
        gap_p99_ms=quantile(gaps, 0.99),
        tokens_per_read=_tokens_per_read(good),
        output_tokens=num_tokens,
        output_tokens_per_s=num_tokens / duration_s if duration_s else None,
        goodput_per_s=num_good / duration_s if duration_s else None,
        good_share=num_good / len(samples),
        is_counted_by_server=all(sample.has_usage for sample in good),
        lag=lag,
    )


def _tokens_per_read(samples: Sequence[Sample]) -> float | None:
    num_reads = sum(len(sample.read_at) for sample in samples)
    return sum(sample.num_tokens for sample in samples) / num_reads if num_reads else None


def _steady_tpots(samples: Sequence[Sample]) -> list[float | None]:
    """Time of a token while every stream of the round runs: from the last first token to the first last one.

    The first tokens of some streams come between the prompts of others, which is no decoding.
    """
    running = [sample for sample in samples if sample.error is None and len(sample.read_at) > 1]
    begin = max((sample.read_at[0] for sample in running), default=0.0)
    end = min((sample.read_at[-1] for sample in running), default=0.0)
    return [_tpot_between(sample, begin, end) for sample in samples]


def _tpot_between(sample: Sample, begin: float, end: float) -> float | None:
    reads = [at for at in sample.read_at if begin <= at <= end]
    if sample.error is not None or len(reads) < 2:
        return None
    tokens_per_read = (sample.num_tokens - 1) / (len(sample.read_at) - 1)
    return (reads[-1] - reads[0]) / ((len(reads) - 1) * tokens_per_read)
