"""Weights that are rounded while they are loaded: of one layer after the other, so that no plain model is in memory."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from kernels.experts.few_bits.weights import AnyExperts, FewBitExperts
from kernels.experts.ungated.weights import UngatedExperts, UngatedFewBitExperts
from kernels.experts.weights import ExpertWeights
from kernels.linear.shape import FP8_ROWS
from kernels.linear.weights import LinearWeight, PlainWeight, class_of
from qualification.model.families.family import TensorNames
from qualification.model.shard import Shard
from server.model.layers import DenseWeights, LayerWeights, MixtureWeights, Weights
from server.model.linear import Linear
from server.model.load.checkpoint import TensorEntry, copy_pieces
from server.model.load.interleaved import interleaved_pieces
from server.model.load.joined import joined_pieces_of
from server.model.load.shards import layer_pieces, outer_pieces

_MOST_NUMBERS = 2**25  # that are rounded at once


def copy_rounded(
    entries: Mapping[str, TensorEntry],
    weights: Weights,
    shard: Shard,
    names: TensorNames,
    progress: Callable[[int, int], None],
) -> None:
    """Fill a rank's weights from a checkpoint whose products are plain: each rank rounds its own part of a row.

    `progress` gets the layers that are filled, in bytes of the checkpoint, and those of all. Raises ModelError.
    """
    others = outer_pieces(weights, shard, names) + interleaved_pieces(weights, shard, names)
    copy_pieces(entries, others, _silent)
    size = 2 * sum(_numbers_of(layer) for layer in weights.layers) // len(weights.layers)
    for index, (stored, config) in enumerate(zip(weights.layers, shard.local_config.layers, strict=True)):
        layer = stored.as_published(config)
        plain = _with_plain_products(layer)
        pieces = layer_pieces(index, plain, shard, names) + joined_pieces_of(index, plain, shard, names, entries)
        copy_pieces(entries, pieces, _silent)
        for name, linear in plain.linears.items():
            _round_into(layer.linears[name].weight, linear.weight)
        _round_experts(layer, plain)
        del plain  # before that of the next layer is made
        progress((index + 1) * size, len(weights.layers) * size)


def rounded_copy(linear: Linear) -> Linear:
    """Return a product's weight in 8 bits, a scale a row; the product has no bias."""
    weight = linear.weight
    found = class_of(FP8_ROWS).empty(*weight.size, weight.dtype, weight.device)
    _round_into(found, weight)
    return Linear(found)


def _numbers_of(layer: LayerWeights) -> int:
    """Return the numbers of a layer's products, those of its experts too."""
    weights = [it.weight for it in layer.linears.values()]
    if isinstance(layer.feed_forward, MixtureWeights) and isinstance(layer.feed_forward.experts, FewBitExperts):
        weights += [layer.feed_forward.experts.gate_up, layer.feed_forward.experts.down]
    return sum(rows * columns for rows, columns in (it.size for it in weights))


def _with_plain_products(layer: LayerWeights) -> LayerWeights:
    """Return the same tensors, but for products that are not plain: those are not yet filled."""
    fed = layer.feed_forward
    if isinstance(fed, DenseWeights):
        fed = _plain_dense(fed)
    elif isinstance(fed, MixtureWeights):
        shared = None if fed.shared is None else _plain_dense(fed.shared)
        fed = replace(fed, shared=shared, experts=_plain_experts(fed.experts))
    beside = None if layer.beside is None else _with_plain_products(layer.beside)
    layer = replace(layer, feed_forward=fed, beside=beside)
    if layer.qkv is None:
        return layer
    qkv, output = map(_plain, layer.mixed_by)
    return replace(layer, qkv=qkv, output=output)


def _plain_dense(weights: DenseWeights) -> DenseWeights:
    return replace(weights, gate_up=_plain(weights.gate_up), down=_plain(weights.down))


def _plain_experts(experts: AnyExperts) -> AnyExperts:
    if not isinstance(experts, FewBitExperts):
        return experts
    count, of_both = experts.num_experts, (experts.gate_up, experts.down)
    gate_up, down = (
        torch.empty(count, it.size[0] // count, it.size[1], dtype=it.dtype, device=it.device) for it in of_both
    )
    is_ungated = isinstance(experts, UngatedFewBitExperts)
    return UngatedExperts(gate_up, down) if is_ungated else ExpertWeights(gate_up, down)


def _round_experts(layer: LayerWeights, plain: LayerWeights) -> None:
    """Fill a layer's experts with the numbers of their format nearest to those of plain ones."""
    target, source = layer.feed_forward, plain.feed_forward
    if not isinstance(target, MixtureWeights) or not isinstance(target.experts, FewBitExperts):
        return
    assert isinstance(source, MixtureWeights), "both are of one layer"
    assert isinstance(source.experts, ExpertWeights), "what is rounded is plain"
    _round_into(target.experts.gate_up, PlainWeight(source.experts.gate_up.flatten(0, 1)))
    _round_into(target.experts.down, PlainWeight(source.experts.down.flatten(0, 1)))


def _plain(linear: Linear) -> Linear:
    weight = linear.weight
    if isinstance(weight, PlainWeight):
        return linear
    return Linear(PlainWeight.empty(*weight.size, weight.dtype, weight.device), linear.bias)


def _round_into(target: LinearWeight, plain: LinearWeight) -> None:
    """Fill a weight with the numbers of its format nearest to those of a plain one, some rows at a time."""
    if target is plain:
        return
    num_rows, num_columns = target.size
    step = max(1, _MOST_NUMBERS // num_columns)
    for first in range(0, num_rows, step):
        count = min(step, num_rows - first)
        found = target.of(plain.dequantized(slice(first, first + count))).stored
        for word, part in target.rows(first, count).stored.items():
            part.values.copy_(found[word].values)


def _silent(_: int, __: int) -> None:
    """Report no progress."""
