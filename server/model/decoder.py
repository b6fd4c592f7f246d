"""The transformer: flattened tokens to hidden states to logits. One class for all families."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fused.norm import add_rms_norm, rms_norm
from kernels.fused.rope_kv import rope_and_write_kv, turns_of
from kernels.linear.autotune import Chooser
from kernels.linear.matmul import compile_linear, linear_fp32
from qualification.model.config import ModelConfig
from server.model.layers import Weights
from server.model.rope import cos_sin_table
from server.model.step import Step


class Decoder:
    """A decoder-only transformer. Holds weights and the rotary table; keeps nothing of a batch."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        attention = config.layers[0].attention
        device = weights.embedding.device
        self._cos_sin = cos_sin_table(attention.rope, attention.head_dim, config.max_position, device)
        _compile_matmuls(weights)

    def choose_products(self, chooser: Chooser, sizes: Sequence[int]) -> None:
        """Multiply `sizes` rows, and what they stand for, as is fastest on this GPU. Raises CublasLtError."""
        self.weights = self.weights.with_chosen(chooser, sizes)

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Return hidden states [T, hidden] before the final norm, which logits() applies to the rows it is given."""
        eps = self.config.norm_eps
        turns = turns_of(self._cos_sin, step.positions)
        if turns is not None:
            step = replace(step, turns=turns)
        residual = F.embedding(step.token_ids, self.weights.embedding)
        fed: Tensor | None = None  # what the layer before added; each norm adds its input to the residual on the way
        for index, layer in enumerate(self.weights.layers):
            if fed is None:
                normed = rms_norm(residual, layer.attention_norm, eps)
            else:
                normed, residual = add_rms_norm(fed, residual, layer.attention_norm, eps)
            attended = self._attention(index, normed, step)
            normed, residual = add_rms_norm(attended, residual, layer.feed_forward_norm, eps)
            fed = layer.down(layer.gate_up.swiglu(normed))
        return residual if fed is None else residual.add_(fed)

    @torch.inference_mode()
    def logits(self, hidden_rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [R, vocab] fp32 of hidden states [R, hidden], in `out` where it is given."""
        normed = rms_norm(hidden_rows, self.weights.final_norm, self.config.norm_eps)
        return linear_fp32(normed, self.weights.head, out, self.weights.chosen_head)

    def _attention(self, index: int, normed: Tensor, step: Step) -> Tensor:
        config, layer = self.config.layers[index].attention, self.weights.layers[index]
        heads = layer.qkv(normed).view(normed.shape[0], -1, config.head_dim)
        q, k, v = heads.split_with_sizes([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        rope_and_write_kv(
            q,
            k,
            v,
            self._cos_sin,
            step.positions,
            step.kv.k[index],
            step.kv.v[index],
            step.slots,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.config.norm_eps,
            turns=step.turns,
        )
        out = q.new_empty(*q.shape)  # as integers: 1.2 us less than as a torch.Size
        step.attend(index, q, k, v, out)
        return layer.output(out.flatten(1))


def _compile_matmuls(weights: Weights) -> None:
    """All layers have the same shapes."""
    for layer in weights.layers[:1]:
        for linear in (layer.qkv, layer.output, layer.down):
            compile_linear(linear.weight, has_bias=linear.bias is not None)
        gate_up = layer.gate_up
        compile_linear(gate_up.weight, parts=2 if gate_up.bias is None else 1, has_bias=gate_up.bias is not None)
    compile_linear(weights.head, dtype_out=torch.float32)
