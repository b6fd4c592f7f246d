"""Attestation by the driver's record, which a few lines stand in for: what is captured, and when."""

from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kernels.catalog import PATHS, path_named
from kernels.driver.seen import Seen
from kernels.vocabulary.path import KernelPath
from kernels.vocabulary.shape import Phase
from server.engine.operators.dispatch import Dispatcher
from server.engine.proof.attestation import Attestor
from server.engine.proof.step_record import TimeStep
from server.engine.startup.warmup import probes_of
from support.engine.attested import FLASH, Subject, refuses
from support.models.tiny_llama import NUM_LAYERS


def breaks(*_: object) -> None:
    raise RuntimeError("the driver does not say what was captured")


def test_a_lost_device_is_blamed_on_a_step_of_its_own(
    subject: Subject,
) -> None:
    it, _ = subject.attestor([replace(path, run=breaks) for path in PATHS])
    assert it.attest_all("request").result == "error"
    subject.attestor()  # whose paths are sound again
    subject.tokens("a")
    assert {shape.split()[0] for _, shape in subject.built.runner.suspects()} == {Phase.DECODE.value}


class Capturing:
    """Stands in for the driver's record: knows what is launched inside of a mark, and what had run before."""

    def __init__(self) -> None:
        self.outside: Counter[str] = Counter()  # runs by path
        self.unprepared: set[str] = set()  # paths that were captured before they had run
        self.breaks_at: int | None = None  # the number of a capture, counted from 1
        self._num_captures = 0
        self._calls: list[Counter[str]] = []
        self._call: Counter[str] | None = None

    @contextmanager
    def mark(self) -> Iterator[None]:
        self._call = Counter()
        self._num_captures += 1
        try:
            yield
            self._calls.append(self._call)
        finally:
            self._call = None

    def take(self) -> Seen:
        calls, self._calls = self._calls, []
        return Seen(tuple(calls), Counter())

    def recorded(self, path: KernelPath, *, is_broken: bool = False) -> KernelPath:
        """The path as one that can be captured; one that `is_broken` runs, but fails when it is."""
        run = path.run
        assert run is not None
        kernels = {"sdpa.cpu": (FLASH,), "sdpa.math": ("aten::bmm", "aten::_softmax")}[path.name]

        def recorded(*arguments: object) -> None:
            if self._call is None:
                self.outside[path.name] += 1
            elif is_broken:
                refuses()
            elif self._num_captures == self.breaks_at:
                breaks()
            else:
                self._call.update(kernels)
                self.unprepared |= {path.name} - self.outside.keys()
            run(*arguments)

        return replace(path, run=recorded, is_capturable=True)


def recorded(
    subject: Subject,
    driver: Capturing,
    phases: Container[Phase] = (Phase.PREFILL,),
    *,
    broken: str = "",
    time_step: TimeStep = lambda _: None,
) -> tuple[Attestor, Dispatcher]:
    """An attestor of these phases alone, by the driver's record; the path `broken` cannot be captured."""
    decisions = {shape: it for shape, it in subject.decisions.items() if shape.phase in phases}
    paths = [driver.recorded(path_named(name), is_broken=name == broken) for name in ("sdpa.cpu", "sdpa.math")]
    return replace(subject, decisions=decisions).attestor(paths, recorder=driver, time_step=time_step)


def test_another_decisions_path_runs_before_it_is_captured(subject: Subject) -> None:
    driver = Capturing()
    it, dispatcher = recorded(subject, driver)
    assert it.attest_all("request").result == "match"
    assert it.attest_all("request").result == "match"
    assert driver.outside == {"sdpa.cpu": NUM_LAYERS}
    dispatcher.override(frozenset(("sdpa.cpu", str(shape)) for shape in dispatcher.plan))
    assert it.attest_all("request").batches[0].paths == ["sdpa.math"]
    assert driver.outside == {"sdpa.cpu": NUM_LAYERS, "sdpa.math": NUM_LAYERS}
    assert driver.unprepared == set()


def test_records_of_a_failed_step_are_not_the_next_ones(subject: Subject) -> None:
    driver = Capturing()
    driver.breaks_at = NUM_LAYERS
    it, _ = recorded(subject, driver, (Phase.PREFILL, Phase.EXTEND))
    report = it.attest_all("request")
    assert [(batch.phase, batch.result) for batch in report.batches] == [("prefill", "error"), ("extend", "match")]


def test_a_launch_that_fails_in_a_record_brings_in_no_profiler(subject: Subject) -> None:
    """A profiler would slow a server down for good."""
    driver = Capturing()
    it, _ = recorded(subject, driver, broken="sdpa.cpu")
    report = it.attest_all("request")
    assert [path for path, _ in report.quarantined] == ["sdpa.cpu"]
    assert report.batches[0].paths == ["sdpa.math"]
    assert driver.outside == {"sdpa.cpu": NUM_LAYERS, "sdpa.math": NUM_LAYERS}


@pytest.mark.parametrize(("kernel", "is_attention"), [("hallmark_prefill", True), ("nvjet_sm90_tst", False)])
def test_attention_outside_of_every_call_is_a_mismatch(subject: Subject, kernel: str, is_attention: bool) -> None:
    """A library, or a fallback inside of torch, that computes attention beside what is attested."""

    class Beside(Capturing):
        def take(self) -> Seen:
            seen = super().take()
            return replace(seen, outside=Counter({kernel: 2})) if seen.calls else seen

    it, dispatcher = recorded(subject, Beside())
    report = it.attest_all("request")
    (batch,) = report.batches
    if is_attention:
        assert (batch.result, batch.detail) == ("mismatch", f"{kernel} ran outside of every attention call")
        assert {path for path, _ in report.quarantined} == {"sdpa.cpu"}
        assert {choice.use.path for choice in dispatcher.choices} == {"sdpa.math"}
    else:
        assert (batch.result, batch.detail, report.quarantined) == ("match", None, [])


def test_recorded_kernels_are_explained_by_their_times(subject: Subject) -> None:
    seconds = {FLASH: 3.0, "_rms_norm_kernel": 0.5, "nvjet_a": 6.0, "planted": 0.5}
    it, _ = recorded(subject, Capturing(), time_step=lambda _: seconds)
    (batch,) = it.attest_all("request").batches
    assert batch.explained is not None
    assert batch.explained.seconds == {"evidence": 3.0, "named": 0.5, "unproven": 6.0, "unexplained": 0.5}
    assert batch.explained.share == 0.35
    assert (batch.explained.unproven, batch.explained.unexplained) == ({"nvjet_a": 6.0}, {"planted": 0.5})


def test_a_step_that_cannot_be_timed_still_matches(subject: Subject) -> None:
    it, _ = recorded(subject, Capturing(), time_step=breaks)  # type: ignore[arg-type]
    (batch,) = it.attest_all("request").batches
    assert (batch.result, batch.explained) == ("match", None)


def test_a_steps_launches_are_captured_where_its_paths_can_be(subject: Subject) -> None:
    driver = Capturing()
    recorded(subject, driver)
    runner, (probe, *_) = subject.built.runner, probes_of(subject.decisions, page=3, page_size=16, max_len=128)

    def capture(work: Callable[[], None]) -> str:
        work()
        return "graph"

    assert runner.step_graph(probe, capture) == "graph"  # type: ignore[arg-type]
    assert driver.outside == {"sdpa.cpu": NUM_LAYERS}
    subject.attestor()  # whose paths cannot be captured
    assert runner.step_graph(probe, capture) is None  # type: ignore[arg-type]
