"""Replay under a real engine on a CPU: faults that nothing else sees, and right answers of several models."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.engine.execution.runner import ModelRunner
from server.engine.scheduling.sequence import Sequence
from server.protocol.messages import ReplayReport, SamplingParams, Submit
from server.settings import DtypeChoice
from support.engine import serving_faults as faults
from support.engine.replayed import ReplayedEngine, runner_of
from support.engine.serving_faults import BrokenRunner, BrokenWriter
from support.models.served_families import family_model
from support.models.tiny_llama import TinyLlama

MOST_CHECKS = 30  # docs/limits.md says so


@pytest.fixture(scope="module")
def runner(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    return runner_of(tiny_llama.folder, tmp_path_factory.mktemp("cache"))


def first_difference(engine: ReplayedEngine) -> ReplayReport:
    """Return the first report of an answer that differs, of few."""
    num_checks = 0
    while num_checks < MOST_CHECKS:
        for report in engine.burst():
            num_checks += 1
            if report.cause is not None:
                return report
    raise AssertionError(f"{num_checks} answers were compared, none differs")


@pytest.mark.parametrize("edit", [faults.neighbours_page, faults.StaleTokens(), faults.late_positions])
def test_a_wrong_step_buffer_is_seen(runner: ModelRunner, edit: faults.Edit) -> None:
    own, runner.writer = runner.writer, BrokenWriter(runner, edit)
    try:
        assert first_difference(ReplayedEngine(runner)).cause in ("logits", "cache")
    finally:
        runner.writer = own


def test_swapped_samples_are_seen(runner: ModelRunner) -> None:
    broken = BrokenRunner(runner, result=faults.samples_swapped)
    assert first_difference(ReplayedEngine(runner, launching=broken)).cause in ("logits", "cache")


def test_a_fork_with_another_page_is_seen(runner: ModelRunner) -> None:
    broken = BrokenRunner(runner, batch=faults.wrong_page_copied)
    report = first_difference(ReplayedEngine(runner, launching=broken))
    assert (report.route, report.cause) == ("forked", "cache")
    assert report.place  # the first token is drawn from the leader's logits


def test_a_seed_that_a_preemption_loses_is_seen(runner: ModelRunner) -> None:
    broken = BrokenRunner(runner, batch=faults.seed_forgotten)
    report = first_difference(ReplayedEngine(runner, launching=broken, num_pages=16, asks=["seeded", "drawn"]))
    assert (report.route, report.cause) == ("preempted", "sampling")


def test_penalties_of_the_neighbour_are_seen(runner: ModelRunner) -> None:
    broken = BrokenRunner(runner, during=faults.neighbours_penalties)
    assert first_difference(ReplayedEngine(runner, launching=broken)).cause == "sampling"


def test_a_grammar_of_another_request_is_seen(runner: ModelRunner) -> None:
    assert first_difference(ReplayedEngine(runner, tap=faults.NeighboursGrammar())).cause == "sampling"


@pytest.mark.parametrize("tap", [faults.short_keys, faults.unchained_keys])
def test_pages_of_another_prompt_are_seen(runner: ModelRunner, tap: Callable[[Sequence], None]) -> None:
    report = first_difference(ReplayedEngine(runner, tap=tap, has_seals=False))
    assert (report.cause, report.place) == ("cache", 0)


@pytest.mark.parametrize("dtype", [DtypeChoice.FP32, DtypeChoice.BF16])
@pytest.mark.parametrize("family", ["gemma 3", "granite", "mixtral", "glm"])
def test_right_answers_match(family: str, dtype: DtypeChoice, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    family_model(tmp_path / "model", family)
    engine = ReplayedEngine(runner_of(tmp_path / "model", tmp_path, dtype), num_pages=40)
    reports = [report for _ in range(8) for report in engine.burst()]
    assert [report.detail for report in reports if report.result != "match"] == []
    assert {report.route for report in reports} >= {"hit", "forked", "batched"}


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
