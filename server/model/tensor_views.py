"""Where a checkpoint of a Llama-like family keeps each weight."""

from collections.abc import Callable

from torch import Tensor

from server.model.config import ModelConfig
from server.model.layers import LayerWeights, Linear, Weights

Parts = Callable[[LayerWeights, ModelConfig], dict[str, Linear]]  # the linears of a layer by their names within it


def split_views(weights: Weights, config: ModelConfig) -> dict[str, Tensor]:
    """Queries, keys and values apart, gate and up apart: each a view of rows of the merged weight."""
    return _views(weights, config, _split_parts)


def fused_views(weights: Weights, config: ModelConfig) -> dict[str, Tensor]:
    """Merged in the checkpoint as they are here."""
    return _views(weights, config, _fused_parts)


def _split_parts(layer: LayerWeights, config: ModelConfig) -> dict[str, Linear]:
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q, k, v = layer.qkv.rows(heads, kv_heads, kv_heads)
    gate, up = layer.gate_up.rows(config.intermediate_size, config.intermediate_size)
    return {
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": layer.output,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.down,
    }


def _fused_parts(layer: LayerWeights, _config: ModelConfig) -> dict[str, Linear]:
    return {
        "self_attn.qkv_proj": layer.qkv,
        "self_attn.o_proj": layer.output,
        "mlp.gate_up_proj": layer.gate_up,
        "mlp.down_proj": layer.down,
    }


def _views(weights: Weights, config: ModelConfig, parts: Parts) -> dict[str, Tensor]:
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not config.tie_embeddings:
        views["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        norms = {
            "input_layernorm": layer.attention_norm,
            "post_attention_layernorm": layer.feed_forward_norm,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
        }
        views |= {f"{prefix}.{name}.weight": norm for name, norm in norms.items() if norm is not None}
        for name, linear in parts(layer, config).items():
            views[f"{prefix}.{name}.weight"] = linear.weight
            if linear.bias is not None:
                views[f"{prefix}.{name}.bias"] = linear.bias
    return views
