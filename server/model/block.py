"""A transformer layer, built of objects that are chosen when the model is loaded.

A block adds what the block before computed to the residual stream on its way into its first norm, so that the sum and
the norm are one kernel: `hidden, residual = block(hidden, residual, step)`, and the last sum is the caller's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from kernels.fused.head_gate import gate_heads_
from kernels.fused.head_gate_kind import GateFunction
from kernels.fused.layer_norm import add_layer_norm, layer_norm
from kernels.fused.norm import add_rms_norm, rms_norm
from kernels.fused.split_norm import mean_squares, norm_by
from server.model.linear import Product
from server.model.ranks import Ranks
from server.model.step import Step

Sublayer = Callable[[Tensor, Step], Tensor]  # attention, or a feed-forward; of what a norm has made for it
# (hidden, residual or None before the first block) -> (what the sublayer reads, the new residual)
Entry = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
# Called with what a sublayer reads and the residual, before the sublayer runs; both may be written over afterwards.
OnEntry = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Block:
    enter_attention: Entry
    attention: Sublayer
    enter_feed_forward: Entry
    feed_forward: Sublayer

    def __call__(self, hidden: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden]: what is still to be added to the residual; both may be written in place."""
        read, residual = self.enter_attention(hidden, residual)
        read, residual = self.enter_feed_forward(self.attention(read, step), residual)
        return self.feed_forward(read, step), residual

    def observed(self, on_attention: OnEntry, on_feed_forward: OnEntry) -> "Block":
        """Return the same block, which also hands out what each sublayer reads, and the residual there."""
        return replace(
            self,
            enter_attention=ObservedEntry(self.enter_attention, on_attention),
            enter_feed_forward=ObservedEntry(self.enter_feed_forward, on_feed_forward),
        )


@dataclass(frozen=True, slots=True)
class ParallelBlock:
    """A layer whose attention and feed-forward read the same, and add one after the other.

    on_feed_forward  is handed what the feed-forward reads, and the residual behind attention
    """

    enter: Entry
    attention: Sublayer
    feed_forward: Sublayer
    on_feed_forward: OnEntry | None = None

    def __call__(self, hidden: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden]: as of `Block`."""
        read, residual = self.enter(hidden, residual)
        residual += self.attention(read, step)
        if self.on_feed_forward is not None:
            self.on_feed_forward(read, residual)
        return self.feed_forward(read, step), residual

    def observed(self, on_attention: OnEntry, on_feed_forward: OnEntry) -> "ParallelBlock":
        """Return the same block, which also hands out what each sublayer reads, and the residual there."""
        return replace(self, enter=ObservedEntry(self.enter, on_attention), on_feed_forward=on_feed_forward)


@dataclass(frozen=True, slots=True)
class ObservedEntry:
    """An entry that hands out its results."""

    entry: Entry
    on_entry: OnEntry

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        read, residual = self.entry(hidden, residual)
        self.on_entry(read, residual)
        return read, residual


@dataclass(frozen=True, slots=True)
class AddNorm:
    """Add to the residual; the sublayer reads the norm of the sum."""

    weight: Tensor
    eps: float

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return rms_norm(hidden, self.weight, self.eps), hidden
        return add_rms_norm(hidden, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class AddLayerNorm:
    """The same with a LayerNorm."""

    weight: Tensor
    eps: float

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return layer_norm(hidden, self.weight, self.eps), hidden
        return add_layer_norm(hidden, residual, self.weight, self.eps)


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


def add(hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add to the residual; the sublayer reads the sum itself."""
    total = hidden if residual is None else residual.add_(hidden)
    return total, total


@dataclass(frozen=True, slots=True)
class NormAfter:
    """A sublayer whose result is normed before it is added."""

    sublayer: Sublayer
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return rms_norm(self.sublayer(x, step), self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class ScaleAfter:
    """A sublayer whose result is multiplied before it is added."""

    sublayer: Sublayer
    factor: float

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return self.sublayer(x, step).mul_(self.factor)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """down(activation(gate) * up)."""

    gated: Product
    down: Product

    def __call__(self, x: Tensor, step: Step | None) -> Tensor:
        return self.down(self.gated(x, step), step)


@dataclass(frozen=True, slots=True)
class HeadGate:
    """Heads multiplied by a function of a product of what attention has read."""

    product: Product
    function: GateFunction

    def __call__(self, out: Tensor, x: Tensor, step: Step) -> Tensor:
        """out [T, heads, d], written in place; x [T, hidden]."""
        return gate_heads_(out, self.product(x, step), self.function)


@dataclass(frozen=True, slots=True)
class Attention:
    """Projections, rotation and the attention of one layer.

    layer    its place among the layers that attend
    heads    the heads of q, k and v together, and head_dim
    splits   the heads of q, of k and of v
    rope     which of the decoder's rotary tables this layer's is
    cos_sin  that table
    q_norm, k_norm   [head_dim], fused with the rotation, or None
    scaled   [head_dim] fp32, what rotated queries are multiplied by, or None
    grows    whether queries are multiplied by the step's `query_scales`, where it has them
    gate     of the heads' results, or None
    """

    layer: int
    heads: tuple[int, int]
    splits: tuple[int, int, int]
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

    def __call__(self, x: Tensor, step: Step) -> Tensor:
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

    def _heads(self, x: Tensor, step: Step) -> tuple[Tensor, ...]:
        """q [T, heads, d], k and v [T, kv_heads, d]."""
        return self.qkv(x, step).view(x.shape[0], *self.heads).split_with_sizes(self.splits, dim=1)


@dataclass(frozen=True, slots=True)
class GatedAttention(Attention):
    """Attention whose gates are products beside the queries: the first heads of `qkv`, as many as of queries."""

    function: GateFunction = field(kw_only=True)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
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

    def _heads(self, x: Tensor, step: Step) -> tuple[Tensor, ...]:
        head_dim, num_tokens = self.heads[1], x.shape[0]
        q, k, v = self.qkv(x, step).split_with_sizes([num * head_dim for num in self.splits], dim=1)
        if self.ranks.world == 1:
            rows = (rms_norm(q, self.q_row_norm, self.eps), rms_norm(k, self.k_row_norm, self.eps), v)
        else:
            squares = self.ranks.sum_beside(mean_squares(q, k)).div_(self.ranks.world)
            of_q, of_k = squares.unbind(dim=1)
            rows = (norm_by(q, self.q_row_norm, of_q, self.eps), norm_by(k, self.k_row_norm, of_k, self.eps), v)
        return tuple(row.view(num_tokens, -1, head_dim) for row in rows)
