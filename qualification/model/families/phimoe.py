"""Phi 3.5 MoE: LayerNorms with biases, and mixtures whose two experts a sparse mixer weighs one after the other.

LongRoPE has the long factors where a server's limit is beyond the original context, as its makers' code has them;
transformers 5.24 takes the short ones for every text.
"""

from dataclasses import replace
from functools import partial

from qualification.model.config import ExpertsConfig, ModelConfig, RopeConfig, RopeKind
from qualification.model.families.family import Family
from qualification.model.families.mixtral import TENSORS
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_routing
from qualification.model.rope import read_rope, rope_section
from qualification.model.shared import read_activation, read_like_llama, with_biased_norms
from qualification.model.windows import read_uniform_windows

_NUM_ACTIVE = 2  # of a sparse mixer


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields.or_else(rope_theta=1_000_000.0).where_absent(num_key_value_heads=8),  # as its class has them
        "phimoe",
        norm_eps=1e-5,
        windows=partial(read_uniform_windows, missing=None),
        rope=_read_rope,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=_read_experts,
    )
    return replace(with_biased_norms(model, model.norm_eps), head_has_bias=fields.flag("lm_head_bias", False))


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    rope = read_rope(fields, (RopeKind.PLAIN, RopeKind.LONGROPE), head_dim=head_dim)
    section = rope_section(fields)
    if section is None or rope.kind is RopeKind.PLAIN:
        return rope
    factor = section.number("short_mscale")
    if section.number("long_mscale") != factor:
        section.refuse("long_mscale", f"short_mscale ({factor:g}): a server has one for all lengths")
    return replace(rope, attention_factor=factor)


def _read_experts(fields: Fields) -> ExpertsConfig:
    routing = read_routing(
        fields, "num_local_experts", renormalizes=False, num_experts_missing=16, num_active_missing=_NUM_ACTIVE
    )
    if routing.num_active != _NUM_ACTIVE:
        fields.refuse("num_experts_per_tok", f"{_NUM_ACTIVE}: a sparse mixer chooses as many, whatever it says")
    jitter = fields.number("router_jitter_noise", 0.01)
    return ExpertsConfig(fields.integer("intermediate_size"), routing, read_activation(fields), jitter=jitter)


KEYS = family_keys(
    "sliding_window num_local_experts num_experts_per_tok router_jitter_noise attention_bias lm_head_bias",
    without_effect="input_jitter_noise hidden_dropout output_router_logits router_aux_loss_coef",
)
PHIMOE = Family("phimoe", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), read_config, KEYS, TENSORS)
