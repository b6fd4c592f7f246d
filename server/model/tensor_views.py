"""Places of a decoder's weights in a checkpoint."""

from torch import Tensor

from qualification.model.config import LayerConfig, ModelConfig
from qualification.model.families.family import TensorNames
from server.model.layers import LayerWeights, Weights, dense
from server.model.linear import Dense


def checkpoint_views(weights: Weights, config: ModelConfig, names: TensorNames) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by name, as the weight, or the view of rows of a merged weight, that it fills."""
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not config.tie_embeddings:
        views["lm_head.weight"] = weights.head
    for index, (layer, layer_config) in enumerate(zip(weights.layers, config.layers, strict=True)):
        prefix = f"model.layers.{index}"
        norms = (
            (names.before_attention, layer.attention_norm),
            (names.after_attention, layer.norm_after_attention),
            (names.before_feed_forward, layer.feed_forward_norm),
            (names.after_feed_forward, layer.norm_after_feed_forward),
            ("self_attn.q_norm", layer.q_norm),
            ("self_attn.k_norm", layer.k_norm),
        )
        views |= {f"{prefix}.{name}.weight": norm for name, norm in norms if norm is not None}
        linears = _merged(layer) if names.merged else _split(layer, layer_config)
        for name, linear in linears.items():
            views[f"{prefix}.{name}.weight"] = linear.weight
            if linear.bias is not None:
                views[f"{prefix}.{name}.bias"] = linear.bias
    return views


def _split(layer: LayerWeights, config: LayerConfig) -> dict[str, Dense]:
    """Queries, keys and values apart, gate and up apart."""
    size_q, size_kv, width = config.attention.query_size, config.attention.kv_size, dense(config).width
    q, k, v = layer.qkv.rows(size_q, size_kv, size_kv)
    gate, up = layer.gate_up.rows(width, width)
    return {
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": layer.output,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.down,
    }


def _merged(layer: LayerWeights) -> dict[str, Dense]:
    return {
        "self_attn.qkv_proj": layer.qkv,
        "self_attn.o_proj": layer.output,
        "mlp.gate_up_proj": layer.gate_up,
        "mlp.down_proj": layer.down,
    }
