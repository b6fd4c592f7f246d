"""Wrong layers beside attention and products: norms, residual, rotation, cache writes, embedding, head, loader."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from kernels.linear.weights import PlainWeight
from qualification.model.config import ModelConfig, RopeConfig
from served_faults.plant import Fault, Kind, MakeDecoder, Model, Plant
from server.engine.execution.runner import ModelRunner
from server.model.decoder import Decoder, LayerObserver, Operators
from server.model.kv_cache import KVLayer
from server.model.layers import LayerWeights, Weights
from server.model.linear import Linear
from server.model.ranks import Ranks
from server.model.step import Step
from support.engine.checked_layers import Tensors

MOST_ROWS = 8  # of a decode step


class ChangedSteps(Decoder):
    """Computes other steps than those that it is given."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ranks: Ranks,
        operators: Operators,
        *,
        change: Callable[[Step], Step] = lambda it: it,
        after: Callable[[Step], None] = lambda _: None,
        on_logits: Callable[[Tensor], Tensor] = lambda it: it,
        watch: Callable[[LayerObserver | None], LayerObserver | None] = lambda it: it,
    ) -> None:
        super().__init__(config, weights, ranks, operators)
        self._change, self._after, self._on_logits, self._watch = change, after, on_logits, watch

    def forward(self, step: Step, observer: LayerObserver | None = None) -> Tensor:
        found = super().forward(self._change(step), self._watch(observer))
        self._after(step)
        return found

    def logits(self, hidden_rows: Tensor, out: Tensor | None = None) -> Tensor:
        return self._on_logits(super().logits(hidden_rows, out))


@dataclass(frozen=True)
class ResidualDropped:
    """An observer of layers that writes zeros over the residual behind attention of layer 1."""

    inner: LayerObserver | None

    def on_attention(self, layer: int, read: Tensor, residual: Tensor) -> None:
        if self.inner is not None:
            self.inner.on_attention(layer, read, residual)

    def on_feed_forward(self, layer: int, read: Tensor, residual: Tensor) -> None:
        if layer == 1:
            residual.zero_()
        if self.inner is not None:
            self.inner.on_feed_forward(layer, read, residual)

    def on_recurrence(self, layer: int, projected: Tensor, gates: Tensor, out: Tensor) -> None:
        if self.inner is not None:
            self.inner.on_recurrence(layer, projected, gates, out)

    def on_finish(self, layer: int, residual: Tensor) -> None:
        if self.inner is not None:
            self.inner.on_finish(layer, residual)


def _decoder(**changes: object) -> MakeDecoder:
    def make(config: ModelConfig, weights: Weights, ranks: Ranks, operators: Operators) -> Decoder:
        return ChangedSteps(config, weights, ranks, operators, **changes)  # type: ignore[arg-type]

    return make


def _step(change: Callable[[Step], Step]) -> Callable[[], Plant]:
    return lambda: Plant(decoder=_decoder(change=change))


def _logits(change: Callable[[Tensor], Tensor]) -> Callable[[], Plant]:
    return lambda: Plant(decoder=_decoder(on_logits=change))


def _config(change: Callable[[ModelConfig], ModelConfig]) -> Callable[[], Plant]:
    return lambda: Plant(model=lambda config, weights: (change(config), weights))


def _weights(change: Callable[[Weights], Weights]) -> Callable[[], Plant]:
    return lambda: Plant(model=lambda config, weights: (config, change(weights)))


def _layer(change: Callable[[LayerWeights], LayerWeights], place: int = 1) -> Callable[[], Plant]:
    def changed(weights: Weights) -> Weights:
        layers = [change(it) if at == place else it for at, it in enumerate(weights.layers)]
        return replace(weights, layers=tuple(layers))

    return _weights(changed)


def _norm(factor: float) -> Callable[[], Plant]:
    def scaled(layer: LayerWeights) -> LayerWeights:
        assert layer.attention_norm is not None
        return replace(layer, attention_norm=layer.attention_norm * factor)

    return _layer(scaled)


