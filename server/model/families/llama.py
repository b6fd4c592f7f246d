"""Llama 1 to 3 and every model saved as one: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

from torch import Tensor

from server.model.config import ModelConfig
from server.model.families.family import Family
from server.model.families.fields import Fields
from server.model.families.rope_fields import read_rope
from server.model.layers import Linear, Weights


def read_config(fields: Fields) -> ModelConfig:
    fields.choice("hidden_act", ("silu",), "silu")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    hidden_size = fields.integer("hidden_size")
    if hidden_size % num_heads and not fields.has("head_dim"):
        fields.refuse("hidden_size", f"a multiple of num_attention_heads ({num_heads}) where head_dim is absent")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        fields.refuse("head_dim", f"even for the rotary embedding (it is {head_dim})")
    num_layers = fields.integer("num_hidden_layers")
    vocab_size = fields.integer("vocab_size")
    has_attention_bias = fields.flag("attention_bias", False)
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=has_attention_bias,
        output_bias=has_attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=False,
        windows=(None,) * num_layers,
        softcap=None,
        sinks=False,
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        dtype=fields.choice(
            "dtype" if fields.has("dtype") else "torch_dtype", ("bfloat16", "float16", "float32"), "float32"
        ),
    )


def checkpoint_views(weights: Weights, config: ModelConfig) -> dict[str, Tensor]:
    views = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not config.tie_embeddings:
        views["lm_head.weight"] = weights.head
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        views[f"{prefix}.input_layernorm.weight"] = layer.attention_norm
        views[f"{prefix}.post_attention_layernorm.weight"] = layer.feed_forward_norm
        q, k, v = layer.qkv.rows(heads, kv_heads, kv_heads)
        gate, up = layer.gate_up.rows(config.intermediate_size, config.intermediate_size)
        attention = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": layer.output}
        feed_forward = {"gate_proj": gate, "up_proj": up, "down_proj": layer.down}
        views |= _named(f"{prefix}.self_attn", attention) | _named(f"{prefix}.mlp", feed_forward)
    return views


def _named(prefix: str, linears: dict[str, Linear]) -> dict[str, Tensor]:
    weights = {f"{prefix}.{name}.weight": linear.weight for name, linear in linears.items()}
    biases = {f"{prefix}.{name}.bias": linear.bias for name, linear in linears.items() if linear.bias is not None}
    return weights | biases


LLAMA = Family("llama", ("LlamaForCausalLM",), read_config, checkpoint_views)
