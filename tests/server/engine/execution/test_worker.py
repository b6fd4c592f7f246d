"""Workers of one and of several ranks: driven by bytes, and no rank decides alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.driver.cuda_driver import DriverError
from kernels.sampling.sampling import SamplingTensors
from kernels.system.device_lost import DeviceLost
from kernels.vocabulary.path import KernelPath
from server.engine.execution.commands import Command, ComputeLogits, Launch, Repeat
from server.engine.execution.followers import LedRanks, RankIdentity, check_same
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.step_buffer import StepBuffer
from server.engine.execution.step_writer import StepWriter
from server.engine.execution.worker import LaunchFailed, Worker
from server.engine.operators.decisions import NoPathError
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.launch_errors import is_device_lost
from server.engine.operators.linear import LinearTable
from server.engine.operators.rows_table import StepSizes
from server.engine.operators.step_attention import TakeCall
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.startup.warmup import synthetic_batch
from server.errors import SettingsError
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.ranks import ALONE, Ranks
from server.protocol.messages import Fork
from support.engine.closure_graphs import EAGER, PATH, capture, redecide
from support.engine.graph_session import Session
from support.engine.graph_subject import CPU, MAX_LEN, PAGE_SIZE, Subject
from support.models.tiny_llama import NUM_LAYERS, VOCAB, TinyLlama

NUM_PAGES = 64


def no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no memory")


def worker_of(
    decoder: Decoder,
    rank: Ranks,
    path: KernelPath = PATH,
    make: Callable[..., Worker] = Worker,
    heard: "Heard | None" = None,
) -> Worker:
    plan = Subject(decoder).dispatcher
    dispatcher = Dispatcher(plan.decisions, (path, EAGER), plan.flags, redecide=redecide)
    if heard is not None:
        make = partial(make, others=LedRanks(rank, dispatcher, heard.send))
    kv = KVCache.allocate(decoder.config, NUM_PAGES, PAGE_SIZE, torch.float32, CPU)
    return make(decoder, kv, dispatcher, SampledTokens(8, CPU), rank=rank)


def session_of(worker: Worker) -> Session:
    scheduler = Scheduler(SchedulerLimits(MAX_LEN, 8, 64), PagePool(NUM_PAGES, PAGE_SIZE))
    return Session(Engine(scheduler, ModelRunner(worker), EngineOptions(VOCAB, (), 0, runs_ahead=True)))


class Leading(Worker):
    """A first rank whose buffers a second one gets too, as bytes."""

    follower: Worker

    def launch(
        self, buffer: StepBuffer, sampling: SamplingTensors | None = None, tap: TakeCall | None = None, **named: Any
    ) -> Tensor:
        data = torch.frombuffer(bytearray(buffer.data.numpy().tobytes()), dtype=torch.uint8)
        self.follower.launch(replace(buffer, data=data), sampling, **named)
        hidden = super().launch(buffer, sampling, tap, **named)
        assert torch.equal(self.follower.tokens.latest, self.tokens.latest)
        return hidden

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        self.follower.copy_pages(copies)
        super().copy_pages(copies)


def test_a_second_rank_chooses_the_same_tokens_from_the_bytes(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    worker = worker_of(decoder, Ranks(0, 2), make=Leading)
    assert isinstance(worker, Leading)
    worker.follower = worker_of(decoder, Ranks(1, 2))
    session = session_of(worker)
    forks = [Fork("drawn too", 4), Fork("and", 5)]
    session.submit("drawn", tiny_llama.prompts[3], forks=forks, temperature=0.8, seed=3)
    assert session.submit_all(tiny_llama.prompts).drain().all_tokens(6) == tiny_llama.greedy


def test_a_failed_launch_is_decided_anew_once(decoder: Decoder, tiny_llama: TinyLlama) -> None:
    worker = worker_of(decoder, ALONE, replace(PATH, run=no_memory))
    session = session_of(worker).submit_all(tiny_llama.prompts).drain()
    assert session.all_tokens(6) == tiny_llama.greedy
    assert {path for _, path in session.launches()} == {EAGER.name}
    assert all(num_launches % NUM_LAYERS == 0 for num_launches in session.launches().values())
    quarantined = [pair for output in session.outputs for pair in output.record.quarantined]
    assert len(quarantined) == len(set(quarantined)) > 1


def test_a_step_that_cannot_be_recorded_takes_no_path_out(decoder: Decoder) -> None:
    """Nothing of it runs: it is only to be timed, and memory for a graph of its own may lack."""
    worker = worker_of(decoder, ALONE, replace(PATH, run=no_memory))
    before = worker.dispatcher.decisions
    writer = StepWriter(page_size=PAGE_SIZE, num_pages=NUM_PAGES, is_pinned=False)
    with pytest.raises(RuntimeError, match="no memory"):
        worker.record(writer.write(synthetic_batch([(4, 4)], PAGE_SIZE), {}), capture)
    assert worker.dispatcher.decisions == before
    assert worker.dispatcher.take_quarantined() == []


def test_one_of_several_ranks_ends_a_step_that_fails(decoder: Decoder) -> None:
    worker = worker_of(decoder, Ranks(1, 2), replace(PATH, run=no_memory))
    before = worker.dispatcher.decisions
    writer = StepWriter(page_size=PAGE_SIZE, num_pages=NUM_PAGES, is_pinned=False)
    buffer = writer.write(synthetic_batch([(4, 4)], PAGE_SIZE), {})
    with pytest.raises(LaunchFailed):
        worker.launch(buffer)
    assert worker.dispatcher.decisions == before


class Heard:
    """The other ranks, who note the commands that they get."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def send(self, command: Command, buffer: StepBuffer | None = None) -> None:  # noqa: ARG002
        self.commands.append(command)

    def has(self, kind: type[object]) -> bool:
        return any(isinstance(command, kind) for command in self.commands)


