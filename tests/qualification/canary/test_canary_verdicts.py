"""Verdicts of a canary on numbers, without any server."""

import math
import random
import re
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace as replace_fields

from qualification.canary.golden import (
    GoldenError,
    GoldenPrompt,
    GoldenRequest,
    MixAnswer,
    Times,
    check_date,
    load_golden,
    shipped_golden,
)
from qualification.canary.kernels import judge_kernels
from qualification.canary.mix import MixReply, judge_mix
from qualification.canary.numerics import QuantizedFormats, Reply, Scores, judge_numerics
from qualification.canary.performance import Pairs, Rules, judge_performance
from qualification.canary.plan import Reviewed, dtype_of, judge_plan, reviewed_matrix
from qualification.canary.report import Result, as_junit, as_markdown
from qualification.canary.verdict import Outcome, Stage, Verdict, exit_code, judge_service
from qualification.evidence.gpu_folder import gpu_folder
from qualification.evidence.matrix import save_matrix
from support.qualification_fakes import DECODE, MACHINE, SHAPE, evidence, path
from support.scripted_server import plan_row

RULES = Rules(num_looks=1, lengths=(96,))
NOT_PROVEN = ("unproven", "stale", "failed", "quarantined", "a word of tomorrow")


EXPIRES = datetime(2026, 11, 20, 12, tzinfo=UTC)
INSTANT = timedelta(microseconds=1)


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=9)), timezone(timedelta(hours=-8))])
def test_a_golden_file_is_good_up_to_its_instant(zone: timezone) -> None:
    golden = replace_fields(load_golden(shipped_golden("demo")), expires_at=EXPIRES.astimezone(zone).isoformat())
    check_date(golden, EXPIRES - INSTANT)
    check_date(replace_fields(golden, expires_at=None), EXPIRES + timedelta(days=10_000))
    for now in (EXPIRES, EXPIRES + INSTANT):
        with pytest.raises(GoldenError, match=r"expired at .* record it anew"):
            check_date(golden, now)


def verdicts(**outcomes: Outcome) -> list[Verdict]:
    return [Verdict(Stage[stage.upper()], outcome, "") for stage, outcome in outcomes.items()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 4),
        ({"plan": Outcome.PASS}, 0),
        ({"plan": Outcome.PASS, "performance": Outcome.SKIPPED}, 0),
        ({"performance": Outcome.SKIPPED}, 4),
        ({"plan": Outcome.PASS, "performance": Outcome.NO_DATA}, 4),
        ({"plan": Outcome.NO_DATA, "performance": Outcome.FAIL}, 2),
        ({"plan": Outcome.FAIL, "performance": Outcome.FAIL}, 3),
        ({"service": Outcome.FAIL, "plan": Outcome.PASS}, 3),
        ({"plan": Outcome.FAIL, "numerics": Outcome.FAIL, "performance": Outcome.FAIL}, 1),
    ],
)
def test_the_gravest_verdict_is_the_exit_code(given: dict[str, Outcome], expected: int) -> None:
    assert exit_code(verdicts(**given)) == expected


# --- the plan ---------------------------------------------------------------------------------------------------------


PROVISIONAL, PROVEN = [plan_row()], [plan_row(status="proven")]


@pytest.mark.parametrize(
    ("rows", "reviewed", "digest", "outcome"),
    [
        *[([plan_row(status=status)], None, None, Outcome.FAIL) for status in NOT_PROVEN],
        ([], None, None, Outcome.NO_DATA),
        ([{"shape": "s"}], None, None, Outcome.NO_DATA),
        (PROVISIONAL, Reviewed("abc"), "abcdef", Outcome.FAIL),
        (PROVEN, Reviewed("abc"), "abcdef", Outcome.PASS),
        (PROVEN, Reviewed("abc"), None, Outcome.FAIL),
    ],
)
def test_a_plan_passes_with_proof_by_the_reviewed_matrix(
    rows: list[dict[str, object]], reviewed: Reviewed | None, digest: str | None, outcome: Outcome
) -> None:
    assert judge_plan(rows, must_be_reviewed=False, reviewed=reviewed, digest=digest).outcome is outcome


MACHINE_FIELDS = asdict(MACHINE) | {"device": MACHINE.device.value}  # as GET /attention gives them


