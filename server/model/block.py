"""A transformer layer, built of objects that are chosen when the model is loaded.

A block adds what the block before computed to the residual stream on its way into its first norm, so that the sum and
the norm are one kernel: `hidden, residual = block(hidden, residual, step)`, and the last sum is the caller's. What is
normed before it is added is an `Addend` until then: its norms are of that kernel too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kernels.fused.activation import gated
from kernels.fused.activation_kind import Activation
from kernels.fused.add_norms import Addend, add_norms
from kernels.fused.alike import gated_alike
from kernels.fused.head_gate import gate_heads_
from kernels.fused.head_gate_kind import GateFunction
from kernels.fused.head_norm import norm_heads
from kernels.fused.layer_norm import add_layer_norm, layer_norm
from kernels.fused.norm import add_rms_norm, rms_norm
from kernels.fused.rope_kv import rotate_queries
from kernels.fused.split_norm import mean_squares, norm_by
from kernels.linear.rounded_input import Input, unrounded
from server.model.experts import ReadApart
from server.model.kv_cache import AsymmetricLayer
from server.model.latent_attention import LatentAttention
from server.model.linear import (
    Activated,
    Capped,
    EagerActivated,
    Gated,
    GatedAlike,
    Product,
    RoundsNorm,
    XieluActivated,
)
from server.model.ranks import Ranks
from server.model.step import Step

Added = Tensor | Addend  # what is still to be added to the residual
# Attention, or a feed-forward: of what a norm has made for it, a tensor, or an `Addend` where it is normed behind it.
Sublayer = Callable[[Any, Step], Any]
# (what is to be added, residual or None before the first block) -> (what the sublayer reads, the new residual). It is
# given a tensor; one that has a `sole_reader` perhaps a `RoundedInput`, and `ExpertsApart` a `ReadApart`.
Entry = Callable[[Any, Tensor | None], tuple[Any, Tensor]]
# (what attention reads, the residual there) -> what a feed-forward beside it reads
SecondRead = Callable[[Any, Tensor], Any]
# Called with what a sublayer reads and the residual, before the sublayer runs; both may be written over afterwards.
OnEntry = Callable[[Tensor, Tensor], None]
OnFinish = Callable[[Tensor], None]  # called with the residual behind the feed-forward, which is changed afterwards


@dataclass(frozen=True, slots=True)
class Block:
    enter_attention: Entry
    attention: Sublayer
    enter_feed_forward: Entry
    feed_forward: Sublayer
    finish: "Finish | None" = None

    def __call__(self, hidden: Added, residual: Tensor | None, step: Step) -> tuple[Added, Tensor | None]:
        """hidden [T, hidden]: what is still to be added to the residual; both may be written in place.

        Returns both likewise; where they are one, the residual is None.
        """
        read, residual = self.enter_attention(hidden, residual)
        read, residual = self.enter_feed_forward(self.attention(read, step), residual)
        fed = self.feed_forward(read, step)
        return (fed, residual) if self.finish is None else self.finish(fed, residual, step)

    def observed(self, on_attention: OnEntry, on_feed_forward: OnEntry, on_finish: OnFinish) -> "Block":
        """Return the same block, which also hands out what each sublayer reads, and the residual there."""
        return replace(
            self,
            enter_attention=ObservedEntry(self.enter_attention, on_attention),
            enter_feed_forward=ObservedEntry(self.enter_feed_forward, on_feed_forward),
            finish=None if self.finish is None else replace(self.finish, on_finish=on_finish),
        )


@dataclass(frozen=True, slots=True)
class ParallelBlock:
    """A layer whose attention and feed-forward read the same residual, and add one after the other.

    second_read      gives what the feed-forward reads
    on_feed_forward  is handed what the feed-forward reads, and the residual behind attention
    """

    enter: Entry
    attention: Sublayer
    feed_forward: Sublayer
    second_read: SecondRead
    on_feed_forward: OnEntry | None = None

    def __call__(self, hidden: Added, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden]: as of `Block`."""
        read, residual = self.enter(hidden, residual)
        second = self.second_read(read, residual)
        residual += self.attention(read, step)
        if self.on_feed_forward is not None:
            self.on_feed_forward(second, residual)
        return self.feed_forward(second, step), residual

    def observed(self, on_attention: OnEntry, on_feed_forward: OnEntry, _: OnFinish) -> "ParallelBlock":
        """Return the same block, which also hands out what each sublayer reads, and the residual there."""
        return replace(self, enter=ObservedEntry(self.enter, on_attention), on_feed_forward=on_feed_forward)


