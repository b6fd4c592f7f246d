"""Replay under a real engine on a CPU: faults that nothing else sees, and right answers of several models."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.engine.execution.runner import ModelRunner
from server.engine.scheduling.sequence import Batch, Sequence
from server.protocol.messages import ReplayReport, SamplingParams, Submit
from server.settings import DtypeChoice
from support.engine import serving_faults as faults
from support.engine.replayed import ReplayedEngine, runner_of
from support.engine.serving_faults import BrokenRunner, BrokenWriter
from support.models.served_families import family_model
from support.models.tiny_llama import TinyLlama


@pytest.fixture(scope="module")
def runner(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return runner_of(tiny_llama.folder, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def exact_runner(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return runner_of(tiny_llama.folder, tmp_path_factory.mktemp("exact"), reproducible=True)


def first_difference(engine: ReplayedEngine, *, most: int) -> ReplayReport:
    """Return the first report of an answer that differs, of at most so many (docs/limits.md has the numbers)."""
    num_checks = 0
    while num_checks < most:
        for report in engine.burst():
            num_checks += 1
            if report.cause is not None:
                return report
    raise AssertionError(f"{num_checks} answers were compared, none differs")


@pytest.mark.parametrize(
    ("edit", "most"),
    [
        (faults.neighbours_page, 20),
        (faults.StaleTokens(), 10),
        (faults.late_positions, 10),
        (faults.short_contexts, 10),
    ],
    ids=["neighbours_page", "stale_token", "late_positions", "short_contexts"],
)
def test_a_wrong_step_buffer_is_seen(runner: ModelRunner, edit: faults.Edit, most: int) -> None:
    own, runner.writer = runner.writer, BrokenWriter(runner, edit)
    try:
        assert first_difference(ReplayedEngine(runner), most=most).cause in ("logits", "cache")
    finally:
        runner.writer = own


def test_swapped_samples_are_seen(runner: ModelRunner) -> None:
    broken = BrokenRunner(runner, result=faults.samples_swapped)
    assert first_difference(ReplayedEngine(runner, launching=broken), most=10).cause in ("logits", "cache")


def test_a_fork_with_another_page_is_seen(runner: ModelRunner) -> None:
    broken = BrokenRunner(runner, batch=faults.wrong_page_copied)
    report = first_difference(ReplayedEngine(runner, launching=broken), most=20)
    assert (report.route, report.cause) == ("forked", "cache")
    assert report.place  # the first token is drawn from the leader's logits


def test_a_seed_that_a_preemption_loses_is_seen(runner: ModelRunner) -> None:
    broken = BrokenRunner(runner, batch=faults.seed_forgotten)
    engine = ReplayedEngine(runner, launching=broken, num_pages=16, asks=["seeded", "drawn"])
    report = first_difference(engine, most=20)
    assert (report.route, report.cause) == ("preempted", "sampling")


def test_answers_that_are_drawn_by_one_seed_are_seen(runner: ModelRunner) -> None:
    broken = BrokenRunner(runner, batch=faults.one_seed_for_all)
    report = first_difference(ReplayedEngine(runner, launching=broken, asks=["drawn"]), most=10)
    assert report.cause == "sampling"


def test_a_temperature_that_is_ignored_is_seen(runner: ModelRunner) -> None:
    broken = BrokenRunner(runner, during=faults.greedy_for_all)
    report = first_difference(ReplayedEngine(runner, launching=broken, asks=["seeded", "drawn"]), most=10)
    assert report.cause == "sampling"


def test_a_token_at_the_border_of_top_k_is_no_difference(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rounding swaps the 20th and the 21st of the tokens, of which 20 may be drawn, behind the answers."""
    row = torch.full((runner.worker.decoder.config.vocab_size,), -30.0)
    row[:19], row[19], row[20] = 0.0, -0.5, -0.5 - 2.0**-22

    def logits(hidden: Tensor, out: Tensor | None = None) -> Tensor:
        found = row.repeat(hidden.shape[0], 1)
        return found if out is None else out.copy_(found)

    monkeypatch.setattr(runner.worker.decoder, "logits", logits)
    engine = ReplayedEngine(runner, asks=["drawn"])
    engine.serve(12)
    row[19], row[20] = row[20].clone(), row[19].clone()
    reports = [*engine.reports()]
    assert reports
    assert [it.cause for it in reports] == [None] * len(reports)


