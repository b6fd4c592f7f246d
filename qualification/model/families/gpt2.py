"""GPT-2: learned positions, LayerNorms with biases, down(gelu(up)), and products stored with a row for each input."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from qualification.model.config import LayerConfig, LearnedPositions, ModelConfig
from qualification.model.families.family import Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import UNREAD_BY_OLDER, family_keys
from qualification.model.shared import no_rotation, read_eager, read_like_llama, with_biased_norms

_OLDER_NAMES = {  # of fields that its class reads by both names
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}  # fmt: skip
_SCALES, _FALLS = "scale_attn_weights", "scale_attn_by_inverse_layer_idx"
READ = f"{' '.join(_OLDER_NAMES.values())} n_inner activation_function layer_norm_epsilon {_SCALES}"
WITHOUT_EFFECT = f"""
    n_ctx attn_pdrop embd_pdrop resid_pdrop summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout {UNREAD_BY_OLDER}
"""


def read_config(fields: Fields) -> ModelConfig:
    model = read_like_gpt2(fields, "gpt2", missing="gelu_new")
    if not fields.flag(_FALLS, False):
        return model

    def fallen(index: int, layer: LayerConfig) -> LayerConfig:
        return replace(layer, mixer=replace(layer.attention, scale=layer.attention.scale / (index + 1)))

    return replace(model, layers=tuple(fallen(*it) for it in enumerate(model.layers)))


def read_like_gpt2(fields: Fields, family: str, *, missing: str, num_kv_heads: int | None = None) -> ModelConfig:
    """Read what GPT-2 and GPT BigCode share.

    missing       the activation where the field is missing
    num_kv_heads  None: as many as of queries
    """
    given = _by_one_name(fields, _OLDER_NAMES).where_absent(bos_token_id=50256, eos_token_id=50256)
    has_scale = fields.flag(_SCALES, True)
    model = read_like_llama(
        given.or_else(n_inner=4 * given.integer("hidden_size"))
        .changed(num_key_value_heads=num_kv_heads, head_dim=None)
        .named(intermediate_size="n_inner", hidden_act="activation_function"),
        family,
        rope=no_rotation,
        scale=lambda _, head_dim: head_dim**-0.5 if has_scale else 1.0,
        attention_bias=True,
        output_bias=True,
        feed_forward=partial(read_eager, has_bias=True, missing=missing),
        tie_embeddings=True,
    )
    positions = LearnedPositions(model.max_position)
    return replace(with_biased_norms(model, fields.number("layer_norm_epsilon", 1e-5)), positions=positions)


def _by_one_name(fields: Fields, names: Mapping[str, str]) -> Fields:
    """Return the fields, those of two names by the newer one. Raises ModelConfigError where both differ."""
    for name, older in names.items():
        if fields.has(name) and fields.has(older) and fields.given(name) != fields.given(older):
            fields.refuse(name, f"absent beside {older}, or the same ({fields.given(older)})")
    return fields.named(**{name: older for name, older in names.items() if fields.has(older) or not fields.has(name)})


KEYS = family_keys(
    f"{READ} {_FALLS}",
    without_effect=f"{WITHOUT_EFFECT} reorder_and_upcast_attn",
    refused={"quantization_config": (None,)},
)
TENSORS = TensorNames(
    qkv="c_attn",
    products_are_turned=True,
    before_attention="ln_1",
    before_feed_forward="ln_2",
    attention="attn",
    attention_output="attn.c_proj",
    dense=("c_fc", "c_fc", "c_proj"),
)
TOLERATED = (".attn.bias", ".attn.masked_bias")  # masks, which old exporters wrote down
RENAMED = {
    f"{prefix}{old}.": f"model.{new}."
    for old, new in (("wte", "embed_tokens"), ("wpe", "embed_positions"), ("h", "layers"), ("ln_f", "norm"))
    for prefix in ("transformer.", "")
}
GPT2 = Family("gpt2", ("GPT2LMHeadModel",), read_config, KEYS, TENSORS, tolerated=TOLERATED, renamed=RENAMED)
