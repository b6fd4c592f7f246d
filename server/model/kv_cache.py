"""The paged cache of keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qualification.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVCache:
    """k[layer], v[layer]: [num_pages + 1, page_size, kv_heads, head_dim]. A page holds the same tokens in every layer.

    The last page belongs to no sequence: padding rows of a CUDA graph write there.
    """

    k: list[Tensor]
    v: list[Tensor]

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        """Allocate `num_pages` pages for sequences, and one more behind them."""
        layers = [layer.attention for layer in config.layers]
        shapes = [(num_pages + 1, page_size, layer.num_kv_heads, layer.head_dim) for layer in layers]

        def pages() -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

        return cls(pages(), pages())

    @property
    def num_pages(self) -> int:
        """The pages that sequences may own."""
        return self.k[0].shape[0] - 1

    @property
    def page_size(self) -> int:
        return self.k[0].shape[1]
