"""An engine whose graphs are closures, on a CPU."""

import torch

from kernels.calls.batch import AttentionFlags
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import Dtype
from qualification.decision.model_shapes import ServingLimits, shapes_needed, signature_of
from server.engine.execution.graph_keys import GraphSizes, row_sizes
from server.engine.execution.graphs import StepGraphs
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.worker import Worker
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.linear import LinearTable
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from support.engine.closure_graphs import EAGER, PATH, capture, decide, redecide
from support.engine.graph_session import Session
from support.models.tiny_llama import NUM_LAYERS, VOCAB

CPU = torch.device("cpu")
PAGE_SIZE = 16
MAX_LEN = 160  # two context buckets


class Subject:
    """An engine with graphs, and everything a test may want to look at."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        path: str = PATH.name,
        num_pages: int = 64,
        max_num_seqs: int = 8,
        runs_ahead: bool = False,
        tables: tuple[LinearTable, ...] = (),
    ) -> None:
        config = decoder.config
        limits = ServingLimits(MAX_LEN, 64, PAGE_SIZE, Dtype.FP32, Dtype.FP32)
        shapes = shapes_needed(signature_of(config), limits)
        flags = (AttentionFlags(config.layers[0].attention.scale),) * NUM_LAYERS
        self.dispatcher = Dispatcher(
            {shape: decide(shape, path) for shape in shapes},
            (PATH, EAGER),
            flags,
            redecide=redecide,
            tables=tables,
        )
        kv = KVCache.allocate(config, num_pages, PAGE_SIZE, torch.float32, CPU)
        for pages in kv.tensors:
            pages.fill_(torch.nan)  # whatever a row reads beyond its own tokens would show
        self.sizes = GraphSizes((Bucket.LE_512,), row_sizes(max_num_seqs), (16, 64), (8,), (64,), num_prompts=3)
        worker = Worker(decoder, kv, self.dispatcher, SampledTokens(self.sizes.max_sampled, CPU))
        self.graphs = StepGraphs(worker, self.sizes, max_context=MAX_LEN)
        self.graphs.capture(capture, lambda _: None)
        self.kv = kv
        self.runner = runner = ModelRunner(worker, self.graphs)
        scheduler = Scheduler(SchedulerLimits(MAX_LEN, max_num_seqs, 64), PagePool(num_pages, PAGE_SIZE))
        self.session = Session(Engine(scheduler, runner, EngineOptions(VOCAB, (), 0, runs_ahead)))
