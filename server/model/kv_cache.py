"""The paged cache of keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fp8_cache import pages as fp8_pages
from kernels.fused.asymmetric_kv import rope_and_write_asymmetric
from kernels.fused.index_kv import write_index
from kernels.fused.latent_kv import write_latents
from kernels.fused.rope_kv import Turns, rope_and_write_kv
from qualification.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The pages of one attention layer: what the write of a step fills, and what attention reads.

    k, v    [num_pages + 1, page_size, kv_heads, head_dim]; values may have a size of their own
    scales  [num_pages + 1, page_size, ...], whatever the stored numbers are multiplied by; None where they are the
            keys and values themselves. A format with scales is a class below this one, with its own `write` and `read`
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all that a page consists of: pages are the first dim of each."""
        return (self.k, self.v) if self.scales is None else (self.k, self.v, self.scales)

    def write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
        turns: Turns | None = None,
    ) -> None:
        """Rotate q [T, heads, d] and k [T, kv_heads, d] in place, and write k and v; see `rope_and_write_kv`."""
        rope_and_write_kv(
            q, k, v, cos_sin, positions, self.k, self.v, slots, q_norm=q_norm, k_norm=k_norm, eps=eps, turns=turns
        )

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all pages as attention's paths take them."""
        return self.k, self.v

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [T, kv_heads, d] of slots [T] int64, page * page_size + offset, as they are read."""
        keys, values = (pages.flatten(0, 1).index_select(0, slots) for pages in self.read())
        return keys, values


class Fp8Layer(KVLayer):
    """Pages in e4m3, each with its scales behind its numbers: `k` and `v` are the views of these numbers.

    Whatever copies or hashes `tensors` does so with the scales: they are of bytes, [num_pages + 1, bytes of a page].
    """

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all bytes of the pages."""
        return fp8_pages.memory_of(self.k), fp8_pages.memory_of(self.v)

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [T, kv_heads, d] fp32: numbers times their scales."""
        page_size = self.k.shape[1]
        pages, offsets = slots // page_size, slots % page_size
        keys, values = (fp8_pages.dequantized_at(it, pages, offsets) for it in (self.k, self.v))
        return keys, values


class LatentLayer(KVLayer):
    """Pages of latents: `v` is the view of the first numbers of `k`, and no memory of its own.

    Where a layer has an indexer, its key of a token lies behind the token's key in `k`.
    """

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.k,)

    def write_latents(
        self,
        queries: Tensor,
        q_rotated: Tensor,
        projected: Tensor,
        norm: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        *,
        eps: float,
        turns: Turns | None = None,
    ) -> Tensor:
        """Finish queries, write latents and return them as keys; see `kernels.fused.latent_kv.write_latents`."""
        return write_latents(
            queries, q_rotated, projected, norm, cos_sin, positions, self.k, slots, eps=eps, turns=turns
        )

    def write_index(
        self,
        queries: Tensor,
        projected: Tensor,
        norm: tuple[Tensor, Tensor],
        cos_sin: Tensor,
        positions: Tensor,
        keys: Tensor,
        slots: Tensor,
        *,
        neighbours: bool,
        turns: Turns | None = None,
    ) -> Tensor:
        """Write an indexer's keys behind `keys` and into pages, and return its rotated queries.

        norm  its weight and its bias; the rest as of `kernels.fused.index_kv.write_index`
        """
        return write_index(
            queries, projected, *norm, cos_sin, positions, keys, self.k, slots, neighbours=neighbours, turns=turns
        )


class AsymmetricLayer(KVLayer):
    """Pages of keys and of values that have a size of their own."""

    def write_scaled(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        *,
        value_scale: float,
        turns: Turns | None = None,
    ) -> None:
        """Rotate q and k, multiply v, and write k and v; see `rope_and_write_asymmetric`."""
        rope_and_write_asymmetric(
            q, k, v, cos_sin, positions, self.k, self.v, slots, value_scale=value_scale, turns=turns
        )


@dataclass(frozen=True, slots=True)
class KVCache:
    """The pages of each attention layer, in their order: of one that reads the keys of an earlier layer, that layer's.

    A page holds the same tokens in every layer.
    The last page belongs to no sequence: padding rows of a CUDA graph write there.
    """

    layers: tuple[KVLayer, ...]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        model_dtype: torch.dtype | None = None,
    ) -> "KVCache":
        """Allocate `num_pages` pages for sequences, and one more behind them.

        model_dtype  of layers that are kept out of pages of 8 bits; needed where there are such
        """
        layers: dict[int, KVLayer] = {}
        for index, layer in zip(config.attention_layers, config.attentions, strict=True):
            if layer.reads_keys_of is not None:
                layers[index] = layers[layer.reads_keys_of]
                continue
            shape = num_pages + 1, page_size, layer.num_kv_heads, layer.head_dim
            if dtype is fp8_pages.E4M3 and not layer.skips_fp8_cache:
                k, v = (fp8_pages.allocate(*shape, device) for _ in range(2))
                layers[index] = Fp8Layer(k, v)
                continue
            if layer.is_latent and layer.values is not None:
                k = torch.zeros(*shape[:3], layer.cached_dim, dtype=dtype, device=device)
                layers[index] = LatentLayer(k, k[..., : layer.values.dim])
                continue
            if layer.value_dim is not None:
                k, v = (
                    torch.zeros(*shape[:3], dim, dtype=dtype, device=device)
                    for dim in (layer.head_dim, layer.value_dim)
                )
                layers[index] = AsymmetricLayer(k, v)
                continue
            own = model_dtype if dtype is fp8_pages.E4M3 else dtype
            assert own is not None, "a layer kept out of pages of 8 bits has the model's dtype"
            k, v = (torch.zeros(shape, dtype=own, device=device) for _ in range(2))
            layers[index] = KVLayer(k, v)
        return cls(tuple(layers.values()))

    @property
    def num_pages(self) -> int:
        """The pages that sequences may own."""
        return self.layers[0].k.shape[0] - 1

    @property
    def page_size(self) -> int:
        return self.layers[0].k.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all that a page consists of, layer by layer, each once: pages are the first dim of each."""
        own = {id(layer): layer for layer in self.layers}
        return tuple(tensor for layer in own.values() for tensor in layer.tensors)