def same_read(read: Any, _: Tensor) -> Any:
    """Return what attention reads, which a feed-forward by the same norm reads, too."""
    return read


@dataclass(frozen=True, slots=True)
class SingleBlock:
    """A layer of one sublayer: attention without a feed-forward, or the other way round."""

    enter: Entry
    sublayer: Sublayer

    def __call__(self, hidden: Added, residual: Tensor | None, step: Step) -> tuple[Added, Tensor]:
        """hidden [T, hidden]: as of `Block`."""
        read, residual = self.enter(hidden, residual)
        return self.sublayer(read, step), residual

    def observed(self, on_attention: OnEntry, on_feed_forward: OnEntry, _: OnFinish) -> "SingleBlock":
        """Return the same block, which also hands out, to both, what its sublayer reads and the residual there."""
        return replace(self, enter=ObservedEntry(ObservedEntry(self.enter, on_attention), on_feed_forward))


@dataclass(frozen=True, slots=True)
class EmptyBlock:
    """A layer that adds nothing."""

    def __call__(self, hidden: Added, residual: Tensor | None, _: Step) -> tuple[Added, Tensor | None]:
        """Return both as they are."""
        return hidden, residual

    def observed(self, *_: object) -> "EmptyBlock":
        """Return the block itself, which has nothing to hand out."""
        return self


AnyBlock = Block | ParallelBlock | SingleBlock | EmptyBlock


@dataclass(frozen=True, slots=True)
class ObservedEntry:
    """An entry that hands out its results."""

    entry: Entry
    on_entry: OnEntry

    def __call__(self, hidden: Added, residual: Tensor | None) -> tuple[Any, Tensor]:
        read, residual = self.entry(hidden, residual)
        self.on_entry(read.residual if isinstance(read, ReadApart) else unrounded(read), residual)
        return read, residual


def total(hidden: Added, residual: Tensor | None) -> Tensor:
    """Return the residual with what is to be added, in place of either."""
    if isinstance(hidden, Addend):
        assert residual is not None, "only a tensor may be a residual by itself"
        add_norms(hidden, residual)
        return residual
    return hidden if residual is None else residual.add_(hidden)


