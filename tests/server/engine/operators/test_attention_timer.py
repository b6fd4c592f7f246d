"""Choice of the layers and steps that are timed, and their samples. The device is a fake."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import pytest

from kernels.calls.batch import AttentionFlags
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase, flops, hbm_bytes_tiled
from server.engine.operators.attention_timer import AttentionTimer, CpuDevice
from server.engine.operators.dispatch import Dispatcher, PhasePart
from server.engine.operators.dispatch_key import Heads
from server.engine.operators.table import OperatorChoice
from server.engine.startup.warmup import synthetic_batch

SHAPE = AttentionShape(Phase.PREFILL, Dtype.FP32, Dtype.FP32, 4, 2, 64, Bucket.LE_128, Bucket.LE_128)
DECODE = replace(SHAPE, phase=Phase.DECODE, page_size=16)
PLAIN, WINDOWED = AttentionFlags(1.0), AttentionFlags(1.0, window=32)
PROMPTS = synthetic_batch([(100, 100), (20, 20)], 16)
TOKENS = synthetic_batch([(1, 50)], 16)


@dataclass
class FakeEvent:
    device: "FakeDevice"
    is_captured: bool
    at_ms: float | None = None

    def record(self) -> None:
        self.device.now_ms += 1.0
        self.at_ms = self.device.now_ms

    def synchronize(self) -> None:
        self.device.num_waits += 1

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


@dataclass
class FakeDevice:
    now_ms: float = 0.0
    num_waits: int = 0
    is_graph: bool = False
    allocated: int = 1000
    most: int = 0
    events: list[FakeEvent] = field(default_factory=list)

    def event(self, is_captured: bool) -> FakeEvent:
        self.events.append(FakeEvent(self, is_captured))
        return self.events[-1]

    def is_capturing(self) -> bool:
        return self.is_graph

    def reset_peak(self) -> int:
        self.most = self.allocated
        return self.allocated

    def peak(self) -> int:
        return self.most


def started(timer: AttentionTimer) -> AttentionTimer:
    timer.start()
    return timer


def step(timer: AttentionTimer, num_layers: int, shape: AttentionShape = SHAPE) -> list[int]:
    """The layers that were measured in one step."""
    timer.begin(PROMPTS if shape.phase is Phase.PREFILL else TOKENS)
    measured = [layer for layer in range(num_layers) if timer.measures(shape.phase, layer)]
    for layer in measured:
        timer.around(lambda: None, shape, layer, "batch")
    return measured


def test_one_layer_of_one_step_in_so_many_is_measured() -> None:
    timer = started(AttentionTimer([PLAIN] * 8, FakeDevice(), every=4))
    assert [step(timer, 8) for _ in range(9)] == [[4], [], [], [], [4], [], [], [], [4]]


def test_a_sample_holds_the_work_of_layers_like_its_own() -> None:
    timer = started(AttentionTimer([PLAIN] * 3, FakeDevice(), every=64))
    step(timer, 3)
    timer.begin(TOKENS)
    (sample,), _ = timer.take()
    assert (sample.phase, sample.bucket, sample.kernel_s) == ("prefill", "le_128", pytest.approx(3e-3))
    assert sample.flops == 3 * (flops(SHAPE, 100, 100) + flops(SHAPE, 20, 20))
    assert sample.hbm_bytes == 3 * (hbm_bytes_tiled(SHAPE, 100, 100) + hbm_bytes_tiled(SHAPE, 20, 20))
    assert timer.take() == ([], {})


def test_layers_of_another_window_are_measured_apart() -> None:
    timer = started(AttentionTimer([PLAIN, WINDOWED, WINDOWED, WINDOWED, PLAIN, PLAIN], FakeDevice()))
    assert step(timer, 6) == [2, 4]


def test_a_replay_is_measured_by_the_events_in_its_graph() -> None:
    device, batch, kind = FakeDevice(is_graph=True), object(), ((PLAIN.window, Heads(4, 2, 16)), None)
    timer = started(AttentionTimer([PLAIN] * 2, device, every=2))
    assert timer.measures(Phase.DECODE, 1)
    timer.around(lambda: None, DECODE, 1, batch)
    assert [event.is_captured for event in device.events] == [True, True]
    device.is_graph = False
    for _ in range(3):
        timer.begin(TOKENS)
        timer.replayed(DECODE, batch, kind)
        timer.replayed(DECODE, object(), kind)  # a graph that was captured without events
    timer.begin(TOKENS)
    samples, _ = timer.take()
    assert [sample.flops for sample in samples] == [2 * flops(DECODE, 1, 50)] * 2


def watched(timer: AttentionTimer) -> AbstractContextManager[None]:
    """Run batches as an attestation does, between two steps."""
    return Dispatcher({}, (), (PLAIN,), redecide=lambda *_: None, timer=timer).watched(lambda _: nullcontext())


def test_what_an_attestation_takes_is_not_the_sampled_steps() -> None:
    device = FakeDevice()
    timer = started(AttentionTimer([PLAIN], device))
    step(timer, 1)
    device.most = 5000
    with watched(timer):
        device.most = 9000
    timer.begin(TOKENS)
    assert timer.take()[1] == {"prefill": 4000}


def test_a_capture_that_serves_no_request_is_not_measured() -> None:
    device = FakeDevice(is_graph=True)
    dispatcher = Dispatcher({}, (), (PLAIN,), redecide=lambda *_: None, timer=AttentionTimer([PLAIN], device))  # type: ignore[arg-type, return-value]
    ran: list[object] = []
    choice = OperatorChoice(None, lambda *inputs: ran.append(inputs[-1]), None, is_capturable=True)  # type: ignore[arg-type]
    part = PhasePart(Phase.DECODE, slice(0, 1), None, 1, 1)  # type: ignore[arg-type]
    given = (choice, None, None, None, part, 0, "out")
    with dispatcher.unmeasured():
        dispatcher.call(*given, planned=None)  # type: ignore[arg-type]
    assert (ran, device.events) == (["out"], [])
    assert dispatcher.timer is not None


def test_on_a_cpu_the_hosts_clock_is_the_devices() -> None:
    timer = started(AttentionTimer([PLAIN], CpuDevice(), every=1))
    began_at = time.perf_counter()
    step(timer, 1)
    took_s = time.perf_counter() - began_at
    timer.begin(PROMPTS)
    (sample,), peaks = timer.take()
    assert 0 < sample.kernel_s <= took_s
    assert peaks == {}


def test_batches_before_the_start_are_not_measured() -> None:
    timer = AttentionTimer([PLAIN], CpuDevice(), every=1)
    assert step(timer, 1) == []
    timer.start()
    assert step(timer, 1) == [0]
