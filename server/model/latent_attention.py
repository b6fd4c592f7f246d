"""A layer's multi-head latent attention, with the products that make keys and values absorbed into its ends."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.calls.indexed import Index
from kernels.fused.norm import rms_norm
from kernels.latent.head_products import multiply_heads
from kernels.linear.rounded_input import Input, unrounded
from qualification.model.latent import NORM_EPS, LatentSizes
from server.model.kv_cache import LatentLayer
from server.model.linear import Product
from server.model.step import Step


@dataclass(frozen=True, slots=True)
class Indexer:
    """The products that choose a layer's keys.

    count       the most keys of a query
    sizes       heads, and numbers of each
    queries     of the normed query latent
    key         of what attention reads; norm: the weight and the bias [dim] of its LayerNorm
    weights     x [T, hidden] -> [T, heads] fp32: of fp32 on a CPU, else of the model's dtype
    neighbours  whether the pairs that are rotated are neighbours
    """

    count: int
    sizes: tuple[int, int]
    queries: Product
    key: Product
    norm: tuple[Tensor, Tensor]
    weights: Product
    neighbours: bool


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Projections, norms, rotation and attention of one layer.

    layer      its place among the layers that attend
    projected  makes the query latent, or without one the queries, then latent and rotated numbers
    query_up   makes queries of their latent; None where there is none
    keys_up    [heads, plain, latent], views of the checkpoint's product where that is plain
    values_up  [heads, value, latent]
    rope       which of the decoder's rotary tables this layer's is; cos_sin: that table
    grows      whether queries are multiplied by the step's `query_scales`, where it has them
    indexer    what chooses the keys of a query; None: it attends to all before it, or to the choice of another layer
    choice_of  the layer whose choice is read, by its place among the layers that attend: this one where it has an
               indexer; None where no key is chosen
    is_alike   whether the products of heads must have the same bits for a row in any batch
    """

    layer: int
    sizes: LatentSizes
    num_heads: int
    projected: Product
    query_up: Product | None
    query_norm: Tensor | None
    norm: Tensor
    keys_up: Tensor
    values_up: Tensor
    output: Product
    rope: int
    cos_sin: Tensor
    grows: bool = False
    indexer: Indexer | None = None
    choice_of: int | None = None
    is_alike: bool = False

    def __call__(self, x: Input, step: Step) -> Tensor:
        sizes, num_tokens = self.sizes, x.shape[0]
        projected = self.projected(x, step)
        latent, of_key = projected.split_with_sizes((projected.shape[1] - sizes.key, sizes.key), dim=1)
        own = latent
        if self.query_up is not None and self.query_norm is not None:
            latent = rms_norm(latent, self.query_norm, NORM_EPS)
            own = self.query_up(latent, step)
        plain, rotated = own.view(num_tokens, self.num_heads, sizes.query).split_with_sizes(
            (sizes.plain, sizes.rotated), dim=2
        )
        queries = own.new_empty(num_tokens, self.num_heads, sizes.key)
        self._multiply(plain, self.keys_up, queries[..., : sizes.latent])
        pages = step.kv.layers[self.layer]
        assert isinstance(pages, LatentLayer), "the cache is of the same model"
        keys = pages.write_latents(
            queries,
            rotated,
            of_key,
            self.norm,
            self.cos_sin if step.tables is None else step.tables[self.rope],
            step.positions,
            step.slots,
            eps=NORM_EPS,
            turns=None if step.turns is None else step.turns[self.rope],
        )
        index = None
        if self.indexer is not None:
            index = self._index(self.indexer, unrounded(x), latent, step, pages, keys)
        elif self.choice_of is not None:
            assert step.choices is not None, "the decoder keeps choices"
            index = Index(step.choices[self.choice_of])
        if self.grows and step.query_scales is not None:
            queries.mul_(step.query_scales)
        out = queries.new_empty(num_tokens, self.num_heads, sizes.latent)
        step.attend(self.layer, queries, keys, keys[..., : sizes.latent], out, index)
        values = out.new_empty(num_tokens, self.num_heads, sizes.value)
        self._multiply(out, self.values_up.transpose(1, 2), values)
        return self.output(values.flatten(1), step)

    def _multiply(self, x: Tensor, weights: Tensor, out: Tensor) -> None:
        """Fill out [T, heads, N] with x [T, heads, K] @ weights [heads, K, N]."""
        if self.is_alike:
            multiply_heads(x, weights, out)
        else:
            torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))

    def _index(
        self, indexer: Indexer, x: Tensor, latent: Tensor, step: Step, pages: LatentLayer, keys: Tensor
    ) -> Index:
        """Write the indexer's keys, and return what the step's queries choose theirs by.

        x [T, hidden], latent [T, query latent] normed, keys [T, 1, row], whose last numbers are written.
        """
        queries = pages.write_index(
            indexer.queries(latent, step).view(x.shape[0], *indexer.sizes),
            indexer.key(x, step),
            indexer.norm,
            self.cos_sin if step.tables is None else step.tables[self.rope],
            step.positions,
            keys,
            step.slots,
            neighbours=indexer.neighbours,
            turns=None if step.turns is None else step.turns[self.rope],
        )
        weights = indexer.weights(x if x.is_cuda else x.float(), step)
        chosen = torch.empty(x.shape[0], indexer.count, dtype=torch.int32, device=x.device)
        assert step.choices is not None, "the decoder keeps choices"
        step.choices[self.layer] = chosen
        return Index(chosen, queries, weights)
