"""The text part of Muse Glimmer: norms before and after, heads normed without a weight and gated in each dimension.

Each fourth layer, counted from the last, has no window and rotates nothing. Embeddings are normed without a weight, and
the norms behind sublayers have an epsilon of their own.
"""

import math
from dataclasses import replace

from kernels.fused.head_gate_kind import GateFunction
from qualification.model.config import AttentionGate, ModelConfig, NormsConfig, QKNorm
from qualification.model.families import gemma2
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import plain_ropes, read_dense, read_like_llama, without_rotation
from qualification.model.windows import Windows, read_num_layers, read_windows_of

_THETAS, _PERIOD = "layer_rope_theta", 4


def read_config(fields: Fields) -> ModelConfig:
    has_bias, factor = fields.flag("attention_bias", False), fields.number("qk_scale_factor", 3.87)
    model = read_like_llama(
        fields.or_else(head_dim=128, max_position_embeddings=131_072),
        "muse_glimmer_text",
        norm_eps=1e-5,
        norms=NormsConfig(before=True, after=True),
        windows=_read_windows,
        rope=plain_ropes,
        qk_norm=QKNorm.EACH_HEAD_UNWEIGHTED,
        scale=lambda _, head_dim: factor / math.sqrt(head_dim),
        attention_bias=has_bias,
        output_bias=has_bias,
        gate=AttentionGate(GateFunction.SIGMOID, by_dimension=True),
        feed_forward=lambda it: read_dense(it, field="hidden_activation"),
    )
    return replace(
        without_rotation(model, _read_unrotated(fields, model.attentions[0].rope.theta)),
        zero_centred_norms=True,
        zero_centred_final_norm=False,
        norms_embedding=True,
        eps_after=fields.number("post_norm_eps", 1e-8),
        logits_divisor=1 / fields.number("output_multiplier", 0.19611613513818404),
        logits_softcap=fields.number("final_logit_softcapping", 20.0),
    )


def _is_full(layer: int, num_layers: int) -> bool:
    return (num_layers - 1 - layer) % _PERIOD == 0


def _read_windows(fields: Fields) -> Windows:
    num_layers = read_num_layers(fields)
    window = fields.integer_or_none("sliding_window", 2048)
    return read_windows_of(fields, window, lambda layer: not _is_full(layer, num_layers))


def _read_unrotated(fields: Fields, theta: float) -> frozenset[int]:
    """Return the layers whose base is 0; any other one is that of all layers, as the family's class rotates them."""
    num_layers, given = read_num_layers(fields), fields.given(_THETAS)
    if given is None:
        return frozenset(layer for layer in range(num_layers) if _is_full(layer, num_layers))
    if not isinstance(given, list) or len(given) != num_layers or not {*given} <= {0, theta}:
        fields.refuse(_THETAS, f"a list of {num_layers} numbers that are 0 or rope_theta ({theta:g})")
    return frozenset(layer for layer, base in enumerate(given) if base == 0)


KEYS = family_keys(
    "attention_bias hidden_activation layer_types sliding_window qk_scale_factor post_norm_eps output_multiplier "
    f"final_logit_softcapping {_THETAS}",
    without_effect="hidden_act",
)
MUSE_GLIMMER_TEXT = Family(
    "muse_glimmer_text", (), read_config, KEYS, replace(gemma2.TENSORS, attention_gate="self_attn.gate_proj")
)
