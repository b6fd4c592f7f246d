"""An engine of a model some of whose layers keep a state, and everything a test may want to look at.

Slots begin as NaN, but for the one that must stay zero, so that a state which nothing wrote shows.
"""

from dataclasses import replace

import torch

from kernels.calls.batch import AttentionFlags
from kernels.catalog import path_named
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import Dtype
from qualification.decision.model_shapes import ServingLimits, shapes_needed, signature_of
from qualification.model.config import ModelConfig
from server.engine.execution.graph_keys import GraphSizes
from server.engine.execution.graphs import StepGraphs
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.worker import Worker
from server.engine.operators.dispatch import Dispatcher
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.engine.scheduling.states import StatePool
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.layer_state import StateCache
from support.engine.closure_graphs import EAGER, PATH, capture, decide, redecide

CPU = torch.device("cpu")
PAGE_SIZE, MAX_LEN, MAX_SEQS = 8, 128, 6
SIZES = GraphSizes((Bucket.LE_512,), (2, MAX_SEQS), (16, 64), (4,), (64,), num_prompts=3)
LATENT = replace(path_named("sdpa.cpu.latent"), name="graphable latents", is_capturable=True)


def dispatcher_of(config: ModelConfig) -> Dispatcher:
    signature = signature_of(config)
    path = PATH if signature.values is None else LATENT
    limits = ServingLimits(MAX_LEN, 64, PAGE_SIZE, Dtype.FP32, Dtype.FP32)
    decisions = {shape: decide(shape, path.name) for shape in shapes_needed(signature, limits)}
    flags = tuple(AttentionFlags(it.scale, window=it.window) for it in config.attentions)
    return Dispatcher(decisions, (PATH, EAGER, LATENT), flags, redecide=redecide, layers=config.attention_layers)


def poisoned(states: StateCache) -> StateCache:
    """Fill all slots but the one that is zero with NaN."""
    for layer in states.layers:
        for tensor in layer.tensors:
            tensor.fill_(torch.nan)
            tensor[states.num_slots] = 0
    return states


class Hybrid:
    """The engine, and its parts."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_pages: int = 64,
        num_slots: int = 12,
        max_num_seqs: int = MAX_SEQS,
        step_tokens: int = 64,
        runs_ahead: bool = False,
        has_graphs: bool = False,
    ) -> None:
        config = decoder.config
        kv = KVCache.allocate(config, num_pages, PAGE_SIZE, torch.float32, CPU)
        states = StateCache.allocate(config, num_slots, torch.float32, CPU)
        assert states is not None
        tokens = SampledTokens(SIZES.max_sampled, CPU)
        worker = Worker(decoder, kv, dispatcher_of(config), tokens, states=poisoned(states))
        graphs = StepGraphs(worker, SIZES, max_context=MAX_LEN) if has_graphs else None
        if graphs is not None:
            graphs.capture(capture, lambda _: None)
        self.states, self.pool = states, StatePool(num_slots)
        self.runner = ModelRunner(worker, graphs)
        limits = SchedulerLimits(MAX_LEN, max_num_seqs, step_tokens)
        self.scheduler = Scheduler(limits, PagePool(num_pages, PAGE_SIZE, self.pool), shares_pages=True)
        self.engine = Engine(self.scheduler, self.runner, EngineOptions(config.vocab_size, (), 0, runs_ahead))