@dataclass(frozen=True, slots=True)
class AddNorm:
    """Add to the residual; the sublayer reads the norm of the sum."""

    weight: Tensor
    eps: float

    def __call__(self, hidden: Added, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if isinstance(hidden, Addend):
            assert residual is not None, "only a tensor may be a residual by itself"
            [normed] = add_norms(hidden, residual, (self.weight,), self.eps)
            return normed, residual
        if residual is None:
            return rms_norm(hidden, self.weight, self.eps), hidden
        return add_rms_norm(hidden, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class RoundingNorm:
    """Norm as `AddNorm`, and rounded at once for the one product that reads it, where that takes it so."""

    norm: AddNorm
    reader: RoundsNorm

    def __call__(self, hidden: Added, residual: Tensor | None) -> tuple[Input, Tensor]:
        if isinstance(hidden, Addend):
            hidden, residual = total(hidden, residual), None
        rounded = self.reader.normed(hidden, residual, self.norm.weight, self.norm.eps)
        return self.norm(hidden, residual) if rounded is None else rounded


@dataclass(frozen=True, slots=True)
class AddLayerNorm:
    """The same with a LayerNorm; bias: [hidden], added to what is normed, or None."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            normed, residual = layer_norm(hidden, self.weight, self.eps), hidden
        else:
            normed, residual = add_layer_norm(hidden, residual, self.weight, self.eps)
        return add_norm_bias_(normed, self.bias), residual


def add_norm_bias_(normed: Tensor, bias: Tensor | None) -> Tensor:
    """normed += bias, rounded to its dtype: what a LayerNorm's kernel leaves out. Returns normed.

    normed [T, hidden], as the kernel has rounded it, written in place; bias [hidden], or None, which adds nothing.
    """
    return normed if bias is None else normed.add_(bias)


@dataclass(frozen=True, slots=True)
class SumNorm:
    """Norm as `AddNorm`, where what is added is one rank's part of a sum."""

    weight: Tensor
    eps: float
    ranks: Ranks

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:  # the embedding, which every rank has whole
            return rms_norm(hidden, self.weight, self.eps), hidden
        return self.ranks.add_norm(hidden, residual, self.weight, self.eps)


def add(hidden: Added, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add to the residual; the sublayer reads the sum itself."""
    added = total(hidden, residual)
    return added, added


@dataclass(frozen=True, slots=True)
class NormAfter:
    """A sublayer whose result is normed before it is added."""

    sublayer: Sublayer
    weight: Tensor
    eps: float

    def __call__(self, x: Any, step: Step) -> Addend:
        made = self.sublayer(x, step)
        if isinstance(made, Addend):
            return replace(made, after=self.weight, eps_after=self.eps)
        return Addend(((made, self.weight),), self.eps)


@dataclass(frozen=True, slots=True)
class ScaleAfter:
    """A sublayer whose result is multiplied before it is added."""

    sublayer: Sublayer
    factor: float

    def __call__(self, x: Any, step: Step) -> Tensor:
        made: Tensor = self.sublayer(x, step)
        return made.mul_(self.factor)


@dataclass(frozen=True, slots=True)
class Beside:
    """A mixer and a recurrence that read the same, and add both."""

    mixer: Sublayer
    recurrence: Sublayer

    def __call__(self, x: Any, step: Step) -> Tensor:
        made: Tensor = self.mixer(x, step)
        return made.add_(self.recurrence(x, step))


@dataclass(frozen=True, slots=True)
class PerLayerGate:
    """A layer's part in its embeddings: norm(output(activation(gate(x)) * embeddings)).

    layer     its place among all layers
    is_alike  whether a row's bits may not depend on the other rows, on a CPU
    """

    layer: int
    gate: Product
    activation: Activation
    output: Product
    norm: Tensor
    eps: float
    is_alike: bool

    def __call__(self, x: Tensor, step: Step) -> Addend:
        assert step.per_layer is not None, "the decoder makes them for each step"
        both = torch.cat((self.gate(x, step), step.per_layer[:, self.layer]), dim=1)
        inner = gated_alike(both, self.activation) if self.is_alike else gated(both, self.activation)
        return Addend(((self.output(inner, step), self.norm),), self.eps)


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a layer that norms what its feed-forward adds, and changes the residual behind that.

    scale  [1], what it is multiplied by in the end, or None
    """

    per_layer: PerLayerGate | None
    scale: Tensor | None
    on_finish: OnFinish | None = None

    def __call__(self, hidden: Added, residual: Tensor, step: Step) -> tuple[Added, Tensor | None]:
        """Return what is to be added, and the residual, of (residual + hidden + what the embeddings add) * scale.

        `residual` may be written in place.
        """
        if self.per_layer is None and self.on_finish is None and isinstance(hidden, Addend):
            return replace(hidden, scale=self.scale), residual
        finished = total(hidden, residual)
        if self.on_finish is not None:
            self.on_finish(finished)
        if self.per_layer is not None:
            return replace(self.per_layer(finished, step), scale=self.scale), finished
        return finished if self.scale is None else finished.mul_(self.scale), None


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(activation(gate) * up)."""

    gated: Product
    down: Product

    def __call__(self, x: Input, step: Step | None) -> Tensor:
        return self.down(self.gated(x, step), step)


@dataclass(frozen=True, slots=True)
class HeadGate:
    """Heads multiplied by a function of a product of what attention has read."""

    product: Product
    function: GateFunction

    def __call__(self, out: Tensor, x: Input, step: Step) -> Tensor:
        """out [T, heads, d], written in place; x [T, hidden]."""
        return gate_heads_(out, self.product(x, step), self.function)


@dataclass(frozen=True, slots=True)
class Attention:
    """Projections, rotation and the attention of one layer.

    layer    its place among the layers that attend
    heads    the heads that one product makes, and head_dim
    splits   the heads of q, of k and of v, as far as it makes them
    rope     which of the decoder's rotary tables this layer's is
    cos_sin  that table
    q_norm, k_norm   [head_dim], fused with the rotation, or None
    scaled   [head_dim] fp32, what rotated queries are multiplied by, or None
    grows    whether queries are multiplied by the step's `query_scales`, where it has them
    gate     of the heads' results, or None
    """

    layer: int
    heads: tuple[int, int]
    splits: tuple[int, ...]
    qkv: Product  # query heads, then key heads, then value heads
    output: Product
    rope: int
    cos_sin: Tensor
    eps: float
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    scaled: Tensor | None = None
    grows: bool = False
    gate: HeadGate | None = None

    def __call__(self, x: Input, step: Step) -> Tensor:
        q, k, v = self._heads(x, step)
        out = self._attended(q, k, v, step)
        if self.gate is not None:
            out = self.gate(out, x, step)
        return self.output(out.flatten(1), step)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Return the heads' results [T, heads, d], of what is not rotated yet."""
        step.kv.layers[self.layer].write(
            q,
            k,
            v,
            self.cos_sin if step.tables is None else step.tables[self.rope],
            step.positions,
            step.slots,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.eps,
            turns=None if step.turns is None else step.turns[self.rope],
        )
        if self.scaled is not None:
            q.mul_(self.scaled)
        if self.grows and step.query_scales is not None:
            q.mul_(step.query_scales)
        out = q.new_empty(*q.shape)  # as integers: 1.2 us less than as a torch.Size
        step.attend(self.layer, q, k, v, out)
        return out

    def _heads(self, x: Input, step: Step) -> tuple[Tensor, ...]:
        """q [T, heads, d], k and v [T, kv_heads, d]."""
        return self.qkv(x, step).view(x.shape[0], *self.heads).split_with_sizes(self.splits, dim=1)


@dataclass(frozen=True, slots=True)
class GatedAttention(Attention):
    """Attention whose gates are products beside the queries: the first heads of `qkv`, as many as of queries."""

    function: GateFunction = field(kw_only=True)

    def __call__(self, x: Input, step: Step) -> Tensor:
        num_heads, head_dim = self.heads
        projected = self.qkv(x, step).view(x.shape[0], num_heads + self.splits[0], head_dim)
        gate, q, k, v = projected.split_with_sizes((self.splits[0], *self.splits), dim=1)
        out = gate_heads_(self._attended(q, k, v, step), gate.flatten(1), self.function)
        return self.output(out.flatten(1), step)


@dataclass(frozen=True, slots=True)
class RowNormedAttention(Attention):
    """Attention whose queries and keys are normed over all heads of a token together, apart from the rotation.

    q_row_norm, k_row_norm   [heads * head_dim], [kv_heads * head_dim]
    ranks                    that have the heads; each KV head is on equally many of them
    """

    q_row_norm: Tensor = field(kw_only=True)
    k_row_norm: Tensor = field(kw_only=True)
    ranks: Ranks = field(kw_only=True)

    def _heads(self, x: Input, step: Step) -> tuple[Tensor, ...]:
        head_dim, num_tokens = self.heads[1], x.shape[0]
        q, k, v = self.qkv(x, step).split_with_sizes([num * head_dim for num in self.splits], dim=1)
        if self.ranks.world == 1:
            rows = (rms_norm(q, self.q_row_norm, self.eps), rms_norm(k, self.k_row_norm, self.eps), v)
        else:
            squares = self.ranks.sum_beside(mean_squares(q, k)).div_(self.ranks.world)
            of_q, of_k = squares.unbind(dim=1)
            rows = (norm_by(q, self.q_row_norm, of_q, self.eps), norm_by(k, self.k_row_norm, of_k, self.eps), v)
        return tuple(row.view(num_tokens, -1, head_dim) for row in rows)


@dataclass(frozen=True, slots=True)
class NormedValuesAttention(Attention):
    """Attention whose values are normed head by head; where no product makes any, they are the keys before their norm.

    is_read_again  whether later layers read these keys and values
    """

    is_read_again: bool = field(kw_only=True)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        if self.is_read_again:
            assert step.kept is not None, "the decoder gives each step a place for them"
            step.kept[self.layer] = k, v  # the keys are rotated in place
        return Attention._attended(self, q, k, v, step)

    def _heads(self, x: Input, step: Step) -> tuple[Tensor, ...]:
        q, k, *made = Attention._heads(self, x, step)
        return q, k, norm_heads(made[0] if made else k, self.eps)


@dataclass(frozen=True, slots=True)
class AsymmetricAttention(Attention):
    """Attention whose values have a size of their own, and are multiplied by a number.

    sizes  the numbers of queries, keys and values that one product makes
    """

    sizes: tuple[int, ...] = field(kw_only=True)
    value_scale: float = field(kw_only=True)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        pages = step.kv.layers[self.layer]
        assert isinstance(pages, AsymmetricLayer), "the cache is of the same model"
        pages.write_scaled(
            q,
            k,
            v,
            self.cos_sin if step.tables is None else step.tables[self.rope],
            step.positions,
            step.slots,
            value_scale=self.value_scale,
            turns=None if step.turns is None else step.turns[self.rope],
        )
        out = q.new_empty(*q.shape[:2], v.shape[2])
        step.attend(self.layer, q, k, v, out)
        return out

    def _heads(self, x: Input, step: Step) -> tuple[Tensor, ...]:
        parts = self.qkv(x, step).split_with_sizes(self.sizes, dim=1)
        return tuple(it.view(x.shape[0], num, -1) for it, num in zip(parts, self.splits, strict=True))


@dataclass(frozen=True, slots=True)
class BorrowingAttention(Attention):
    """Attention that reads the keys and values of an earlier layer, in this step's tokens and in its pages.

    source   that layer's place among the layers that attend
    """

    source: int = field(kw_only=True)

    def __call__(self, x: Input, step: Step) -> Tensor:
        [q] = self._heads(x, step)
        rotate_queries(
            q,
            self.cos_sin if step.tables is None else step.tables[self.rope],
            step.positions,
            q_norm=self.q_norm,
            eps=self.eps,
            turns=None if step.turns is None else step.turns[self.rope],
        )
        assert step.kept is not None, "the decoder gives each step a place for them"
        k, v = step.kept[self.source]
        out = q.new_empty(*q.shape)
        step.attend(self.layer, q, k, v, out)
        return self.output(out.flatten(1), step)


def sole_reader(sublayer: Sublayer) -> RoundsNorm | None:
    """Return the product that alone reads what a sublayer does, and rounds it; None where other things read it too."""
    product: object = None
    match sublayer:
        case NormAfter() | ScaleAfter():
            return sole_reader(sublayer.sublayer)
        case Attention(gate=None):
            product = sublayer.qkv
        case LatentAttention(indexer=None):
            product = sublayer.projected
        case FeedForward(gated=Gated() | GatedAlike() | Capped() as inner):
            product = inner.gate_up
        case FeedForward(gated=Activated() | EagerActivated() | XieluActivated() as inner):
            product = inner.up
        case FeedForward():
            product = sublayer.gated
    return product if isinstance(product, RoundsNorm) and product.rounds_inputs else None