def test_plan_with_another_path_than_reviewed_is_named(tmp_path: Path) -> None:
    fast, slow = path("fast"), path("slow")
    known = [evidence(SHAPE, fast, 5.0), evidence(SHAPE, slow, 9.0), evidence(DECODE, slow)]
    save_matrix(tmp_path / gpu_folder(MACHINE.gpu) / "a.json", known)
    reviewed = reviewed_matrix(tmp_path, MACHINE_FIELDS)
    rows = [
        plan_row(shape=str(SHAPE), path="fast", status="proven"),
        plan_row(shape=str(DECODE), path="slow", status="proven"),
    ]
    assert judge_plan(rows, must_be_reviewed=False, reviewed=reviewed, digest=reviewed.digest).outcome is Outcome.PASS
    rows[0] = rows[0] | {"path": "slow"}
    verdict = judge_plan(rows, must_be_reviewed=False, reviewed=reviewed, digest=reviewed.digest)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.reasons == (f"{SHAPE}: slow serves, the reviewed matrix chooses fast",)
    missing = plan_row(shape=str(replace(SHAPE, window=64)), path="fast", status="proven")
    verdict = judge_plan([missing], must_be_reviewed=False, reviewed=reviewed, digest=reviewed.digest)
    assert "the reviewed matrix chooses no path" in verdict.reasons[0]


def test_folder_without_a_matrix_for_the_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no matrix for Test CPU"):
        reviewed_matrix(tmp_path, MACHINE_FIELDS)
    file = tmp_path / gpu_folder(MACHINE.gpu) / "a.json"
    save_matrix(file, [evidence(SHAPE, path("fast"))])
    file.write_text(file.read_text().replace("fast", "slow"))
    with pytest.raises(ValueError, match="does not match its digest"):
        reviewed_matrix(tmp_path, MACHINE_FIELDS)


def test_what_a_server_says_cannot_break_the_reports() -> None:
    result = Result("http://new", "http://old", "2026-11-22T00:00:00+00:00")
    words = "a|b\x00\x1b[31m <&> c\nd"
    result.verdicts.append(Verdict(Stage.SERVICE, Outcome.FAIL, words, (words,)))
    case = ElementTree.fromstring(as_junit(result))[0][0]
    assert case.get("message", "").startswith("a|b??[31m <&> c")
    row = as_markdown(result).splitlines()[-1]
    assert row.startswith("| service |  | fail | a\\|b")
    assert row.count("<br>") == 1


def test_the_dtype_is_read_from_the_plan() -> None:
    assert dtype_of([plan_row(shape="decode bf16/kv-fp16 h32:8 d128")]) == "bf16"
    assert dtype_of([]) is None


# --- numerics ---------------------------------------------------------------------------------------------------------


def prompt(text: str = "abcdefghij") -> GoldenPrompt:
    return GoldenPrompt("p", "le_128", [1, 2, 3], 4, text, [1, 2], [-1.0, -2.0], [5, 6])


def reply(*logprobs: float | None, text: str | None = "abcdefghij") -> Reply:
    return Reply(prompt(), Scores(list(logprobs), [5, 6]), text)


RIGHT, FAILED = reply(-1.0, -2.0), Reply(prompt(), None, None, "HTTP 503")
LATE, EARLY = reply(-1.0, -2.0, text="abcdefghi!"), reply(-1.0, -2.0, text="a!")
HERE, ELSEWHERE = {"is_same_machine": True}, {"is_same_machine": False}
SAME_BUILD = {"is_same_machine": True, "is_same_build": True}  # 16 bits are given no more room


