"""The transformer: flattened tokens to hidden states to logits. One class for all families."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.activation import swiglu
from kernels.fused.norm import add_rms_norm, rms_norm
from kernels.fused.rope_kv import rope_and_write_kv
from server.model.config import ModelConfig
from server.model.kv_cache import KVCache
from server.model.layers import Weights
from server.model.rope import cos_sin_table

# attend(layer, q [T, heads, d], k [T, kv_heads, d], v, out [T, heads, d]) fills out; k and v are in their pages.
# q, k and v are views of one tensor: a token's heads are contiguous, tokens are further apart.
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


class Decoder:
    """A decoder-only transformer. Holds weights and the rotary table; keeps nothing of a batch."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._cos_sin = cos_sin_table(config.rope, config.head_dim, config.max_position, weights.embedding.device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, kv: KVCache, attend: Attend) -> Tensor:
        """Hidden states [T, hidden] before the final norm, which logits() applies to the rows it is given.

        token_ids  [T] int64, the tokens of all sequences of the batch one after another
        positions  [T] int32, below max_position: where each stands in its sequence
        slots      [T] int64, page * page_size + offset: where its keys and values go; unique, in range
        kv         its pages are written
        """
        eps = self.config.norm_eps
        residual = F.embedding(token_ids, self.weights.embedding)
        fed: Tensor | None = None  # what the layer before added; each norm adds its input to the residual on the way
        for index, layer in enumerate(self.weights.layers):
            if fed is None:
                normed = rms_norm(residual, layer.attention_norm, eps)
            else:
                normed, residual = add_rms_norm(fed, residual, layer.attention_norm, eps)
            attended = self._attention(index, normed, positions, slots, kv, attend)
            normed, residual = add_rms_norm(attended, residual, layer.feed_forward_norm, eps)
            fed = layer.down(swiglu(layer.gate_up(normed)))
        return residual if fed is None else residual.add_(fed)

    @torch.inference_mode()
    def logits(self, hidden_rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [R, vocab] fp32 of hidden states [R, hidden], in `out` where it is given."""
        normed = rms_norm(hidden_rows, self.weights.final_norm, self.config.norm_eps)
        logits = F.linear(normed, self.weights.head)
        return logits.float() if out is None else out.copy_(logits)

    def _attention(
        self,
        index: int,
        normed: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: KVCache,
        attend: Attend,
    ) -> Tensor:
        config, layer = self.config, self.weights.layers[index]
        heads = layer.qkv(normed).view(normed.shape[0], -1, config.head_dim)
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        rope_and_write_kv(
            q,
            k,
            v,
            self._cos_sin,
            positions,
            kv.k[index],
            kv.v[index],
            slots,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.norm_eps,
        )
        out = q.new_empty(q.shape)
        attend(index, q, k, v, out)
        return layer.output(out.flatten(1))
