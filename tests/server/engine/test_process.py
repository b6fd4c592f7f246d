"""The engine's process: its loop on fakes, and the starts of a real one."""

import queue
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qualification.decision.decision import Policy
from server.engine.process import HEARTBEAT_S, Loop, serve
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.runner_api import Runner
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.protocol.messages import (
    Attest,
    AttestationReport,
    Cancel,
    ChangeQuarantine,
    Configure,
    EngineProgress,
    EngineReady,
    EngineRefused,
    FinishReason,
    FromEngine,
    Heartbeat,
    PlanChanged,
    QuarantineChanged,
    ReplayReport,
    SamplingParams,
    ShadowReport,
    Shutdown,
    StartBeat,
    StepOutput,
    Submit,
    ToEngine,
)
from server.settings import DeviceChoice, Settings
from support.engine.fake_runner import DeviceTwin, FakeRunner
from support.engine.llama_engine import settings_of
from support.models.tiny_llama import TinyLlama

REPORT = AttestationReport("request", "match", 0.0, 0.0, [], [])


class Waits:
    """An inbox that notes for how long it is waited for."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self.put = self._messages.put
        self.timeouts_s: set[float | None] = set()

    def get(self, block: bool = True, timeout: float | None = None) -> ToEngine:
        if block:
            self.timeouts_s.add(timeout)
        return self._messages.get(block, timeout)


def engine_of(runner: Runner, *, runs_ahead: bool = False) -> Engine:
    scheduler = Scheduler(SchedulerLimits(64, 4, 32), PagePool(32, 4))
    return Engine(scheduler, runner, EngineOptions(97, (), seed=0, runs_ahead=runs_ahead))


def inbox_of(*messages: ToEngine) -> queue.SimpleQueue[ToEngine]:
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    for message in messages:
        inbox.put(message)
    return inbox


def run(
    engine: Engine, inbox: Any, is_last: Callable[[FromEngine], bool] = lambda _: False, *given: Any, **named: Any
) -> list[FromEngine]:
    """Return what a loop sends until it is shut down, at the latest behind a message that `is_last`."""
    sent: list[FromEngine] = []

    def send(message: FromEngine) -> None:
        sent.append(message)
        if is_last(message):
            inbox.put(Shutdown())

    Loop(engine, inbox, send, *given, **named).run()
    return sent


def kinds_of(sent: list[FromEngine]) -> list[type[object]]:
    return [type(message) for message in sent if not isinstance(message, Heartbeat)]


def plain_engine() -> Engine:
    return engine_of(FakeRunner(lambda *_: 1))


def test_the_loop_steps_what_was_submitted_and_beats_when_idle() -> None:
    inbox = Waits()
    inbox.put(Submit("a", [1, 2], SamplingParams(max_tokens=3)))
    num_beats = count(1)
    sent = run(plain_engine(), inbox, lambda it: isinstance(it, Heartbeat) and next(num_beats) == 2)
    deltas = [delta for message in sent if isinstance(message, StepOutput) for delta in message.deltas]
    assert [delta.token_ids for delta in deltas] == [[1], [1], [1]]
    beats = [message for message in sent if isinstance(message, Heartbeat)]
    assert [beat.step for beat in beats] == [1, 3]
    assert beats[1].sent_at - beats[0].sent_at >= HEARTBEAT_S
    assert inbox.timeouts_s == {HEARTBEAT_S}


def test_a_cancel_that_is_read_with_its_submit_computes_nothing() -> None:
    inbox = inbox_of(Submit("a", [1, 2], SamplingParams(max_tokens=3)), Cancel("a"))
    sent = run(plain_engine(), inbox, lambda it: isinstance(it, Heartbeat))
    outputs = [message for message in sent if isinstance(message, StepOutput)]
    assert [(output.record.step, output.deltas[0].finish_reason) for output in outputs] == [(0, FinishReason.CANCELLED)]


class ThreeBatches:
    """An attestor whose report comes with its third batch."""

    def __init__(self) -> None:
        self.num_left = 0

    @property
    def is_busy(self) -> bool:
        return self.num_left > 0

    @property
    def is_due(self) -> bool:
        return self.is_busy

    def ask(self, trigger: str) -> None:
        assert trigger == "request"
        self.num_left = 3

    def poll(self) -> AttestationReport | None:
        self.num_left -= 1
        return REPORT if self.num_left == 0 else None


def test_an_attestation_runs_between_steps_a_batch_at_a_time() -> None:
    inbox = inbox_of(Submit("a", [1, 2], SamplingParams(max_tokens=5)), Attest())
    sent = run(plain_engine(), inbox, lambda it: it is REPORT, ThreeBatches())
    assert kinds_of(sent) == [StepOutput, StepOutput, StepOutput, AttestationReport]


class Obedient:
    """Takes out what it is told to."""

    def change(self, message: ChangeQuarantine) -> QuarantineChanged:
        return QuarantineChanged(message.request, [], message.add)

    def plan(self) -> PlanChanged:
        return PlanChanged([])


def test_a_quarantine_change_sends_the_plan_before_its_answer() -> None:
    inbox = inbox_of(ChangeQuarantine(7, [("p", "s")]), Shutdown())
    sent = run(plain_engine(), inbox, operator_quarantine=Obedient())
    assert sent == [PlanChanged([]), QuarantineChanged(7, [], [("p", "s")])]


def test_no_step_is_under_way_while_a_batch_is_attested() -> None:
    twin = DeviceTwin()

    class Watching(ThreeBatches):
        def poll(self) -> AttestationReport | None:
            launches = [entry for entry in twin.log if entry.startswith("launch")]
            assert 2 * len(launches) == len(twin.log)  # every batch was read
            return super().poll()

    inbox = inbox_of(Submit("a", [1, 2], SamplingParams(max_tokens=9, ignore_eos=True)), Attest())
    engine = engine_of(twin, runs_ahead=True)
    sent = run(engine, inbox, lambda it: isinstance(it, StepOutput) and it.record.step == 9, Watching())
    assert REPORT in sent
    assert twin.log[-3:] == ["launch 9", "read 8", "read 9"]  # after it the engine runs ahead again


class OneReplay:
    """A replay that is always ready, and whose report comes with its third chunk since a request came."""

    def __init__(self, report: ReplayReport) -> None:
        self._report = report
        self.calls: list[str] = []

    @property
    def is_ready(self) -> bool:
        return True

    def step(self) -> ReplayReport | None:
        self.calls.append("step")
        return self._report if self.calls[-3:] == ["step"] * 3 else None

    def yield_memory(self) -> None:
        self.calls.append("yield")


def test_a_replay_runs_while_idle_and_yields_to_a_request() -> None:
    report = ReplayReport("match", 0.0, "plain", None, None, 2, 0.1, None, 0.0)
    replay, inbox = OneReplay(report), inbox_of(Submit("a", [1, 2], SamplingParams(max_tokens=3)))
    sent = run(plain_engine(), inbox, lambda it: it is report, replay=replay)
    assert replay.calls == ["yield", "step", "step", "step"]
    assert kinds_of(sent) == [StepOutput, StepOutput, StepOutput, ReplayReport]


class OneSample:
    """A check that holds a sample from the first step on, to be judged between two steps if `is_due`."""

    def __init__(self, engine: Callable[[], Engine], report: ShadowReport, *, is_due: bool) -> None:
        self._engine = engine
        self._report: ShadowReport | None = report
        self._is_urgent = is_due
        self.was_busy: list[bool] = []

    @property
    def has_sample(self) -> bool:
        return self._report is not None and self._engine().step_index > 0

    @property
    def is_due(self) -> bool:
        return self.has_sample and self._is_urgent

    def judge(self) -> ShadowReport | None:
        if not self.has_sample:
            return None
        self.was_busy.append(self._engine().has_work)
        report, self._report = self._report, None
        return report


@pytest.mark.parametrize("is_due", [True, False])
def test_a_sample_is_judged_when_idle_or_between_two_steps(is_due: bool) -> None:
    """No step is on its way to the device then; a quarantine changes the plan that is reported."""
    report = ShadowReport("mismatch", 1.0, "decode", "p", 0, 0, 0, 1, 2.0, "off", 0.1, [("p", "s")])
    inbox = inbox_of(Submit("a", [1, 2], SamplingParams(max_tokens=9, ignore_eos=True)))
    twin = DeviceTwin()
    engine = engine_of(twin, runs_ahead=True)

    class Watching(OneSample):
        def judge(self) -> ShadowReport | None:
            launches = [entry for entry in twin.log if entry.startswith("launch")]
            assert 2 * len(launches) == len(twin.log)  # every batch was read
            return super().judge()

    check = Watching(lambda: engine, report, is_due=is_due)

    class Awake:
        """An inbox that nobody may sleep on while a sample waits."""

        def get(self, block: bool = True, timeout: float | None = None) -> ToEngine:
            assert not (block and check.has_sample)
            return inbox.get(block=block, timeout=timeout)

        def put(self, message: ToEngine) -> None:
            inbox.put(message)

    sent = run(
        engine, Awake(), lambda it: isinstance(it, PlanChanged), operator_quarantine=Obedient(), shadow=check
    )  # fmt: skip
    assert check.was_busy == [is_due]
    kinds = kinds_of(sent)
    at = kinds.index(ShadowReport)
    assert kinds[at : at + 2] == [ShadowReport, PlanChanged]
    assert sent[[type(each) for each in sent].index(ShadowReport)] is report


def test_shutdown_ends_the_loop_at_once() -> None:
    assert run(plain_engine(), inbox_of(Submit("a", [1], SamplingParams(max_tokens=3)), Shutdown())) == []


def serve_with(settings: Settings) -> tuple[int, list[FromEngine]]:
    """Return the exit status and what was sent, but for what follows the clock."""
    sent: list[FromEngine] = []
    status = serve(inbox_of(Configure(settings, []), Shutdown()), sent.append)
    return status, [message for message in sent if not isinstance(message, StartBeat)]


def test_without_proof_refuse_says_which_shape_and_why(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    status, sent = serve_with(
        Settings(
            model=str(tiny_llama.folder),
            device=DeviceChoice.CPU,
            on_unproven=Policy.REFUSE,
            cache_dir=str(tmp_path),
            matrix=str(tmp_path),
        )
    )
    refused = sent[-1]
    assert isinstance(refused, EngineRefused)
    assert (status, refused.code, refused.is_final) == (3, "unproven", False)  # evidence may still come
    assert "prefill fp32 h4:2 d16" in refused.message
    assert "unproven (it has not been measured)" in refused.message
    assert refused.plan
    assert all(row.path is None for row in refused.plan)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    status, sent = serve_with(Settings(model=str(tmp_path / "nothing"), device=DeviceChoice.CPU))
    assert status == 3
    assert isinstance(sent[-1], EngineRefused)
    assert (sent[-1].code, sent[-1].is_final) == ("invalid_model", True)
    assert "nothing" in sent[-1].message


def test_weights_that_do_not_fit_are_found_before_proving(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_llama.folder / "config.json").read_bytes())
    settings = msgspec.structs.replace(settings_of(tiny_llama, tmp_path), model=str(tmp_path))
    status, sent = serve_with(msgspec.structs.replace(settings, on_unproven=Policy.QUALIFY))
    assert status == 3
    (refused,) = sent
    assert isinstance(refused, EngineRefused)
    assert refused.is_final
    assert "neither model.safetensors nor" in refused.message


def test_the_first_message_must_configure() -> None:
    assert serve(inbox_of(Cancel("a")), lambda _: None) == 76


def test_a_start_reports_its_progress_and_its_plan(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    status, sent = serve_with(settings_of(tiny_llama, tmp_path))
    assert status == 0
    stages = list(dict.fromkeys(message.stage for message in sent if isinstance(message, EngineProgress)))
    assert stages == ["loading", "warming up", "attesting", "checking"]
    # On a CPU each pass of a large model takes minutes: without them the supervisor would end the start.
    passes = [message.detail for message in sent if isinstance(message, EngineProgress) and "of" in message.detail]
    assert "1 of 3 forward passes" in passes
    ready = next(message for message in sent if isinstance(message, EngineReady))
    assert (ready.max_model_len, ready.num_pages, ready.page_size) == (128, 128, 16)
    assert {row.phase for row in ready.plan} == {"prefill", "extend", "decode", "linear"}
    assert ready.fingerprint["device"] == "cpu"


def test_an_engine_that_serves_checks_its_attention(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(settings_of(tiny_llama, tmp_path), shadow_interval_s=0.0, shadow_budget=0.5)
    inbox = inbox_of(Configure(settings, []), Submit("a", tiny_llama.prompts[3], SamplingParams(max_tokens=4)))
    sent: list[FromEngine] = []

    def send(message: FromEngine) -> None:
        sent.append(message)
        if isinstance(message, ShadowReport) or sum(isinstance(each, Heartbeat) for each in sent) == 5:
            inbox.put(Shutdown())

    assert serve(inbox, send) == 0
    report = next(message for message in sent if isinstance(message, ShadowReport))
    assert (report.result, report.detail) == ("match", None)
