"""Nemotron-H (Nemotron Nano 2, Nemotron 3): Mamba2, attention without positions, feed-forwards and mixtures in layers.

Each layer is one of them, with one norm before it. A feed-forward has no gate, nor has an expert: down(relu(up)^2).
Experts of Super and Ultra read a latent, which a product makes of what the router reads; another one is behind them.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kernels.experts.kinds import Scores
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.vocabulary.shape import Dtype
from qualification.model.config import (
    ExpertsConfig,
    FeedForward,
    LayerConfig,
    ModelConfig,
    NormsConfig,
    RopeConfig,
    RopeKind,
    SharedExpertConfig,
)
from qualification.model.families.family import ExpertNames, Family, RecurrenceNames, TensorNames
from qualification.model.fields import Fields
from qualification.model.gated_delta import GatedDeltaConfig, StateSpaceRule
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_routing
from qualification.model.shared import read_like_llama, read_ungated, read_ungated_activation

_PATTERN, _KINDS = "hybrid_override_pattern", ("layers_block_type", "layer_types")
_MAMBA, _ATTENTION, _DENSE, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_BY_LETTER = {"M": _MAMBA, "*": _ATTENTION, "-": _DENSE, "E": _EXPERTS}
_OLDER = {"mamba": _MAMBA, "attention": _ATTENTION}
_ACTIVATION = "mlp_hidden_act"
_STATE_DTYPES = {"float32": Dtype.FP32, "bfloat16": Dtype.BF16}
MOST_DIM, MOST_WIDTH = 256, 8
_WIDTH, _NUM_EXPERTS, _NUM_ACTIVE = 7688, 8, 2  # of experts, as its class has them
_INFINITY = {"__float__": "Infinity"}  # as transformers writes it
# As its class has them where the fields are missing.
_MISSING: dict[str, object] = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "intermediate_size": 21_504,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(**_MISSING, head_dim=fields.integer("attention_head_dim", 128))
    kinds = _read_kinds(fields)
    if fields.has("num_hidden_layers") and fields.integer("num_hidden_layers") != len(kinds):
        fields.refuse("num_hidden_layers", f"{len(kinds)}, the layers that {_source(fields)} names")
    model = read_like_llama(
        fields.changed(num_hidden_layers=len(kinds)),
        "nemotron_h",
        rope=lambda *_: RopeConfig(1.0, RopeKind.NONE),
        feed_forwards=lambda fields: _read_feed_forwards(fields, kinds),
    )
    mixer, norms = _read_mixer(fields), NormsConfig()

    def layer(whole: LayerConfig, kind: str) -> LayerConfig:
        match kind:
            case "linear_attention":
                return LayerConfig(mixer, norms, None)
            case "full_attention":
                return whole
            case _:
                return replace(whole, mixer=None)

    layers = tuple(map(layer, model.layers, kinds))
    return replace(model, layers=layers, norm_eps=fields.number("layer_norm_epsilon", 1e-5))


def _source(fields: Fields) -> str:
    return next((it for it in _KINDS if fields.has(it)), _PATTERN)


def _read_kinds(fields: Fields) -> tuple[str, ...]:
    """Read what each layer is: a list, or a word of one letter for each. Raises ModelConfigError."""
    source = _source(fields)
    given = fields.given(source)
    if source == _KINDS[0] and fields.has(_KINDS[1]) and fields.given(_KINDS[1]) != given:
        fields.refuse(_KINDS[1], f"the same as {source}, or missing")
    if source == _PATTERN:
        letters = given if isinstance(given, str) else ""
        kinds: list[str | None] = [_BY_LETTER.get(it) for it in letters]
        expected = f"a word of {', '.join(_BY_LETTER)}"
    else:
        kinds = [_OLDER.get(it, it) for it in map(str, given)] if isinstance(given, list) else []
        expected = f"a list of {', '.join(_BY_LETTER.values())}"
    if not kinds or any(it not in _BY_LETTER.values() for it in kinds):
        fields.refuse(source, expected)
    if _ATTENTION not in kinds:
        fields.refuse(source, "such that a layer attends: prompts are cached by the pages of such layers")
    return tuple(str(it) for it in kinds)


def _read_feed_forwards(fields: Fields, kinds: tuple[str, ...]) -> tuple[FeedForward | None, ...]:
    """Read what each layer feeds forward. The fields of a kind that no layer has may be missing."""
    readers: dict[str, Callable[[Fields], FeedForward]] = {
        _DENSE: partial(read_ungated, field=_ACTIVATION),
        _EXPERTS: _read_experts,
    }
    of_kind = {kind: read(fields) for kind, read in readers.items() if kind in kinds}
    return tuple(of_kind.get(kind) for kind in kinds)


def _read_experts(fields: Fields) -> FeedForward:
    if fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", "false, or missing, where layers have experts")
    if fields.integer("n_shared_experts", 1) != 1:  # its class does not read it, and the public files have 1
        fields.refuse("n_shared_experts", "1, or missing: moe_shared_expert_intermediate_size is the width of all")
    routing = read_routing(
        fields,
        "n_routed_experts",
        scores=Scores.SIGMOID,
        renormalizes=fields.flag("norm_topk_prob", True),
        has_groups=True,
        scale=fields.number("routed_scaling_factor", 1.0),
        num_experts_missing=_NUM_EXPERTS,
        num_active_missing=_NUM_ACTIVE,
    )
    return ExpertsConfig(
        fields.integer("moe_intermediate_size", _WIDTH),
        routing,
        read_ungated_activation(fields, _ACTIVATION),
        has_correction_bias=True,
        shared=SharedExpertConfig(fields.integer("moe_shared_expert_intermediate_size", _WIDTH)),
        latent=fields.integer_or_none("moe_latent_size", None),
    )


def _read_mixer(fields: Fields) -> GatedDeltaConfig:
    groups, heads = fields.integer("n_groups", 8), fields.integer("mamba_num_heads", 128)
    if heads % groups:
        fields.refuse("mamba_num_heads", f"a multiple of n_groups ({groups})")
    sizes = RecurrenceSizes(
        groups,
        heads,
        fields.integer("ssm_state_size", 128, most=MOST_DIM),
        fields.integer("mamba_head_dim", 64, most=MOST_DIM),
        fields.integer("conv_kernel", 4, most=MOST_WIDTH),
    )
    dtype = _STATE_DTYPES[fields.choice("mamba_ssm_cache_dtype", tuple(_STATE_DTYPES), "float32")]
    return GatedDeltaConfig.of(sizes, fields.integer("hidden_size"), dtype, rule=StateSpaceRule(*read_steps(fields)))


def read_steps(fields: Fields) -> tuple[float, float]:
    """Read the numbers that steps are held between: any from 0 on, infinity included. Raises ModelConfigError."""
    given = fields.given("time_step_limit")
    if given is None:
        return 0.0, math.inf
    numbers = [math.inf if it == _INFINITY else it for it in given] if isinstance(given, list) else []
    are_numbers = len(numbers) == 2 and all(type(it) in (int, float) for it in numbers)
    if not are_numbers or not 0 <= numbers[0] < numbers[1]:
        fields.refuse("time_step_limit", "two numbers from 0 on, the smaller one first")
    return float(numbers[0]), float(numbers[1])


KEYS = family_keys(
    f"{_PATTERN} {' '.join(_KINDS)} attention_head_dim mlp_hidden_act mlp_bias layer_norm_epsilon "
    "n_groups mamba_num_heads mamba_head_dim ssm_state_size conv_kernel mamba_ssm_cache_dtype time_step_limit "
    "n_routed_experts n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size "
    "num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob",
    without_effect="num_logits_to_keep use_mamba_kernels expand chunk_size time_step_min time_step_max time_step_floor "
    "time_step_rank rescale_prenorm_residual residual_in_fp32 hidden_dropout moe_shared_expert_overlap "
    "output_router_logits num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern",
    refused={
        "use_conv_bias": (True, None),
        "use_bias": (False, None),
        "attention_bias": (False, None),  # which its class in transformers does not read
        "mamba_proj_bias": (False, None),
        "mamba_hidden_act": ("silu", None),
        "sliding_window": (None,),
        **dict.fromkeys(
            ("mamba_n_groups", "mamba_d_conv", "mamba_expand", "mamba_dt_limit", "mamba_conv_bias"), (None,)
        ),
    },
)
TENSORS = TensorNames(
    before_attention="norm",
    before_feed_forward="norm",
    attention="mixer",
    attention_output="mixer.o_proj",
    feed_forward="mixer",
    experts=ExpertNames(
        router="mixer.gate", experts="mixer.experts", shared="mixer.shared_experts", router_is_plain=True
    ),
    recurrence=RecurrenceNames(prefix="mixer"),
)
# As the public files have them, and as transformers saves them.
_RENAMED = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
}
NEMOTRON_H = Family(
    "nemotron_h", ("NemotronHForCausalLM",), read_config, KEYS, TENSORS, not_read=("mtp.",), renamed=_RENAMED
)
