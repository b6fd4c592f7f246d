"""Split of a model among tensor-parallel ranks: the heads, columns and vocabulary rows that each rank holds.

A `ModelConfig` counts the heads of the whole model. A `Shard` says which of them are a rank's; `Shard.local_config` is
the model that the rank computes, whose attention shapes need evidence of their own.
"""

from dataclasses import dataclass, replace
from typing import NewType

from kernels.experts.formats import why_not_experts
from kernels.experts.kinds import MXFP4_BLOCK, ExpertFormat
from qualification.model.config import (
    AttentionConfig,
    DenseConfig,
    ExpertsConfig,
    FeedForward,
    LayerConfig,
    Mixer,
    ModelConfig,
    RecurrenceConfig,
)
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
    """One rank's part of a layer.

    whole   the layer of the whole model
    mixer   its mixer as the rank computes it; None where it has none
    heads   of a layer that attends; none of another one
    width   columns of its feed-forward, or of each of its experts; none where it has none
    shared  columns of the feed-forward that all tokens visit beside their experts; none where there is none
    beside  the recurrence beside its attention as the rank computes it; None where it has none
    """

    whole: LayerConfig
    mixer: Mixer | None
    heads: LocalHeads
    width: range
    shared: range = range(0)
    beside: RecurrenceConfig | None = None

    @property
    def of_beside(self) -> "LayerShard | None":
        """Return the part of a layer of that recurrence alone; None without one."""
        if self.whole.of_beside is None:
            return None
        return LayerShard(self.whole.of_beside, self.beside, LocalHeads(range(0), range(0)), range(0))


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model.

    Queries, keys, values, gate and up are split by rows, the projections behind them by columns, so that each of these
    pairs needs one sum over the ranks; every rank has a part of each expert, and the whole router. The head is split by
    rows of the vocabulary. The embedding and the norms are on every rank: a 70B's embedding takes 2.1 GB a rank, and a
    step needs no collective before its first layer.
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
    layers = tuple(_layer_shard(layer, config.hidden_size, rank, world) for layer in config.layers)
    local = replace(config, layers=tuple(_local_layer(layer) for layer in layers))
    return Shard(rank, world, layers, vocabulary_rows(config.vocab_size, rank, world), LocalConfig(local))


def sums_at_norms(model: ModelConfig) -> bool:
    """Return whether each sublayer's result is added as it is, and the sum normed for the next: one kernel then sums
    the ranks' parts on the way into that norm.
    """
    if model.residual_scale != 1 or model.norms_subtract_mean:
        return False
    norms = [it.norms for it in model.layers]
    return all(it.before and not (it.after or it.is_parallel or it.is_shared) for it in norms)


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


def _layer_shard(layer: LayerConfig, hidden: int, rank: int, world: int) -> LayerShard:
    feed_forward = layer.feed_forward
    mixer, heads = _mixer_part(layer.mixer, rank, world)
    beside = None if layer.beside is None else layer.beside.of_rank(rank, world)
    if feed_forward is None:
        return LayerShard(layer, mixer, heads, range(0), beside=beside)
    width = _width_part("intermediate_size", feed_forward.width, rank, world)
    shared = range(0)
    if isinstance(feed_forward, ExpertsConfig):
        if feed_forward.format is ExpertFormat.MXFP4 and len(width) % MXFP4_BLOCK:
            raise ModelConfigError(
                f"experts are {feed_forward.width} wide: each of {world} ranks would have {len(width)} columns, and "
                f"blocks of mxfp4 have {MXFP4_BLOCK}, which must divide them"
            )
        if (reason := why_not_experts(feed_forward.format, feed_forward.read_size(hidden), len(width))) is not None:
            raise ModelConfigError(f"experts in {feed_forward.format.value} on {world} ranks: {reason} of each")
        if feed_forward.shared is not None:
            shared = _width_part("the width of the shared expert", feed_forward.shared.width, rank, world)
    return LayerShard(layer, mixer, heads, width, shared, beside)


def _mixer_part(mixer: Mixer | None, rank: int, world: int) -> tuple[Mixer | None, LocalHeads]:
    if not isinstance(mixer, AttentionConfig):
        return mixer and mixer.of_rank(rank, world), LocalHeads(range(0), range(0))
    heads = local_heads(mixer, rank, world)
    return replace(mixer, num_heads=len(heads.query), num_kv_heads=len(heads.kv)), heads


def _width_part(name: str, width: int, rank: int, world: int) -> range:
    if width % world:
        raise ModelConfigError(f"{name} is {width}, which {world} ranks cannot share equally")
    return _equal_part(width, rank, world)


def _local_layer(shard: LayerShard) -> LayerConfig:
    fed = _local_feed_forward(shard)
    return replace(shard.whole, mixer=shard.mixer, beside=shard.beside, feed_forward=fed)


def _local_feed_forward(shard: LayerShard) -> FeedForward | None:
    whole = shard.whole.feed_forward
    if whole is None:
        return None
    if isinstance(whole, DenseConfig):
        return replace(whole, width=len(shard.width))
    shared = None if whole.shared is None else replace(whole.shared, width=len(shard.shared))
    return replace(whole, width=len(shard.width), shared=shared)


def _equal_part(size: int, rank: int, world: int) -> range:
    return range(size // world * rank, size // world * (rank + 1))
