"""A step of few rows on a CPU, in as few operations as torch has for it.

Of 8 rows each operation takes 1 to 4 us and each view 1, most of it before anything is computed. So all but the
residual is computed into memory that is kept, with its views, while steps have as many rows. With attention a step of 8
layers has 250 operations and 70 views.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.rope_kv import Turns
from kernels.linear.packed import product_in_units_into
from server.model.config import ModelConfig
from server.model.kv_cache import KVCache
from server.model.layers import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class _Layer:
    """Packed matrices. Norms have the unit of the matrix behind them, and the root of the number that is averaged."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    output_unit: float
    feed_forward_norm: Tensor
    gate_up: Tensor
    down: Tensor
    down_unit: float


class _Rows:
    """Memory of a step of T rows, and its views."""

    def __init__(self, config: ModelConfig, num: int) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        size_q, size_k, half = heads * dim, kv_heads * dim, dim // 2
        self.num = num
        self.norm = torch.empty(num, 1)
        self.normed = torch.empty(num, config.hidden_size)
        self.product = torch.empty(num, config.hidden_size)
        self.qkv = torch.empty(num, size_q + 2 * size_k)
        self.before = self.qkv[:, : size_q + size_k].view(num, heads + kv_heads, dim)  # q and k, not turned
        self.before_left, self.before_right = self.before[..., :half], self.before[..., half:]
        turned = torch.empty(num, size_q + size_k)
        self.turned = turned.view(num, heads + kv_heads, dim)
        self.left, self.right = self.turned[..., :half], self.turned[..., half:]
        self.k_row, self.v_row = turned[:, size_q:], self.qkv[:, size_q + size_k :]
        self.q, self.k, self.v = self.turned[:, :heads], self.turned[:, heads:], self.v_row.view(num, kv_heads, dim)
        self.attended_row = torch.empty(num, size_q)
        self.attended = self.attended_row.view(num, heads, dim)
        self.gate_up = torch.empty(num, 2 * config.intermediate_size)
        self.gate, self.up = self.gate_up.chunk(2, -1)


class SmallStep:
    """Of a model whose matrices are all packed, and that has neither biases nor norms of heads."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._embedding = weights.embedding
        self._layers = tuple(_layer(layer) for layer in weights.layers)
        self._least_norm = torch.tensor(math.sqrt(config.norm_eps * config.hidden_size))
        self._max_rows = min(
            (it.packed.max_rows for layer in weights.layers for it in layer.linears.values() if it.packed), default=0
        )
        self._rows: _Rows | None = None

    @classmethod
    def of(cls, config: ModelConfig, weights: Weights) -> "SmallStep | None":
        """None where this way is none for the model, or for this torch. `weights` as they are for computing."""
        packed = [(linear.packed, linear) for layer in weights.layers for linear in layer.linears.values()]
        if config.qk_norm or not packed:
            return None
        for it, linear in packed:
            if it is None or linear.bias is not None:
                return None
            size_out, size_in = linear.weight.shape
            try:
                product_in_units_into(torch.zeros(1, size_in), it.panels, torch.empty(1, size_out))
            except TypeError:
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
        rows = self._rows
        if rows is None or rows.num != token_ids.shape[0]:
            rows = self._rows = _Rows(self._config, token_ids.shape[0])
        cos, (sin_left, sin_right) = turns.cos, turns.sin.chunk(2, -1)
        size_kv = self._config.num_kv_heads * self._config.head_dim
        residual = self._embedding.index_select(0, token_ids)
        for index, layer in enumerate(self._layers):
            self._norm(residual, layer.attention_norm, rows)
            product_in_units_into(rows.normed, layer.qkv, rows.qkv)
            torch.mul(rows.before, cos, out=rows.turned)
            rows.left.addcmul_(rows.before_right, sin_left)
            rows.right.addcmul_(rows.before_left, sin_right)
            kv.k[index].view(-1, size_kv).index_copy_(0, slots, rows.k_row)
            kv.v[index].view(-1, size_kv).index_copy_(0, slots, rows.v_row)
            attend(index, rows.q, rows.k, rows.v, rows.attended)
            product_in_units_into(rows.attended_row, layer.output, rows.product)
            residual.add_(rows.product, alpha=layer.output_unit)
            self._norm(residual, layer.feed_forward_norm, rows)
            product_in_units_into(rows.normed, layer.gate_up, rows.gate_up)
            product_in_units_into(F.silu(rows.gate).mul_(rows.up), layer.down, rows.product)
            residual.add_(rows.product, alpha=layer.down_unit)
        return residual

    def _norm(self, x: Tensor, weight: Tensor, rows: _Rows) -> None:
        """x / sqrt(mean(x^2) + eps), by the root of n times both."""
        torch.linalg.vector_norm(x, 2, -1, True, out=rows.norm)
        torch.div(x, rows.norm.hypot_(self._least_norm), out=rows.normed).mul_(weight)


def _layer(layer: LayerWeights) -> _Layer:
    qkv, output, gate_up, down = (linear.packed for linear in layer.linears.values())
    assert qkv is not None, "all are packed"
    assert output is not None, "all are packed"
    assert gate_up is not None, "all are packed"
    assert down is not None, "all are packed"
    root = math.sqrt(layer.attention_norm.numel())
    return _Layer(
        attention_norm=layer.attention_norm * (qkv.unit * root),
        qkv=qkv.panels,
        output=output.panels,
        output_unit=output.unit,
        feed_forward_norm=layer.feed_forward_norm * (gate_up.unit * root),
        gate_up=gate_up.panels,
        down=down.panels,
        down_unit=down.unit,
    )