class Same(Ranks):
    """Ranks that have the same values already."""

    def share(self, values: Tensor) -> Tensor:
        return values


class NoHead(LinearTable):
    """Products of which the head has no path any more."""

    def __init__(self) -> None:
        super().__init__({}, ())

    def check(self, sizes: StepSizes) -> None:
        raise NoPathError(None, f"no path is left for {sizes}")


def leading(decoder: Decoder, heard: Heard, path: KernelPath = PATH) -> Worker:
    return worker_of(decoder, Same(0, 2), path, heard=heard)


def unnamed(*_: object) -> None:
    raise DriverError("the driver does not say")


def test_no_error_in_a_step_that_others_compute_is_survived(decoder: Decoder) -> None:
    heard = Heard()
    worker = leading(decoder, heard, replace(PATH, run=unnamed))
    writer = StepWriter(page_size=PAGE_SIZE, num_pages=NUM_PAGES, is_pinned=False)
    with pytest.raises(DeviceLost, match="rank 0 of 2 left a step") as lost:
        worker.launch(writer.write(synthetic_batch([(4, 4)], PAGE_SIZE), {}))
    assert heard.has(Launch)
    assert is_device_lost(lost.value)  # or an attestation would go on


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), NoPathError(None, "no path is left")])
def test_no_error_in_logits_that_others_compute_is_survived(decoder: Decoder, error: Exception) -> None:
    class Broken(Decoder):
        def logits(self, hidden_rows: Tensor, out: Tensor | None = None) -> Tensor:  # noqa: ARG002
            raise error

    heard = Heard()
    worker = leading(decoder, heard)
    worker.decoder = Broken(decoder.config, decoder.weights)
    with pytest.raises(DeviceLost):
        worker.logits(torch.zeros(2, decoder.config.hidden_size))
    assert heard.has(ComputeLogits)


def test_logits_that_have_no_path_are_asked_of_no_rank(decoder: Decoder) -> None:
    heard = Heard()
    worker = leading(decoder, heard)
    worker.dispatcher.tables = (NoHead(),)
    with pytest.raises(NoPathError):
        worker.logits(torch.zeros(2, decoder.config.hidden_size))
    assert not heard.has(ComputeLogits)


def test_a_graph_that_only_the_others_repeat_ends_all(decoder: Decoder) -> None:
    heard = Heard()
    with pytest.raises(DeviceLost), leading(decoder, heard).others.repeating():
        unnamed()
    assert heard.has(Repeat)


def test_a_rank_outside_its_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 2 is outside of \[0, 2\)"):
        Ranks(2, 2)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (RankIdentity({"gpu": "NVIDIA H100", "sm": 90}, "a"), "gpu is NVIDIA H100 there and NVIDIA H200 on rank 0"),
        (RankIdentity({"gpu": "NVIDIA H200"}, "a"), "sm is None there and 90 on rank 0"),
        (RankIdentity({"gpu": "NVIDIA H200", "sm": 90}, "b"), "rank 3 reads other weights than rank 0"),
        (RankIdentity({}, None, "torch sees no GPU"), "rank 3 cannot serve: torch sees no GPU"),
    ],
)
def test_rank_that_differs_ends_the_start(found: RankIdentity, message: str) -> None:
    ours = RankIdentity({"gpu": "NVIDIA H200", "sm": 90}, "a")
    check_same(3, ours, ours)
    with pytest.raises(SettingsError, match=message):
        check_same(3, found, ours)
