"""LFM2 and LFM2.5: layers of a gated short convolution between those that attend, dense or with experts.

Heads are normed each; experts are chosen by sigmoids and a bias. Their class adds 1e-6 to the sum of the chosen scores
before it divides by it, which is not done here: weights differ by that share of the sum.
"""

from dataclasses import replace

from kernels.convolution.sizes import ConvolutionSizes
from kernels.experts.kinds import Scores
from kernels.fused.activation_kind import Activation
from qualification.model.config import DenseConfig, ExpertsConfig, FeedForward, ModelConfig, QKNorm
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_routing
from qualification.model.shared import read_like_llama
from qualification.model.short_convolution import ShortConvolutionConfig
from qualification.model.windows import read_num_layers

_KINDS, _FULL, _CONVOLUTION = "layer_types", "full_attention", "conv"
_ATTENDING = "full_attn_idxs"  # where the kinds are missing
_MOST_WIDTH = 16
# As both classes have them where the fields are missing.
_MISSING: dict[str, object] = {"num_key_value_heads": 8, "rope_theta": 1_000_000.0, "max_position_embeddings": 128_000}


def read_config(fields: Fields) -> ModelConfig:
    num_layers = read_num_layers(fields)
    attends = (True,) * num_layers
    if fields.has(_KINDS):
        attends = _read_kinds(fields, num_layers)
    elif fields.has(_ATTENDING):
        places = fields.indices(_ATTENDING, num_layers)
        attends = tuple(layer in places for layer in range(num_layers))
    dense = DenseConfig(_read_width(fields), Activation.SILU)
    return _read(fields, "lfm2", attends, (dense,) * num_layers)


def read_config_of_experts(fields: Fields) -> ModelConfig:
    num_layers, num_dense = read_num_layers(fields), fields.count("num_dense_layers", 2)
    dense = DenseConfig(fields.integer("intermediate_size", 7168), Activation.SILU)
    routing = read_routing(
        fields,
        "num_experts",
        scores=Scores.SIGMOID,
        renormalizes=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        num_experts_missing=32,
        num_active_missing=4,
    )
    has_correction = fields.flag("use_expert_bias", True)
    experts = ExpertsConfig(fields.integer("moe_intermediate_size", 1792), routing, has_correction_bias=has_correction)
    fed = tuple(dense if layer < num_dense else experts for layer in range(num_layers))
    return _read(fields, "lfm2_moe", _read_kinds(fields, num_layers), fed)


def _read_kinds(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    return tuple(it == _FULL for it in fields.choices(_KINDS, (_FULL, _CONVOLUTION), num_layers))


def _read(
    fields: Fields, family: str, attends: tuple[bool, ...], feed_forwards: tuple[FeedForward, ...]
) -> ModelConfig:
    if not any(attends):
        fields.refuse(_KINDS, f"such that a layer is {_FULL}: prompts are cached by the pages of such layers")
    model = read_like_llama(
        fields.or_else(**_MISSING).changed(rms_norm_eps=fields.number("norm_eps", 1e-5)),  # the only one that it knows
        family,
        qk_norm=QKNorm.EACH_HEAD,
        feed_forwards=lambda _: feed_forwards,
        tie_embeddings=True,
    )
    width = fields.integer("conv_L_cache", 3, most=_MOST_WIDTH)
    if width < 2:
        fields.refuse("conv_L_cache", "2 at least: a convolution of one token keeps nothing")
    sizes = ConvolutionSizes(model.hidden_size, width, fields.flag("conv_bias", False))
    mixer = ShortConvolutionConfig.of(sizes, model.hidden_size)
    layers = tuple(
        layer if is_attending else replace(layer, mixer=mixer)
        for layer, is_attending in zip(model.layers, attends, strict=True)
    )
    return replace(model, layers=layers, tie_embeddings=fields.flag("tie_embedding", model.tie_embeddings))


def _read_width(fields: Fields) -> int:
    """Return the width of a dense feed-forward: two thirds of the field's, times a factor, rounded up, where asked."""
    name = "block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size"  # the older name, which wins
    width = fields.integer(name, 12_288)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if "block_ffn_dim_multiplier" in fields.names and not fields.has("block_ffn_dim_multiplier"):
        return width  # null: neither factor nor multiple
    width = int(fields.number("block_ffn_dim_multiplier", 1.0) * width)
    multiple = fields.integer("block_multiple_of", 256)
    return -(-width // multiple) * multiple


_READ = f"{_KINDS} conv_L_cache conv_bias norm_eps tie_embedding"
_REFUSED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", None),
    "block_use_swiglu": (True, None),
    "use_pos_enc": (True, None),
}
# Notes: its classes take the width of the model for these, and heads from num_attention_heads.
_WITHOUT_EFFECT = (
    "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init conv_dim conv_dim_out "
    "conv_use_xavier_init num_heads"
)
_NAMES = TensorNames(
    before_attention="operator_norm",
    before_feed_forward="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    attention_output="self_attn.out_proj",
    convolution="conv",
    feed_forward="feed_forward",
    dense=("w1", "w3", "w2"),
    final_norm="embedding_norm",
)
LFM2 = Family(
    "lfm2",
    ("Lfm2ForCausalLM",),
    read_config,
    family_keys(
        f"{_READ} {_ATTENDING} block_ff_dim block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of",
        without_effect=_WITHOUT_EFFECT,
        refused=_REFUSED,
    ),
    _NAMES,
)
LFM2_MOE = Family(
    "lfm2_moe",
    ("Lfm2MoeForCausalLM",),
    read_config_of_experts,
    family_keys(
        f"{_READ} num_dense_layers moe_intermediate_size num_experts num_experts_per_tok norm_topk_prob "
        "routed_scaling_factor use_expert_bias",
        without_effect=f"{_WITHOUT_EFFECT} {_ATTENDING} output_router_logits router_aux_loss_coef",
        refused={**_REFUSED, "num_local_experts": (None,)},
    ),
    replace(
        _NAMES,
        experts=ExpertNames(
            "feed_forward.gate",
            "feed_forward.experts",
            gate="w1",
            up="w3",
            down="w2",
            correction="feed_forward.expert_bias",
        ),
    ),
)