@pytest.mark.parametrize(
    ("replies", "dtype", "machine", "outcome"),
    [
        ([reply(-1.0, -2.00005)], "fp32", HERE, Outcome.PASS),
        ([reply(-1.0003, -2.0003)], "fp32", HERE, Outcome.FAIL),  # the mean
        ([reply(-1.0, -2.02)], "fp32", HERE, Outcome.FAIL),  # the worst
        ([reply(-1.0, None)], "fp32", HERE, Outcome.FAIL),
        ([LATE], "fp32", ELSEWHERE, Outcome.PASS),
        ([LATE], "fp32", HERE, Outcome.FAIL),
        ([LATE], "bf16", HERE, Outcome.PASS),  # even here: 16 bits round otherwise in another batch
        ([EARLY], "fp32", ELSEWHERE, Outcome.FAIL),
        ([RIGHT], "bf16", SAME_BUILD, Outcome.PASS),
        ([reply(-1.001, -2.001)], "bf16", SAME_BUILD, Outcome.FAIL),
        ([LATE], "bf16", SAME_BUILD, Outcome.FAIL),
        ([RIGHT, FAILED], "fp32", HERE, Outcome.NO_DATA),
        ([reply(-1.0, -3.0), FAILED], "fp32", HERE, Outcome.FAIL),
        ([RIGHT], "fp8", HERE, Outcome.NO_DATA),
        ([], "fp32", HERE, Outcome.NO_DATA),
    ],
)
def test_numbers_and_texts_are_judged_by_dtype_and_machine(
    replies: list[Reply], dtype: str, machine: dict[str, bool], outcome: Outcome
) -> None:
    assert judge_numerics(replies, dtype=dtype, **machine)[0].outcome is outcome


@pytest.mark.parametrize(
    ("scores", "names", "outcome"),
    [
        ([-1.1, -2.1], ("fp8_blocks",), Outcome.PASS),  # more than 16 bits may be off
        ([-1.2, -2.2], ("fp8_blocks",), Outcome.FAIL),
        ([-1.2, -2.2], ("fp8_rows", "int4_128"), Outcome.PASS),
        ([-1.4, -2.4], ("int4_128",), Outcome.FAIL),
    ],
)
def test_a_quantised_candidate_has_limits_of_its_own(
    scores: list[float], names: tuple[str, ...], outcome: Outcome
) -> None:
    """Greedy answers that part decide nothing; likeliest tokens that differ do."""
    quantized = QuantizedFormats(names)
    [verdict] = judge_numerics([reply(*scores, text="a!")], dtype="bf16", is_same_machine=True, quantized=quantized)
    assert verdict.outcome is outcome
    assert verdict.detail.startswith(f"{', '.join(names)} beside answers of 16 bits, under limits of its own")
    others = Reply(prompt(), Scores(list(scores), [5, 7]), "abcdefghij")
    [verdict] = judge_numerics([others], dtype="bf16", is_same_machine=True, quantized=quantized)
    assert verdict.outcome is Outcome.FAIL
    assert (
        verdict.reasons[-1]
        == f"the likeliest token is the same at 50.0%, at least {quantized.limits.same_top:.0%} must be"
    )


def request(token_ids: list[int], *, logprob: float = -1.0, **body: object) -> GoldenRequest:
    """A request with one answer; without a temperature it is greedy."""
    answer = MixAnswer(str(token_ids), token_ids, [logprob] * len(token_ids))
    return GoldenRequest("r", "/v1/completions", {"temperature": 0, **body}, answers=[answer])


DRAWN = request([1, 2, 3], seed=1, temperature=1.0)


@pytest.mark.parametrize(
    ("before", "now", "dtype", "is_exact", "outcome"),
    [
        (request([1, 2, 3]), request([1, 2, 3], logprob=-1.005), "fp32", True, Outcome.PASS),
        (request([1, 2, 3]), request([1, 2, 3], logprob=-1.05), "fp32", False, Outcome.FAIL),
        (request([1, 2, 3]), request([1, 2, 4]), "fp32", True, Outcome.FAIL),
        (request([1, 2, 3]), request([1, 2, 4]), "fp32", False, Outcome.PASS),  # a tie
        (request([1, 2, 3]), request([4, 2, 3], logprob=-1.5), "fp32", False, Outcome.FAIL),
        (DRAWN, request([1, 4, 3], logprob=-9.0), "fp32", False, Outcome.FAIL),
        (DRAWN, request([1, 4, 3], logprob=-1.0), "bf16", False, Outcome.PASS),
        (DRAWN, request([4, 2, 3], logprob=-9.0), "bf16", False, Outcome.FAIL),
        (request([1, 2, 3]), None, "fp32", True, Outcome.NO_DATA),
    ],
)
def test_a_mix_is_judged_by_its_answers_alone(
    before: GoldenRequest, now: GoldenRequest | None, dtype: str, is_exact: bool, outcome: Outcome
) -> None:
    reply = MixReply(before, now, "HTTP 503" if now is None else None)
    assert judge_mix([reply], dtype=dtype, is_exact=is_exact).outcome is outcome


