"""A layer's multi-head latent attention, with the products that make keys and values absorbed into its ends."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fused.norm import rms_norm
from qualification.model.latent import NORM_EPS, LatentSizes
from server.model.kv_cache import LatentLayer
from server.model.linear import Product
from server.model.step import Step


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

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        sizes, num_tokens = self.sizes, x.shape[0]
        projected = self.projected(x, step)
        own, of_key = projected.split_with_sizes((projected.shape[1] - sizes.key, sizes.key), dim=1)
        if self.query_up is not None and self.query_norm is not None:
            own = self.query_up(rms_norm(own, self.query_norm, NORM_EPS), step)
        plain, rotated = own.view(num_tokens, self.num_heads, sizes.query).split_with_sizes(
            (sizes.plain, sizes.rotated), dim=2
        )
        queries = own.new_empty(num_tokens, self.num_heads, sizes.key)
        torch.bmm(plain.transpose(0, 1), self.keys_up, out=queries[..., : sizes.latent].transpose(0, 1))
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
        if self.grows and step.query_scales is not None:
            queries.mul_(step.query_scales)
        out = queries.new_empty(num_tokens, self.num_heads, sizes.latent)
        step.attend(self.layer, queries, keys, keys[..., : sizes.latent], out)
        values = out.new_empty(num_tokens, self.num_heads, sizes.value)
        torch.bmm(out.transpose(0, 1), self.values_up.transpose(1, 2), out=values.transpose(0, 1))
        return self.output(values.flatten(1), step)
