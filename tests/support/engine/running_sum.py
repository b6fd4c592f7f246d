"""A toy recurrence: a running sum of what the layer reads, beside layers that attend; and engines that serve it.

The state of a layer is a decayed sum of its tokens; each of several ranks keeps its own columns. Slots begin as NaN,
but for the one that must stay zero, so that a state which nothing wrote shows.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.calls.batch import AttentionFlags
from kernels.catalog import path_named
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import AttentionShape, Dtype
from qualification.decision.decision import Decision
from qualification.decision.model_shapes import ServingLimits, shapes_needed, signature_of
from qualification.model.config import ModelConfig, RecurrenceConfig, StateTensor
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
from server.model.block import Sublayer
from server.model.decoder import Decoder, Operators
from server.model.kv_cache import KVCache
from server.model.layer_state import StateCache
from server.model.layers import LayerWeights, Weights
from server.model.step import Step
from support.engine.closure_graphs import EAGER, PATH, capture, decide, redecide
from support.models.paged_runner import PagedRunner

CPU = torch.device("cpu")
PAGE_SIZE, MAX_LEN, MAX_SEQS = 8, 128, 6
SIZES = GraphSizes((Bucket.LE_512,), (2, MAX_SEQS), (16, 64), (4,), (64,), num_prompts=3)
LATENT = replace(path_named("sdpa.cpu.latent"), name="graphable latents", is_capturable=True)
_DECAY = 0.75


@dataclass(frozen=True, slots=True)
class RunningSum(RecurrenceConfig):
    """columns  of the hidden state that this rank sums up"""

    columns: range = range(0)

    @classmethod
    def over(cls, columns: range) -> "RunningSum":
        return cls("running sums", (StateTensor((len(columns),), Dtype.FP32),), columns=columns)

    def of_rank(self, rank: int, world: int) -> "RunningSum":
        size = len(self.columns)
        return RunningSum.over(range(size * rank // world, size * (rank + 1) // world))


@dataclass(frozen=True, slots=True)
class RunningSumMixer:
    place: int
    columns: slice

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        assert step.states is not None
        (slots,), rows = step.states.cache.layers[self.place].tensors, step.states.rows
        own, out = x[:, self.columns].float(), torch.zeros_like(x)
        states = slots[rows.sources]
        copies: dict[int, list[int]] = {}
        for token, slot in zip(rows.write_tokens.tolist(), rows.write_slots.tolist(), strict=True):
            copies.setdefault(token, []).append(slot)
        bounds = zip(rows.starts.tolist(), rows.stops.tolist(), rows.targets.tolist(), strict=True)
        for begin, (start, stop, target) in zip(states, bounds, strict=True):
            state = begin
            for token in range(start, stop):
                state = _DECAY * state + own[token]
                out[token, self.columns] = torch.tanh(state).to(x.dtype)
                slots[copies.get(token, [])] = state
            slots[target] = state
        return out


def recurrence(place: int, config: RecurrenceConfig, _: LayerWeights) -> Sublayer:
    assert isinstance(config, RunningSum)
    return RunningSumMixer(place, slice(config.columns.start, config.columns.stop))


def plain_loop(_: int, __: RecurrenceConfig, ___: LayerWeights) -> Sublayer:
    """Make the reference: all tokens of one sequence at once, and no slot."""

    def mixer(x: Tensor, _: Step) -> Tensor:
        state, out = torch.zeros_like(x[0]), torch.empty_like(x)
        for token, row in enumerate(x):
            state = _DECAY * state + row
            out[token] = torch.tanh(state)
        return out

    return mixer


def hybrid_config(plain: ModelConfig, rank: int = 0, world: int = 1) -> ModelConfig:
    """A running sum before each layer of a model, or of a rank's part of it, with the same feed-forward."""
    mixer = RunningSum.over(range(plain.hidden_size)).of_rank(rank, world)
    return replace(plain, layers=tuple(it for layer in plain.layers for it in (replace(layer, mixer=mixer), layer)))


def hybrid_weights(plain: Weights) -> Weights:
    layers = tuple(it for layer in plain.layers for it in (layer, layer))
    return replace(plain, layers=layers, embedding=plain.embedding.nan_to_num())  # any token may be chosen


def hybrid_decoder(plain: Decoder) -> Decoder:
    """Return one of running sums beside the layers of `plain`, computed by the same ranks."""
    config, ranks = hybrid_config(plain.config, plain.ranks.index, plain.ranks.world), plain.ranks
    return Decoder(config, hybrid_weights(plain.weights), ranks, operators=Operators(recurrence=recurrence))


def reference_answer(plain: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy tokens of one prompt, each computed from the beginning, without cache or batch."""
    runner = PagedRunner(
        Decoder(hybrid_config(plain.config), hybrid_weights(plain.weights), operators=Operators(recurrence=plain_loop))
    )
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(runner.logits(torch.tensor(tokens), [len(tokens)])[-1].argmax()))
    return tokens[len(prompt) :]


def dispatcher_of(config: ModelConfig, decisions: dict[AttentionShape, Decision[AttentionShape]] | None) -> Dispatcher:
    if decisions is None:
        limits = ServingLimits(MAX_LEN, 64, PAGE_SIZE, Dtype.FP32, Dtype.FP32)
        signature = signature_of(config)
        path = PATH if signature.values is None else LATENT
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
    """An engine of a hybrid model, and everything a test may want to look at.

    `plain`: a model that has recurrent layers, or one that gets running sums beside its layers
    """

    def __init__(
        self,
        plain: Decoder,
        *,
        num_pages: int = 64,
        num_slots: int = 12,
        max_num_seqs: int = MAX_SEQS,
        step_tokens: int = 64,
        runs_ahead: bool = False,
        has_graphs: bool = False,
    ) -> None:
        decoder = plain if plain.config.recurrences else hybrid_decoder(plain)
        config = decoder.config
        kv = KVCache.allocate(config, num_pages, PAGE_SIZE, torch.float32, CPU)
        states = StateCache.allocate(config, num_slots, torch.float32, CPU)
        assert states is not None
        tokens = SampledTokens(SIZES.max_sampled, CPU)
        worker = Worker(decoder, kv, dispatcher_of(config, None), tokens, states=poisoned(states))
        self.states, self.pool = states, StatePool(num_slots)
        self.runner, self.engine, self.scheduler = engine_of(
            worker, PagePool(num_pages, PAGE_SIZE, self.pool), max_num_seqs, step_tokens, runs_ahead, has_graphs
        )


def engine_of(
    worker: Worker, pool: PagePool, max_num_seqs: int, step_tokens: int, runs_ahead: bool, has_graphs: bool
) -> tuple[ModelRunner, Engine, Scheduler]:
    graphs = None
    if has_graphs:
        graphs = StepGraphs(worker, SIZES, max_context=MAX_LEN)
        graphs.capture(capture, lambda _: None)
    runner = ModelRunner(worker, graphs)
    scheduler = Scheduler(SchedulerLimits(MAX_LEN, max_num_seqs, step_tokens), pool, shares_pages=True)
    return (
        runner,
        Engine(scheduler, runner, EngineOptions(worker.decoder.config.vocab_size, (), 0, runs_ahead)),
        scheduler,
    )