def test_penalties_of_the_neighbour_are_seen(runner: ModelRunner) -> None:
    broken = BrokenRunner(runner, during=faults.neighbours_penalties)
    assert first_difference(ReplayedEngine(runner, launching=broken), most=30).cause == "sampling"


def test_a_grammar_of_another_request_is_seen(runner: ModelRunner) -> None:
    assert first_difference(ReplayedEngine(runner, tap=faults.NeighboursGrammar()), most=30).cause == "sampling"


@pytest.mark.parametrize("tap", [faults.short_keys, faults.unchained_keys])
def test_pages_of_another_prompt_are_seen(runner: ModelRunner, tap: Callable[[Sequence], None]) -> None:
    report = first_difference(ReplayedEngine(runner, tap=tap, has_seals=False), most=10)
    assert (report.cause, report.place) == ("cache", 0)


@pytest.mark.first
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("granite", DtypeChoice.FP32),
        ("gemma 3", DtypeChoice.BF16),
        ("glm", DtypeChoice.BF16),
    ],
)
def test_right_answers_match(family: str, dtype: DtypeChoice, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    family_model(tmp_path / "model", family)
    engine = ReplayedEngine(runner_of(tmp_path / "model", tmp_path, dtype), num_pages=40)
    reports = [report for _ in range(4) for report in engine.burst()]
    assert [report.detail for report in reports if report.result != "match"] == []
    assert {report.route for report in reports} >= {"hit", "forked", "batched"}


def test_right_answers_match_to_the_bit(exact_runner: ModelRunner) -> None:
    engine = ReplayedEngine(exact_runner, num_pages=30, is_exact=True)
    reports = [report for _ in range(4) for report in engine.burst()]
    assert [report.detail for report in reports if report.cause is not None] == []
    assert {report.route for report in reports} >= {"hit", "forked", "batched", "chunked"}


def test_one_other_bit_is_a_difference_where_none_may_be(exact_runner: ModelRunner) -> None:
    words = exact_runner.worker.kv.tensors[0].view(torch.int32)

    def low_bit_flipped(batch: Batch) -> Batch:
        if batch.num_rows > 1 and batch.query_lens[-1] == 1:  # of a key that is read by the last row
            words[batch.page_tables[-1][0], 0, 0, 0] ^= 1 << 10  # the last one may be rounded away behind it
        return batch

    broken = BrokenRunner(exact_runner, batch=low_bit_flipped)
    report = first_difference(ReplayedEngine(exact_runner, launching=broken, is_exact=True), most=10)
    assert (report.result, report.factor) == ("mismatch", None)
    within_limits = ReplayedEngine(exact_runner, launching=broken)
    assert [report.cause for report in within_limits.burst()] == [None] * 4


def test_a_replay_leaves_no_trace_in_the_engine(runner: ModelRunner) -> None:
    engine = ReplayedEngine(runner)
    engine.serve()
    num_steps, keys = engine.engine.step_index, dict(engine.pool.page_of_key)
    reports = [*engine.reports()]
    assert [report.result for report in reports] == ["match"] * 4
    assert (engine.engine.step_index, engine.engine.has_work) == (num_steps, False)
    assert engine.pool.page_of_key.items() <= keys.items()
    assert engine.pool.num_used == 0


def test_a_request_takes_the_memory_of_a_replay_at_once(runner: ModelRunner) -> None:
    engine = ReplayedEngine(runner)
    engine.engine.submit(Submit("a", engine.prompt(80), SamplingParams(max_tokens=4, temperature=0.0)))
    engine.serve(0)
    for num_tries in range(1, 4):
        assert engine.replay.step() is None  # a chunk of its prompt
        assert engine.pool.num_used > 0
        report = engine.replay.yield_memory()
        assert engine.pool.num_used == 0
        assert (report is not None) == (num_tries == 3)
    assert report is not None
    assert (report.result, engine.replay.has_waiting) == ("preempted", False)
