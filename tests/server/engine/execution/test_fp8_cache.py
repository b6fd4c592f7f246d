"""A cache of 8 bits under a real engine: it answers as a plain model that rounds keys and values likewise."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from kernels.calls.batch import AttentionFlags
from kernels.catalog import path_named
from kernels.fp8_cache import pages
from kernels.system.device import dtype_of
from kernels.vocabulary.cache_dtype import FP8
from qualification.decision.model_shapes import ServingLimits, attention_shapes_needed
from qualification.model.cached_layers import skipping_fp8_cache
from server.engine.execution.runner import ModelRunner
from server.engine.execution.sampling import SampledTokens
from server.engine.execution.worker import Worker
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.dispatch_key import Heads
from server.engine.operators.observation import Border
from server.engine.scheduling.engine import Engine, EngineOptions
from server.engine.scheduling.pages import PagePool
from server.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from server.model.decoder import Decoder
from server.model.kv_cache import Fp8Layer, KVCache
from server.model.load.load import load_config, load_decoder
from server.protocol.messages import Fork
from server.settings import CacheDtype, DtypeChoice, LoadFormat
from support.engine import serving_faults as faults
from support.engine.checked_layers import CheckedLayers
from support.engine.closure_graphs import decide, redecide
from support.engine.graph_session import Session
from support.engine.replayed import ReplayedEngine
from support.engine.serving_faults import BrokenWriter
from support.models.tiny_llama import NAN_TOKEN, NUM_TOKENS, VOCAB, TinyLlama

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES, MAX_LEN, MAX_SEQS, STEP_TOKENS = 16, 18, 160, 8, 64
PLAIN, CACHED = PATHS = path_named("sdpa.cpu"), path_named("sdpa.cpu.fp8")


class RoundedCache(DynamicCache):
    """Keys and values [batch, kv_heads, tokens, d], each rounded to e4m3 over its own largest magnitude."""

    skipped: int | None = None  # the layer that rounds nothing

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *given: object, **named: object
    ) -> tuple[Tensor, Tensor]:
        found = (it if layer_idx == self.skipped else rounded(it) for it in (key_states, value_states))
        return super().update(*found, layer_idx, *given, **named)  # type: ignore[no-any-return]


def rounded(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.fixture(scope="module")
def greedy(tiny_llama: TinyLlama) -> list[list[int]]:
    return greedy_over(tiny_llama, None)


def greedy_over(tiny_llama: TinyLlama, skipped: int | None) -> list[list[int]]:
    """The answers of transformers' model over such a cache; others than those without rounding."""
    model = LlamaForCausalLM.from_pretrained(tiny_llama.folder).float().eval()
    found = []
    for prompt in tiny_llama.prompts:
        cache, ids = RoundedCache(), list(prompt)
        cache.skipped = skipped
        given = ids
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                logits = model(torch.tensor([given]), cache=cache, use_cache=True).logits[0, -1]
            given = [int(logits[:NAN_TOKEN].argmax())]  # the last token
            ids += given
        found.append(ids[len(prompt) :])
    assert found != tiny_llama.greedy
    return found


def decoder_of(tiny_llama: TinyLlama, dtype: torch.dtype, *skipped: str) -> Decoder:
    config = skipping_fp8_cache(load_config(tiny_llama.folder), skipped)
    return load_decoder(tiny_llama.folder, config, dtype=dtype, device=CPU, load_format=LoadFormat.AUTO)


