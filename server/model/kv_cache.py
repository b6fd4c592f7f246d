"""The paged cache of keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fused.rope_kv import Turns, rope_and_write_kv
from qualification.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The pages of one attention layer: what the write of a step fills, and what attention reads.

    k, v    [num_pages + 1, page_size, kv_heads, head_dim]
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


@dataclass(frozen=True, slots=True)
class KVCache:
    """The pages of each attention layer, in their order: of one that reads the keys of an earlier layer, that layer's.

    A page holds the same tokens in every layer.
    The last page belongs to no sequence: padding rows of a CUDA graph write there.
    """

    layers: tuple[KVLayer, ...]

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        """Allocate `num_pages` pages for sequences, and one more behind them."""
        layers: dict[int, KVLayer] = {}
        for index, layer in zip(config.attention_layers, config.attentions, strict=True):
            if layer.reads_keys_of is not None:
                layers[index] = layers[layer.reads_keys_of]
                continue
            shape = num_pages + 1, page_size, layer.num_kv_heads, layer.head_dim
            k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
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