# --- performance ------------------------------------------------------------------------------------------------------


def times(ttft_s: float, tpot_s: float = 0.005, n: int = 12, spread: float = 0.01) -> Times:
    factors = [1 + spread * (i % 5 - 2) / 2 for i in range(n)]
    return Times([ttft_s * factor for factor in factors], [tpot_s * factor for factor in factors])


def judged(candidate: Times, baseline: Times, rules: Rules = RULES) -> Verdict:
    [verdict] = judge_performance({"le_128": baseline}, {"le_128": candidate}, [96], rules)
    return verdict


@pytest.mark.parametrize(
    ("candidate", "baseline", "num_looks", "outcome"),
    [
        (times(0.013), times(0.010), 1, Outcome.FAIL),
        (times(0.010), times(0.010), 1, Outcome.PASS),
        (times(0.010, 0.0065), times(0.010), 1, Outcome.FAIL),
        (times(0.005), times(0.010), 1, Outcome.PASS),
        (times(0.012, spread=0.5), times(0.010, spread=0.5), 1, Outcome.NO_DATA),
        (times(0.0015, 0.0015), times(0.0011, 0.0011), 1, Outcome.PASS),  # below the noise that is allowed
        (times(0.01, n=7), times(0.01, n=7), 1, Outcome.PASS),
        (times(0.01, n=6), times(0.01, n=6), 1, Outcome.NO_DATA),
        (times(0.01, n=7), times(0.01, n=7), 3, Outcome.NO_DATA),  # more looks need more samples
    ],
)
def test_times_are_judged_by_their_ratio_and_its_noise(
    candidate: Times, baseline: Times, num_looks: int, outcome: Outcome
) -> None:
    assert judged(candidate, baseline, replace(RULES, num_looks=num_looks)).outcome is outcome


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_looks", [1, 3])
def test_the_interval_that_is_printed_is_the_one_judged_by(seed: int, num_looks: int) -> None:
    """A server of 1 ms that is up to 0.9 ms slower, of which 0.5 ms are noise."""
    draw = random.Random(seed)
    rules = replace(RULES, num_looks=num_looks)
    slower_s = draw.choice([0.0, 0.0003, 0.0006, 0.0009])
    ours, theirs = (
        Times([0.001 * draw.lognormvariate(0, 0.1) + extra_s for _ in range(24)], [0.001] * 24)
        for extra_s in (slower_s, 0.0)
    )
    [verdict] = judge_performance({"le_128": theirs}, {"le_128": ours}, [96], rules)
    lo, hi = map(float, re.findall(r"TTFT.*?\((\S+) to (\S+)x with", verdict.detail)[0])
    if lo > rules.max_slowdown:
        assert verdict.outcome is Outcome.FAIL
    elif hi > rules.max_slowdown:
        assert verdict.outcome is Outcome.NO_DATA
    else:
        assert verdict.outcome is Outcome.PASS


def drifting(seed: int, slowdown: float, n: int = 100) -> tuple[Times, Times]:
    """Times of two servers on a machine whose other load comes and goes, by up to 4 times, within many requests."""
    draw = random.Random(seed)
    load, sides = 0.0, ([], [])
    for _ in range(n):
        load = min(1.4, max(0.0, load + draw.gauss(0, 0.2)))  # its logarithm
        for times, factor in zip(sides, (slowdown, 1.0), strict=True):
            times.append(0.1 * factor * math.exp(load + draw.gauss(0, 0.15)))
    ours, theirs = (Times(times, [0.005] * n) for times in sides)
    return ours, theirs


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("slowdown", "outcome"), [(1.0, Outcome.PASS), (1.3, Outcome.FAIL)])
def test_load_that_meets_both_sides_does_not_hide_a_slowdown(seed: int, slowdown: float, outcome: Outcome) -> None:
    ours, theirs = drifting(seed, slowdown)
    [paired] = judge_performance({"le_128": theirs}, {"le_128": ours}, [96], RULES, is_paired=True)
    assert paired.outcome is outcome
    assert judged(ours, theirs).outcome is Outcome.NO_DATA, "or this load hides nothing"


