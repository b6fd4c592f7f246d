"""Weights that are rounded while they are loaded: of one layer after the other, so that no plain model is in memory."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from kernels.linear.weights import LinearWeight, PlainWeight
from qualification.model.families.family import TensorNames
from qualification.model.shard import Shard
from server.model.layers import DenseWeights, LayerWeights, MixtureWeights, Weights
from server.model.linear import Linear
from server.model.load.checkpoint import TensorEntry, copy_pieces
from server.model.load.interleaved import interleaved_pieces
from server.model.load.joined import joined_pieces
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
    experts = interleaved_pieces(weights, shard, names) + joined_pieces(weights, shard, names, entries)
    copy_pieces(entries, outer_pieces(weights, shard, names) + experts, _silent)
    sizes = [it.weight.size for layer in weights.layers for it in layer.linears.values()]
    size = 2 * sum(rows * columns for rows, columns in sizes) // len(weights.layers)
    for index, layer in enumerate(weights.layers):
        plain = _with_plain_products(layer)
        copy_pieces(entries, layer_pieces(index, plain, shard, names), _silent)
        for name, linear in plain.linears.items():
            _round_into(layer.linears[name].weight, linear.weight)
        progress((index + 1) * size, len(weights.layers) * size)


def _with_plain_products(layer: LayerWeights) -> LayerWeights:
    """Return the same tensors, but for products that are not plain: those are not yet filled."""
    fed = layer.feed_forward
    if isinstance(fed, DenseWeights):
        fed = _plain_dense(fed)
    elif isinstance(fed, MixtureWeights) and fed.shared is not None:
        fed = replace(fed, shared=_plain_dense(fed.shared))
    layer = replace(layer, feed_forward=fed)
    if layer.qkv is None:
        return layer
    qkv, output = map(_plain, layer.mixed_by)
    return replace(layer, qkv=qkv, output=output)


def _plain_dense(weights: DenseWeights) -> DenseWeights:
    return DenseWeights(_plain(weights.gate_up), _plain(weights.down))


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
