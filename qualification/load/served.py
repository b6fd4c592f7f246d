"""Results of one load on several servers, as `hallmark bench serve` writes them. No torch."""

from enum import Enum

import msgspec

from qualification.load.sample import ClientLag


class Scenario(Enum):
    TTFT = "ttft"  # one request at a time, one length
    TPOT = "tpot"  # so many streams together, tokens while all of them run
    THROUGHPUT = "throughput"  # so many requests at once
    MIX = "mix"  # open loop: Poisson arrivals, log-normal lengths
    PREFIX = "prefix"  # one at a time, behind a prefix that is new (cold) or was just seen (warm)


class ServePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the load. Results are compared only when their plans are equal."""

    scenarios: tuple[Scenario, ...] = tuple(Scenario)
    lengths: tuple[int, ...] = (128, 512, 2048, 8192, 32768)  # of ttft
    samples: int = 21  # of each length; a third from 8192 tokens on
    batches: tuple[int, ...] = (1, 8, 32)  # of tpot
    tpot_input: int = 128
    tpot_output: int = 128
    tpot_rounds: int = 5
    streams: tuple[int, ...] = (128, 256)  # of throughput
    throughput_input: int = 512
    throughput_output: int = 128
    throughput_rounds: int = 2
    rate: float = 4.0  # requests a second of mix
    requests: int = 300
    mix_input: int = 512  # median
    mix_input_most: int = 8192
    mix_output: int = 64  # median
    mix_output_most: int = 256
    mix_sigma: float = 1.0
    mix_rounds: int = 3
    mix_lengths: tuple[int, ...] = ()  # instead of log-normal inputs: these, equally often, so that each has its p99
    prefix_tokens: int = 2048
    prefix_groups: int = 7
    vocab_size: int = 2048
    seed: int = 20261121


class ServeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case, or one group of its requests, on one side. Milliseconds; None: NO_DATA, too few samples carry it."""

    case: str
    scenario: Scenario
    x: float
    group: str
    num_requests: int
    num_errors: int
    first_error: str | None
    ttft_ms: list[float]  # every sample
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    tpot_ms: list[float]  # one a request: the mean of its tokens; in `tpot` of those while all streams ran
    tpot_p50_ms: float | None
    num_gaps: int  # between reads that held tokens, within an answer
    gap_p50_ms: float | None
    gap_p99_ms: float | None
    tokens_per_read: float | None  # above 1 a gap is not the time of one token
    output_tokens: int
    output_tokens_per_s: float | None  # of the whole case; None in a part of it
    goodput_per_s: float | None  # answers a second that kept the objectives
    good_share: float
    is_counted_by_server: bool  # tokens; else one was assumed for each event
    lag: ClientLag


class ServedSide(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    url: str
    model: str
    rows: list[ServeRow]
    skipped: list[str]  # cases, each with the reason


class ServeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    command: str
    date: str  # ISO 8601, UTC
    plan: ServePlan
    salt: str  # of the token ids
    sides: list[ServedSide]
