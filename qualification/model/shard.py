"""Split of a model among tensor-parallel ranks: the heads, columns and vocabulary rows that each rank holds.

A `ModelConfig` counts the heads of the whole model. A `Shard` says which of them are a rank's; `Shard.local_config` is
the model that the rank computes, whose attention shapes need evidence of their own.
"""

from dataclasses import dataclass, replace
from typing import NewType

from qualification.model.config import AttentionConfig, DenseConfig, LayerConfig, ModelConfig, QKNorm
from qualification.model.fields import ModelConfigError

# Head counts and widths of one rank: never to be asked what a checkpoint holds.
LocalConfig = NewType("LocalConfig", ModelConfig)

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class LocalHeads:
    """The heads of one rank, as indices into the whole model's. A replicated KV head is on several ranks."""

    query: range
    kv: range


@dataclass(frozen=True, slots=True)
class LayerShard:
    """One rank's part of a layer. `whole`: the layer of the whole model; `width`: columns of its feed-forward."""

    whole: LayerConfig
    heads: LocalHeads
    width: range


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model.

    Queries, keys, values, gate and up are split by rows, the projections behind them by columns, so that each of these
    pairs needs one sum over the ranks. The head is split by rows of the vocabulary. The embedding and the norms are on
    every rank: a 70B's embedding takes 2.1 GB a rank, and a step needs no collective before its first layer.
    """

    rank: int
    world: int
    layers: tuple[LayerShard, ...]
    vocabulary: range
    local_config: LocalConfig


def shard_of(config: ModelConfig, rank: int, world: int) -> Shard:
    """Return the part of a rank. Raises ModelConfigError where the model cannot be split among so many ranks."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is outside of [0, {world})")
    layers = tuple(_layer_shard(layer, rank, world) for layer in config.layers)
    local = replace(config, layers=tuple(_local_layer(layer) for layer in layers))
    return Shard(rank, world, layers, vocabulary_rows(config.vocab_size, rank, world), LocalConfig(local))


def vocabulary_rows(vocab_size: int, rank: int, world: int) -> range:
    """Return a rank's rows of the head: some ranks have one more than others."""
    return range(vocab_size * rank // world, vocab_size * (rank + 1) // world)


def local_heads(attention: AttentionConfig, rank: int, world: int) -> LocalHeads:
    """Return a rank's heads. A KV head is on several ranks where there are more ranks than KV heads.

    Raises ModelConfigError where the heads do not divide.
    """
    num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
    if num_heads % world:
        raise ModelConfigError(f"{num_heads} query heads cannot be split among {world} ranks: {world} must divide them")
    if num_kv_heads % world and world % num_kv_heads:
        raise ModelConfigError(
            f"{num_kv_heads} KV heads cannot be split among {world} ranks: one number must divide the other"
        )
    first = rank * num_kv_heads // world
    return LocalHeads(_equal_part(num_heads, rank, world), range(first, first + max(1, num_kv_heads // world)))


def _layer_shard(layer: LayerConfig, rank: int, world: int) -> LayerShard:
    attention, feed_forward = layer.attention, layer.feed_forward
    if world > 1 and attention.qk_norm is QKNorm.ALL_HEADS:
        raise ModelConfigError(f"norms over all heads of a token cannot be split among {world} ranks")
    if not isinstance(feed_forward, DenseConfig):
        raise ModelConfigError("experts cannot be split among ranks yet")
    if feed_forward.width % world:
        raise ModelConfigError(f"intermediate_size is {feed_forward.width}, which {world} ranks cannot share equally")
    return LayerShard(layer, local_heads(attention, rank, world), _equal_part(feed_forward.width, rank, world))


def _local_layer(shard: LayerShard) -> LayerConfig:
    layer, heads = shard.whole, shard.heads
    assert isinstance(layer.feed_forward, DenseConfig), "others are refused"
    return replace(
        layer,
        attention=replace(layer.attention, num_heads=len(heads.query), num_kv_heads=len(heads.kv)),
        feed_forward=replace(layer.feed_forward, width=len(shard.width)),
    )


def _equal_part(size: int, rank: int, world: int) -> range:
    return range(size // world * rank, size // world * (rank + 1))
