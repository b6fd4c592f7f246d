"""The host's part of a decode step that is a graph: loops over rows, and no call of a function for each."""

import gc
import sys
from dataclasses import replace
from types import FrameType

import torch

from kernels.calls.batch import AttentionFlags
from kernels.catalog import path_named
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Decision, Status
from qualification.decision.model_shapes import ServingLimits, shapes_needed, signature_of
from server.engine.execution.graph_keys import GraphSizes
from server.engine.execution.graphs import StepGraphs
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.worker import Worker
from server.engine.operators.dispatch import Dispatcher
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from support.engine.graph_session import Session
from support.models.tiny_llama import NUM_LAYERS, VOCAB

CPU = torch.device("cpu")
PAGE_SIZE = 16
NUM_PAGES = 128
MAX_LEN = 128
PATH = replace(path_named("sdpa.cpu"), is_capturable=True)


class Nothing:
    """A graph of a device that needs no time: its tokens are those of the capture."""

    def replay(self) -> None:
        pass


def session(decoder: Decoder) -> Session:
    limits = ServingLimits(MAX_LEN, 64, PAGE_SIZE, Dtype.FP32, Dtype.FP32)
    shapes = shapes_needed(signature_of(decoder.config), limits)
    decisions = {shape: Decision(shape, PATH.name, Status.PROVEN, PATH.name, (), (), None) for shape in shapes}
    flags = (AttentionFlags(decoder.config.layers[0].attention.scale),) * NUM_LAYERS
    dispatcher = Dispatcher(decisions, (PATH,), flags, redecide=lambda shape, *_: decisions[shape])
    kv = KVCache.allocate(decoder.config, NUM_PAGES, PAGE_SIZE, torch.float32, CPU)
    sizes = GraphSizes((Bucket.LE_128,), (32,), num_prompts=1)
    worker = Worker(decoder, kv, dispatcher, SampledTokens(sizes.max_sampled, CPU))
    graphs = StepGraphs(worker, sizes, max_context=MAX_LEN)

    def capture(work: object) -> Nothing:
        assert callable(work)
        work()
        return Nothing()

    graphs.capture(capture, lambda _: None)
    runner = ModelRunner(worker, graphs)
    scheduler = Scheduler(SchedulerLimits(MAX_LEN, 32, 64), PagePool(NUM_PAGES, PAGE_SIZE), shares_pages=True)
    return Session(Engine(scheduler, runner, EngineOptions(VOCAB, (), 0, runs_ahead=True)))


def calls_of_steps(subject: Session, num_steps: int) -> list[int]:
    """Python functions that were called in each step."""
    counts = []

    def count(_: FrameType, event: str, __: object) -> None:
        counts[-1] += event == "call"

    gc.disable()  # a collection calls whoever asked to be told of it, as hypothesis does
    try:
        for _ in range(num_steps):
            counts.append(0)
            sys.setprofile(count)
            try:
                subject.step()
            finally:
                sys.setprofile(None)
    finally:
        gc.enable()
    return counts


def test_a_steady_decode_step_calls_no_function_for_each_row(decoder: Decoder) -> None:
    counts = {}
    for num_rows in (1, 32):
        subject = session(decoder)
        for row in range(num_rows):
            subject.submit(f"r{row}", [1, 2, 3], max_tokens=60)
        while subject.engine.num_waiting:
            subject.step()
        for _ in range(4):  # until all rows have their first token, and both of the host's buffers were filled
            subject.step()
        counts[num_rows] = calls_of_steps(subject, 6)  # within the first page
        assert all(len(output.deltas) == num_rows for output in subject.outputs[-6:])
    assert counts[1] == counts[32]