def test_a_slowdown_at_the_limit_fails_as_seldom_as_promised() -> None:
    verdicts = [
        judge_performance({"le_128": theirs}, {"le_128": ours}, [96], replace(RULES, noise_s=0.0), is_paired=True)[0]
        for ours, theirs in (drifting(seed, RULES.max_slowdown) for seed in range(300))
    ]
    assert sum(verdict.outcome is Outcome.FAIL for verdict in verdicts) <= 15  # 2.5% are 7.5; 0.4% of runs exceed 15
    assert sum(verdict.outcome is Outcome.PASS for verdict in verdicts) <= 15


def test_a_round_in_which_a_request_failed_has_no_pairs() -> None:
    pairs = Pairs()
    pairs.add({"le_128": times(0.02, n=4)}, {"le_128": times(0.01, n=4)})
    pairs.add({"le_128": times(0.02, n=3)}, {"le_128": times(0.01, n=4)})
    assert (len(pairs.candidate["le_128"].ttft_s), len(pairs.baseline["le_128"].ttft_s)) == (4, 4)


def test_a_bucket_without_a_baseline_is_no_data() -> None:
    assert judge_performance({}, {"le_128": times(0.01)}, [96], RULES)[0].outcome is Outcome.NO_DATA


# --- service ----------------------------------------------------------------------------------------------------------


def test_a_restart_during_the_run_is_inconclusive() -> None:
    assert judge_service({"fallbacks": 5.0}, {"fallbacks": 0.0}).outcome is Outcome.NO_DATA


def test_a_counter_seen_only_once_is_inconclusive() -> None:
    one, both = {"fallbacks": 0.0}, {"fallbacks": 0.0, "preemptions": 0.0}
    for before, after in ((both, one), (one, both), (one, {}), ({}, {})):
        assert judge_service(before, after).outcome is Outcome.NO_DATA


def kernels_report(**changes: object) -> dict[str, object]:
    """GET /plan of a hybrid that drafts by its own head, after 5 launches of its recurrence."""
    known: dict[str, object] = {
        "shapes": [{"phase": "recurrence", "path": "triton.recurrence"}, {"phase": "decode", "path": "triton.decode"}],
        "launches": {"triton.recurrence": 7, "triton.decode": 9},
        "drafts": {"method": "mtp", "num_tokens": 2, "max_seqs": 32},
        "attestation": {
            "batches": [
                {"phase": phase, "result": "match", "kernels": {"hallmark_extend": 1}}
                for phase in ("decode", "verify", "draft_head")
            ]
        },
    }
    return known | changes


def test_kernels_that_serve_some_steps_are_said() -> None:
    before = {"launches": {"triton.recurrence": 2}}
    recurrence, drafts = judge_kernels(before, kernels_report())
    assert str(recurrence) == ("plan recurrence: PASS: 1 shapes, launches while it was asked: triton.recurrence 5")
    assert str(drafts) == ("plan drafts: PASS: 2 tokens by mtp up to 32 sequences; attested 2 times: hallmark_extend 2")
    assert judge_kernels({}, kernels_report(shapes=[], drafts=None)) == []
    ngram = kernels_report(drafts={"method": "ngram", "num_tokens": 3, "max_seqs": None})
    assert judge_kernels(before, ngram)[1].outcome is Outcome.PASS
    assert judge_kernels(before, kernels_report(attestation=None))[1].outcome is Outcome.SKIPPED


def test_kernels_that_did_not_serve_fail_the_plan() -> None:
    unlaunched = kernels_report(launches={"triton.recurrence": 2})
    assert judge_kernels({"launches": {"triton.recurrence": 2}}, unlaunched)[0].outcome is Outcome.FAIL
    verified = {"phase": "verify", "result": "match", "kernels": {"a": 1}}
    lied = {"phase": "draft_head", "result": "mismatch", "kernels": {"a": 1}, "detail": "it launched b"}
    for batches, why in (([verified], "draft_head: no kernel of it"), ([verified, lied], "draft_head: it launched b")):
        [_, drafts] = judge_kernels({}, kernels_report(attestation={"batches": batches}))
        assert drafts.outcome is Outcome.FAIL
        assert why in drafts.reasons[0]
