"""Bamba: layers of Mamba2 or of attention, half of each of whose heads is rotated, each with a dense feed-forward."""

from dataclasses import replace
from functools import partial

from qualification.model.config import LayerConfig, ModelConfig, RopeConfig
from qualification.model.families.family import Family, RecurrenceNames, TensorNames
from qualification.model.families.glm4 import SHARE, read_paired_rope
from qualification.model.families.granitemoehybrid import MIXER, read_mixer
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_dense, read_like_llama

_ATTENDING, _ROTATED, _HALF = "attn_layer_indices", "attn_rotary_emb", 0.5
# As its class has them where the fields are missing.
_MISSING: dict[str, object] = {
    "vocab_size": 128_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 262_144,
    "intermediate_size": 14_336,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(**_MISSING).where_absent(num_key_value_heads=8)
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields,
        "bamba",
        norm_eps=1e-5,
        rope=_read_rope,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=partial(read_dense, has_bias=fields.flag("mlp_bias", False)),
    )
    attending = fields.indices(_ATTENDING, model.num_layers)
    if not attending:
        fields.refuse(_ATTENDING, "such that a layer attends: prompts are cached by the pages of such layers")
    mixer = read_mixer(fields)

    def layer(index: int, whole: LayerConfig) -> LayerConfig:
        return whole if index in attending else replace(whole, mixer=mixer)

    return replace(model, layers=tuple(layer(*it) for it in enumerate(model.layers)))


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Read the rotation: of half of each head, unless rope_parameters has another share. Raises ModelConfigError."""
    if fields.number(SHARE, _HALF) != _HALF:
        fields.refuse(SHARE, f"{_HALF}, which its class takes in place of any other, or missing")
    found = read_paired_rope(fields.where_absent(**{SHARE: _HALF}), head_dim)
    if fields.given(_ROTATED) not in (None, found.rotated_dims(head_dim)):
        fields.refuse(_ROTATED, f"{found.rotated_dims(head_dim)}, the rotated dimensions of a head, or missing")
    return found


REFUSED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", None),
    "mamba_conv_bias": (True,),
    "mamba_proj_bias": (False, None),
    "layer_types": (None,),
    "layers_block_type": (None,),
}
KEYS = family_keys(
    f"attention_bias mlp_bias {_ATTENDING} {_ROTATED} {MIXER}",
    without_effect="num_logits_to_keep mamba_chunk_size z_loss_coefficient",
    refused=REFUSED,
)
TENSORS = TensorNames(
    before_feed_forward="pre_ff_layernorm",
    feed_forward="feed_forward",
    final_norm="final_layernorm",
    recurrence=RecurrenceNames(prefix="mamba"),
)
BAMBA = Family("bamba", ("BambaForCausalLM",), read_config, KEYS, TENSORS)