def runner_of(decoder: Decoder, dtype: torch.dtype = torch.float32, num_pages: int = NUM_PAGES) -> ModelRunner:
    config = decoder.config
    limits = ServingLimits(MAX_LEN, STEP_TOKENS, PAGE_SIZE, dtype_of(dtype), FP8)
    decisions = {
        shape: decide(shape, (CACHED if shape.kv_dtype is FP8 else PLAIN).name)
        for shape in attention_shapes_needed(config, limits)
    }
    flags = (AttentionFlags(config.layers[0].attention.scale),) * config.num_layers
    heads = tuple(map(Heads.of, config.attentions))
    dispatcher = Dispatcher(decisions, PATHS, flags, redecide=redecide, heads=heads)
    kv = KVCache.allocate(config, num_pages, PAGE_SIZE, pages.E4M3, CPU, model_dtype=dtype)
    for tensor in kv.tensors:
        tensor.fill_(math.nan if tensor.is_floating_point() else 0xFF)  # NaN, as numbers and as scales
    return ModelRunner(Worker(decoder, kv, dispatcher, SampledTokens(MAX_SEQS, CPU)))


def engine_of(decoder: Decoder, *, runs_ahead: bool) -> tuple[Engine, KVCache]:
    runner = runner_of(decoder)
    scheduler = Scheduler(
        SchedulerLimits(MAX_LEN, MAX_SEQS, STEP_TOKENS), PagePool(NUM_PAGES, PAGE_SIZE), shares_pages=True
    )
    return Engine(scheduler, runner, EngineOptions(VOCAB, (), 0, runs_ahead)), runner.worker.kv


def asked_twice(engine: Engine, model: TinyLlama, wanted: list[list[int]]) -> Session:
    """Ask all prompts at once, each for two answers, and again: all are as wanted."""
    session = Session(engine)
    for turn in ("first", "again"):
        for index, prompt in enumerate(model.prompts):
            session.submit(f"{turn} {index}", prompt, forks=[Fork(f"{turn} fork of {index}", None)])
        session.drain()
        for index, tokens in enumerate(wanted):
            assert session.tokens(f"{turn} {index}") == session.tokens(f"{turn} fork of {index}") == tokens
    return session


def test_answers_alone_batched_forked_behind_hits_and_preempted(
    decoder: Decoder, tiny_llama: TinyLlama, greedy: list[list[int]]
) -> None:
    engine, _ = engine_of(decoder, runs_ahead=True)
    session = asked_twice(engine, tiny_llama, greedy)
    for index, prompt in enumerate(tiny_llama.prompts):
        session.submit(f"alone {index}", prompt)
        session.drain()
        assert session.tokens(f"alone {index}") == greedy[index]
    assert session.total("num_prefix_hit_tokens") > 0
    assert session.total("num_preemptions") > 0


def test_a_layer_kept_out_of_it_is_not_rounded(tiny_llama: TinyLlama, greedy: list[list[int]]) -> None:
    wanted = greedy_over(tiny_llama, 1)
    assert wanted != greedy
    engine, kv = engine_of(decoder_of(tiny_llama, torch.float32, "1"), runs_ahead=True)
    assert [layer.k.dtype for layer in kv.layers[:2]] == [pages.E4M3, torch.float32]
    asked_twice(engine, tiny_llama, wanted)


def test_answers_computed_again_are_the_same(tiny_llama: TinyLlama) -> None:
    runner = runner_of(decoder_of(tiny_llama, torch.bfloat16), torch.bfloat16, num_pages=40)
    engine = ReplayedEngine(runner, num_pages=40, sealed_share=1.0)
    reports = [report for _ in range(4) for report in engine.burst()]
    assert [report.detail for report in reports if report.result != "match"] == []
    assert {report.route for report in reports} >= {"hit", "forked", "batched"}
    assert sum(output.record.num_page_mismatches for output in engine.outputs) == 0
    runner.writer = BrokenWriter(runner, faults.neighbours_page)
    assert any(report.cause is not None for _ in range(8) for report in engine.burst())


def test_a_scale_that_a_step_does_not_write_changes_answers(
    decoder: Decoder, tiny_llama: TinyLlama, greedy: list[list[int]]
) -> None:
    engine, kv = engine_of(decoder, runs_ahead=False)
    session = Session(engine)
    session.submit("right", tiny_llama.prompts[3])
    session.drain()
    for layer in kv.layers:
        pages.scales_of(layer.k).mul_(1.5)  # of the pages that the prompt is found in
    session.submit("wrong", tiny_llama.prompts[3])
    session.drain()
    assert session.tokens("right") == greedy[3]
    assert session.tokens("wrong") != greedy[3]


