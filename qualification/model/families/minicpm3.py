"""MiniCPM 3: latent attention and dense feed-forwards; embeddings, residuals and logits are scaled."""

from dataclasses import replace

from qualification.model.config import FeedForward, ModelConfig, RopeConfig, RopeKind
from qualification.model.families.family import Family, TensorNames
from qualification.model.families.latent import READ, REFUSED, read_latent
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.latent import LatentSizes
from qualification.model.rope import read_rope
from qualification.model.shared import read_dense
from qualification.model.windows import read_num_layers

# As its class has them where the fields are missing.
_MISSING: dict[str, object] = {
    "vocab_size": 73_448,
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "max_position_embeddings": 32_768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(**_MISSING)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % num_heads:
        fields.refuse("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
    sizes = LatentSizes(latent=256, rotated=32, plain=64, value=hidden // num_heads, query_latent=768)
    model = read_latent(
        fields,
        "minicpm3",
        sizes=sizes,
        norm_eps=1e-5,
        feed_forwards=_read_dense_layers,
        rope=_read_rope,
    )
    return with_scales(model, fields, embedding=12.0, depth=1.4, base=256.0)


def with_scales(model: ModelConfig, fields: Fields, *, embedding: float, depth: float, base: float) -> ModelConfig:
    """Return the model with MiniCPM's scales; those given are of missing fields. Raises ModelConfigError."""
    depth_scale = fields.number_or_none("scale_depth", depth)
    width = fields.number_or_none("dim_model_base", base)
    return replace(
        model,
        embedding_scale=fields.number("scale_emb", embedding),
        residual_scale=1.0 if depth_scale is None else depth_scale / model.num_layers**0.5,
        logits_divisor=1.0 if width is None else model.hidden_size / width,
    )


def _read_dense_layers(fields: Fields) -> tuple[FeedForward, ...]:
    return (read_dense(fields, has_bias=fields.flag("mlp_bias", False)),) * read_num_layers(fields)


_KINDS = RopeKind.PLAIN, RopeKind.LINEAR, RopeKind.LLAMA3, RopeKind.LONGROPE


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    return read_rope(fields, _KINDS, head_dim=head_dim)


SCALES = "scale_emb scale_depth dim_model_base"
KEYS = family_keys(
    f"{READ} {SCALES} mlp_bias",
    without_effect="qk_head_dim",
    refused={name: it for name, it in REFUSED.items() if name != "rope_interleave"},
)
MINICPM3 = Family("minicpm3", ("MiniCPM3ForCausalLM",), read_config, KEYS, TensorNames())
