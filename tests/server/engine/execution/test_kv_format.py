"""A cache whose numbers have scales: each token's keys and values over a power of two, so that no bit is lost."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.calls.batch import AttentionFlags
from kernels.vocabulary.shape import Dtype
from qualification.decision.model_shapes import ServingLimits, shapes_needed, signature_of
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.worker import Worker
from server.engine.operators.dispatch import Dispatcher
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache, KVLayer
from server.protocol.messages import Fork
from support.engine.closure_graphs import EAGER, decide, redecide
from support.engine.graph_session import Session
from support.models.tiny_llama import VOCAB, TinyLlama

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES, MAX_LEN, MAX_SEQS, STEP_TOKENS = 16, 18, 160, 8, 64


class ScaledLayer(KVLayer):
    """scales [num_pages + 1, page_size, 2, kv_heads]: of keys, and of values."""

    @classmethod
    def like(cls, plain: KVLayer) -> "ScaledLayer":
        num_pages, page_size, num_heads, _ = plain.k.shape
        numbers = (torch.full_like(plain.k, torch.nan) for _ in range(2))
        return cls(*numbers, torch.full((num_pages, page_size, 2, num_heads), torch.nan))

    def write(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, **named: Any
    ) -> None:
        KVLayer.write(self, q, k, v, cos_sin, positions, slots, **named)  # which rotates k
        assert self.scales is not None
        scales = torch.stack([x.abs().amax(-1).log2().ceil().exp2() for x in (k, v)], 1)
        self.scales.flatten(0, 1)[slots] = scales
        for numbers, x, scale in zip((self.k, self.v), (k, v), scales.unbind(1), strict=True):
            numbers.flatten(0, 1)[slots] = x / scale[..., None]

    def read(self) -> tuple[Tensor, Tensor]:
        assert self.scales is not None
        of_keys, of_values = self.scales[..., None].unbind(2)
        return self.k * of_keys, self.v * of_values


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_cache_with_scales_serves_chunks_forks_and_hits(
    decoder: Decoder, tiny_llama: TinyLlama, runs_ahead: bool
) -> None:
    config = decoder.config
    limits = ServingLimits(MAX_LEN, STEP_TOKENS, PAGE_SIZE, Dtype.FP32, Dtype.FP32)
    decisions = {shape: decide(shape, EAGER.name) for shape in shapes_needed(signature_of(config), limits)}
    flags = (AttentionFlags(config.layers[0].attention.scale),) * config.num_layers
    dispatcher = Dispatcher(decisions, (EAGER,), flags, redecide=redecide)
    plain = KVCache.allocate(config, NUM_PAGES, PAGE_SIZE, torch.float32, CPU)
    kv = KVCache(tuple(map(ScaledLayer.like, plain.layers)))
    runner = ModelRunner(Worker(decoder, kv, dispatcher, SampledTokens(MAX_SEQS, CPU)))
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = Scheduler(SchedulerLimits(MAX_LEN, MAX_SEQS, STEP_TOKENS), pool, shares_pages=True)
    session = Session(Engine(scheduler, runner, EngineOptions(VOCAB, (), 0, runs_ahead)))
    for turn in ("first", "again"):
        for index, prompt in enumerate(tiny_llama.prompts):
            forks = [Fork(f"{turn} fork of {index}", None)]
            session.submit(f"{turn} {index}", prompt, forks=forks)
        session.drain()
        for index, wanted in enumerate(tiny_llama.greedy):
            assert session.tokens(f"{turn} {index}") == wanted
            assert session.tokens(f"{turn} fork of {index}") == wanted
    assert session.total("num_prefix_hit_tokens") > 0
    assert session.total("num_preemptions") > 0
