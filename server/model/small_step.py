"""A step of few rows on a CPU, in as few operations as torch has for it.

Of 8 rows each operation takes 1 to 4 us, most of it before anything is computed. With attention a step of 8 layers has
260 and 155 views, by the general way 280 and 300.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.packed import product_in_units
from kernels.fused.rope_kv import Turns
from server.model.config import ModelConfig
from server.model.kv_cache import KVCache
from server.model.layers import LayerWeights, Linear, Weights


@dataclass(frozen=True, slots=True)
class _Layer:
    """Packed matrices. Norms have the unit of the matrix behind them: a power of two, so that not a bit differs."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    output_unit: float
    feed_forward_norm: Tensor
    gate_up: Tensor
    down: Tensor
    down_unit: float


class SmallStep:
    """Of a model whose matrices are all packed, and that has neither biases nor norms of heads."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._embedding = weights.embedding
        self._layers = tuple(_layer(layer) for layer in weights.layers)
        self._eps = torch.tensor(config.norm_eps)
        self._max_rows = min(
            (it.packed.max_rows for layer in weights.layers for it in _linears(layer) if it.packed), default=0
        )

    @classmethod
    def of(cls, config: ModelConfig, weights: Weights) -> "SmallStep | None":
        """None where this way is none for the model. `weights` as they are for computing."""
        linears = [linear for layer in weights.layers for linear in _linears(layer)]
        if config.qk_norm or not all(it.packed is not None and it.bias is None for it in linears):
            return None
        return cls(config, weights)

    def takes(self, token_ids: Tensor, kv: KVCache) -> bool:
        return 0 < token_ids.shape[0] <= self._max_rows and kv.k[0].dtype is torch.float32

    def forward(
        self,
        token_ids: Tensor,
        turns: Turns,
        slots: Tensor,
        kv: KVCache,
        attend: Callable[[int, Tensor, Tensor, Tensor, Tensor], None],
    ) -> Tensor:
        """As `Decoder.forward`."""
        config, num_tokens = self._config, token_ids.shape[0]
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        num_turned, half = config.num_heads + config.num_kv_heads, config.head_dim // 2
        cos, sin = turns.cos, turns.sin
        residual = self._embedding.index_select(0, token_ids)
        for index, layer in enumerate(self._layers):
            normed = self._norm(residual, layer.attention_norm)
            heads = product_in_units(normed, layer.qkv).view(num_tokens, -1, config.head_dim)
            turned = heads.narrow(1, 0, num_turned)
            swapped = turned.roll(half, -1)  # the halves of each head
            turned.mul_(cos).addcmul_(swapped, sin)
            q, k, v = heads.split_with_sizes(sizes, 1)
            k_pages, v_pages = kv.k[index], kv.v[index]
            k_pages.view(-1, config.num_kv_heads, config.head_dim).index_copy_(0, slots, k)
            v_pages.view(-1, config.num_kv_heads, config.head_dim).index_copy_(0, slots, v)
            out = torch.empty((num_tokens, config.num_heads, config.head_dim))
            attend(index, q, k, v, out)
            residual.add_(product_in_units(out.view(num_tokens, -1), layer.output), alpha=layer.output_unit)
            normed = self._norm(residual, layer.feed_forward_norm)
            gate, up = product_in_units(normed, layer.gate_up).chunk(2, -1)
            residual.add_(product_in_units(F.silu(gate).mul_(up), layer.down), alpha=layer.down_unit)
        return residual

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(x, scale).mul_(weight)


def _linears(layer: LayerWeights) -> tuple[Linear, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _layer(layer: LayerWeights) -> _Layer:
    qkv, output, gate_up, down = (linear.packed for linear in _linears(layer))
    assert qkv is not None, "all are packed"
    assert output is not None, "all are packed"
    assert gate_up is not None, "all are packed"
    assert down is not None, "all are packed"
    return _Layer(
        attention_norm=layer.attention_norm * qkv.unit,
        qkv=qkv.panels,
        output=output.panels,
        output_unit=output.unit,
        feed_forward_norm=layer.feed_forward_norm * gate_up.unit,
        gate_up=gate_up.panels,
        down=down.panels,
        down_unit=down.unit,
    )
