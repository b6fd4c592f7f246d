"""Cohere 2 with experts (North Mini Code, Command A+): Cohere 2's layers, whose feed-forwards are mixtures.

The first layers may be dense and have a pattern of windows of their own; with no window in any of them they rotate all
the same. Norms are RMSNorms where the file gives rms_norm_eps, else Cohere's LayerNorms.
"""

from dataclasses import replace
from functools import partial

from kernels.experts.kinds import Scores
from qualification.model.config import DenseConfig, ExpertsConfig, FeedForward, ModelConfig, SharedExpertConfig
from qualification.model.families.cohere2 import PARALLEL, REFUSED, WITHOUT_EFFECT
from qualification.model.families.family import ExpertNames, Family, TensorNames
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import KINDS, read_mixtures_by_kind, read_routing
from qualification.model.shared import read_activation, read_like_llama, without_rotation
from qualification.model.windows import WINDOW, Windows, read_windows_of

_NUM_DENSE, _DENSE_PATTERN, _DENSE_WIDTH = (
    "first_k_dense_replace", "prefix_dense_sliding_window_pattern", "prefix_dense_intermediate_size",
)  # fmt: skip
_COMBINATION = "shared_expert_combination_strategy"


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    model = read_like_llama(
        fields.or_else(head_dim=128, max_position_embeddings=8192),
        "cohere2_moe",
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        norms=PARALLEL,
        windows=_read_windows,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forwards=_read_feed_forwards,
        tie_embeddings=True,
    )
    rotates_dense = fields.integer(_DENSE_PATTERN, 1) == 1
    unrotated = frozenset(
        index
        for index, (window, layer) in enumerate(zip(_read_windows(fields), model.layers, strict=True))
        if window is None and not (rotates_dense and isinstance(layer.feed_forward, DenseConfig))
    )
    return replace(
        without_rotation(model, unrotated),
        norms_subtract_mean=not fields.has("rms_norm_eps"),
        logits_divisor=1 / fields.number("logit_scale", 0.0625),
    )


def _read_windows(fields: Fields) -> Windows:
    num_dense, of_dense = fields.count(_NUM_DENSE, 0), fields.integer(_DENSE_PATTERN, 1)
    of_others = fields.integer("sliding_window_pattern", 4)

    def has_window(layer: int) -> bool:
        is_dense = layer < num_dense
        place, period = (layer, of_dense) if is_dense else (layer - num_dense, of_others)
        return (place + 1) % period != 0

    return read_windows_of(fields, fields.integer_or_none("sliding_window", WINDOW), has_window)


def _read_feed_forwards(fields: Fields) -> tuple[FeedForward, ...]:
    width = fields.integer("intermediate_size", 22528)
    dense = fields.changed(intermediate_size=fields.integer(_DENSE_WIDTH, width))
    num_dense = fields.count(_NUM_DENSE, 0)
    return read_mixtures_by_kind(dense, partial(_read_experts, width=width), num_dense_missing=num_dense)


def _read_experts(fields: Fields, *, width: int) -> ExpertsConfig:
    """Experts of the largest logits; their weights, and what all tokens visit beside them, count half in an average."""
    scores = Scores(fields.choice("expert_selection_fn", tuple(it.value for it in Scores), Scores.SOFTMAX.value))
    num_shared = fields.count("num_shared_experts", 0)
    is_average = fields.choice(_COMBINATION, ("average", "sum"), "average") == "average" and num_shared > 0
    scale = 0.5 if is_average else 1.0
    routing = read_routing(
        fields,
        "num_experts",
        scores=scores,
        renormalizes=scores is Scores.SOFTMAX or fields.flag("norm_topk_prob", True),
        scale=scale,
        num_experts_missing=8,
        num_active_missing=2,
    )
    shared = SharedExpertConfig(width * num_shared, scale=scale) if num_shared else None
    return ExpertsConfig(width, routing, read_activation(fields), shared=shared)


KEYS = family_keys(
    f"attention_bias layer_norm_eps logit_scale sliding_window sliding_window_pattern layer_types {KINDS} {_NUM_DENSE} "
    f"{_DENSE_PATTERN} {_DENSE_WIDTH} num_experts num_experts_per_tok num_shared_experts norm_topk_prob "
    f"expert_selection_fn {_COMBINATION}",
    without_effect=f"{WITHOUT_EFFECT} output_router_logits num_nextn_predict_layers",
    refused={
        **REFUSED,
        "rope_scaling": (None,),  # which its class does not apply, unlike rope_parameters
        "transformer_block_type": ("parallel", None),
        "norm_type": ("layer_norm", "rms_norm", None),
    },
)
COHERE2_MOE = Family(
    "cohere2_moe",
    ("Cohere2MoeForCausalLM",),
    read_config,
    KEYS,
    TensorNames(neighbours_are_pairs=True, experts=ExpertNames(shared="mlp.shared_experts")),
    has_more_layers=True,
)