class FaultyLayer(Fp8Layer):
    """Pages whose write has a fault, as a kernel's could: `spoil` gets keys' pages, their scales before, and where."""

    spoil: Callable[[Tensor, Tensor, Tensor, Tensor], None]

    def write(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, **named: Any
    ) -> None:
        before = pages.scales_of(self.k).clone()
        Fp8Layer.write(self, q, k, v, cos_sin, positions, slots, **named)
        self.spoil(self.k, before, slots // PAGE_SIZE, slots % PAGE_SIZE)


def stale_scale(held: Tensor, before: Tensor, page: Tensor, offset: Tensor) -> None:
    pages.scales_of(held)[page, :, offset] = before[page, :, offset]


def scale_of_another_head(held: Tensor, _: Tensor, page: Tensor, offset: Tensor) -> None:
    scales = pages.scales_of(held)
    scales[page, :, offset] = scales[page, :, offset].roll(1, dims=-1)


def cut_off(held: Tensor, _: Tensor, page: Tensor, offset: Tensor) -> None:
    back, scales = pages.dequantized_at(held, page, offset), pages.scales_of(held)
    scales[page, :, offset] /= 2  # numbers up to 896 become 448
    numbers = (back / scales[page, :, offset][..., None]).clamp(-448, 448).to(pages.E4M3)
    held.view(torch.uint8)[page, offset] = numbers.view(torch.uint8)


@pytest.mark.parametrize("dtype", [DtypeChoice.FP32, DtypeChoice.BF16])
def test_layers_are_proven_and_wrong_writes_refused(tiny_llama: TinyLlama, dtype: DtypeChoice) -> None:
    model = CheckedLayers.made(tiny_llama.folder, dtype, kv_cache_dtype=CacheDtype.FP8)
    assert model.subject.limits.kv_dtype is FP8
    assert model.check().first is None
    kv = model.runner.worker.kv
    for spoil in (stale_scale, scale_of_another_head, cut_off):
        pages.scales_of(kv.layers[-1].k).mul_(1.5)  # of what was in the pages before
        kind = type("Faulty", (FaultyLayer,), {"spoil": staticmethod(spoil)})
        model.runner.worker.kv = KVCache((*kv.layers[:-1], kind(kv.layers[-1].k, kv.layers[-1].v)))
        found = model.check().first
        assert found is not None
        assert (found.layer, found.section) == (len(kv.layers) - 1, Border.KEYS.value)


def test_pages_know_what_they_hold() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 2, 20, generator=generator) * torch.randn(40, 2, 1, generator=generator).mul(4).exp2()
    x[3, 1], x[4, 0] = 0.0, 1e-38  # a scale of its own that is neither zero nor subnormal
    held = pages.allocate(6, 8, 2, 20, CPU)
    slots = torch.randperm(48, generator=generator)[:40]
    back = pages.write(x, held, slots)
    step = partial(
        torch.maximum, x.abs().amax(-1, keepdim=True).clamp(min=2**-100) * 2**-9 / 448
    )  # of subnormal numbers
    assert bool(((back - x).abs() <= 0.5001 * step(2**-3 * x.abs())).all())
    assert torch.equal(pages.dequantized(held).flatten(0, 1)[slots], back)
    assert torch.equal(pages.dequantized_at(held, slots // 8, slots % 8), back)
    largest = x.abs() == x.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(back[largest & (x.abs() > 1e-20)], x[largest & (x.abs() > 1e-20)], rtol=2e-7, atol=0)
    copied = torch.zeros_like(pages.memory_of(held))
    copied.copy_(pages.memory_of(held))
    assert torch.equal(pages.dequantized(pages.view_of(copied, 8, 2)), pages.dequantized(held))
    with pytest.raises(ValueError, match="expected strides"):
        pages.scales_of(torch.zeros(6, 8, 2, 20).to(pages.E4M3))