def _head(change: Callable[[Tensor], Tensor]) -> Callable[[], Plant]:
    def changed(weights: Weights) -> Weights:
        values = change(weights.head.weight.dequantized().to(weights.embedding.dtype))
        return replace(weights, head=Linear(PlainWeight(values), weights.head.bias))

    return _weights(changed)


def _swapped(rows: Tensor, one: int, other: int) -> Tensor:
    found = rows.clone()
    found[[one, other]] = rows[[other, one]]
    return found


def _at_decode(change: Callable[[Tensor], Tensor]) -> Callable[[Step], Step]:
    """Change the positions of steps of so few tokens that they are rows of decode, or short prompts."""

    def changed(step: Step) -> Step:
        return step if step.positions.shape[-1] > MOST_ROWS else replace(step, positions=change(step.positions))

    return changed


def _slot_missed(step: Step) -> Step:
    """Write keys and values of one place in 16 to the place before it."""
    return replace(step, slots=torch.where(step.slots % 16 == 5, step.slots - 1, step.slots))


def _rows_at(layer: KVLayer, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return of keys and of values all rows, and those at the slots."""
    pages = [it.view(-1, *it.shape[2:]) for it in (layer.k, layer.v)]
    return [(it, it[slots]) for it in pages]


def _values_in_bf16(step: Step) -> None:
    for layer in step.kv.layers:
        _, (pages, rows) = _rows_at(layer, step.slots)
        pages[step.slots] = rows.bfloat16().to(rows.dtype)


def _lost_writes() -> Plant:
    """Lose what one step in 100 writes, but for the layer that is computed last."""
    calls = count()

    def lose(step: Step) -> None:
        if next(calls) % 100 == 99:
            for layer in step.kv.layers[:-1]:
                for pages, rows in _rows_at(layer, step.slots):
                    pages[step.slots] = torch.zeros_like(rows)

    return Plant(decoder=_decoder(after=lose))


def _layers_exchanged(step: Step) -> None:
    """Keep the keys of the first layer in the cache of the second one, and the other way round."""
    first, second = (_rows_at(it, step.slots)[0] for it in step.kv.layers[:2])
    first[0][step.slots], second[0][step.slots] = second[1], first[1]


def _last_slots_swapped(step: Step) -> Step:
    return replace(step, slots=torch.cat((step.slots[:-2], step.slots[-2:].flip(0))))


def _another_rows(logits: Tensor) -> Tensor:
    return logits.flip(0) if 1 < logits.shape[0] <= MOST_ROWS else logits


def _theta(config: ModelConfig) -> ModelConfig:
    def changed(rope: RopeConfig) -> RopeConfig:
        return replace(rope, theta=rope.theta * 1.01)

    layers = tuple(replace(it, mixer=replace(it.attention, rope=changed(it.attention.rope))) for it in config.layers)
    return replace(config, layers=layers)


def _head_dims_exchanged(layer: LayerWeights) -> LayerWeights:
    """Order a head's dimensions as a rotation of neighbours has them."""
    values = layer.qkv.weight.dequantized()
    size = layer.output.weight.size[1]  # of all query heads
    queries = values[:size].view(-1, 8, 2, values.shape[1]).transpose(1, 2).reshape(size, -1)
    weight = PlainWeight(torch.cat((queries, values[size:])).contiguous())
    return replace(layer, qkv=replace(layer.qkv, weight=weight))


def _renamed(one: str, other: str) -> Callable[[], Plant]:
    """Load each tensor of a name from another one."""

    def tensors(given: Tensors) -> Tensors:
        return {name: given[name.replace(one, other)].clone() for name in given}

    return lambda: Plant(tensors=tensors)


def _half_loaded(given: Tensors) -> Tensors:
    """Leave out the second half of a tensor, as a shard that was not read to its end."""
    name = "model.layers.1.mlp.down_proj.weight"
    values = given[name].clone()
    values[values.shape[0] // 2 :] = 0
    return given | {name: values}


class FlippedBit:
    """One bit of a weight that flips in memory, when the engine has served some steps."""

    def __init__(self) -> None:
        self._steps = count()

    def __call__(self, runner: ModelRunner) -> None:
        if next(self._steps) == 20:
            weight = runner.worker.decoder.weights.layers[1].output.weight
            assert isinstance(weight, PlainWeight)
            weight.values.view(torch.int32)[3, 5] ^= 1 << 26


LAYER_FAULTS = (
    Fault("epsilon of norms x 100", Kind.NORM, _config(lambda it: replace(it, norm_eps=it.norm_eps * 100))),
    Fault("a norm x 1.001", Kind.NORM, _norm(1.001)),
    Fault("a norm x 1.00001", Kind.NORM, _norm(1.00001)),
    Fault("the residual of a layer dropped", Kind.RESIDUAL, lambda: Plant(decoder=_decoder(watch=ResidualDropped))),
    Fault(
        "position 37 rotated as 38", Kind.ROTATION,
        _step(lambda it: replace(it, positions=torch.where(it.positions == 37, 38, it.positions))),
    ),
    Fault("decode rotated one behind", Kind.ROTATION, _step(_at_decode(lambda it: (it - 1).clamp_(min=0)))),
    Fault("a wrong slot for 1 token in 16", Kind.CACHE, _step(_slot_missed)),
    Fault("values kept in bf16", Kind.CACHE, lambda: Plant(decoder=_decoder(after=_values_in_bf16))),
    Fault("writes of 1 step in 100 lost", Kind.CACHE, _lost_writes, most_answers=120),
    Fault(
        "embeddings of two ids swapped", Kind.EMBEDDING,
        _weights(lambda it: replace(it, embedding=_swapped(it.embedding, 40, 41))),
    ),
    Fault("two columns of the logits swapped", Kind.EMBEDDING, _head(lambda it: _swapped(it, 40, 41))),
    Fault("logits x 1.01", Kind.EMBEDDING, _logits(lambda it: it.mul_(1.01))),
    Fault("another row's logits", Kind.EMBEDDING, _logits(_another_rows)),
)  # fmt: skip
OWN_LAYER_FAULTS = (
    Fault("the final norm skipped", Kind.NORM, _weights(lambda it: replace(it, final_norm=it.final_norm * 0 + 1))),
    Fault(
        "norms of queries and keys exchanged", Kind.NORM,
        _layer(lambda it: replace(it, q_norm=it.k_norm, k_norm=it.q_norm)), model=Model.MIXTURE,
    ),
    Fault(
        "all rotated by the next position", Kind.ROTATION, _step(lambda it: replace(it, positions=it.positions + 1))
    ),
    Fault("theta x 1.01", Kind.ROTATION, _config(_theta)),
    Fault("neighbours rotated in the place of halves", Kind.ROTATION, _layer(_head_dims_exchanged)),
    Fault("keys of the last two tokens in each other's slots", Kind.CACHE, _step(_last_slots_swapped)),
    Fault(
        "keys of two layers exchanged in the cache", Kind.CACHE,
        lambda: Plant(decoder=_decoder(after=_layers_exchanged)),
    ),
    Fault(
        "embedding of the next id", Kind.EMBEDDING,
        _weights(lambda it: replace(it, embedding=it.embedding.roll(-1, 0))),
    ),
    Fault("values loaded from the keys' tensor", Kind.LOADER, _renamed("1.self_attn.v_proj", "1.self_attn.k_proj")),
    Fault("a tensor loaded of the layer before", Kind.LOADER, _renamed("1.mlp.down_proj", "0.mlp.down_proj")),
    Fault("half of a tensor not loaded", Kind.LOADER, lambda: Plant(tensors=_half_loaded)),
    Fault("a bit of a weight flips after the start", Kind.LOADER, lambda: Plant(step=FlippedBit())),
)  # fmt: skip
