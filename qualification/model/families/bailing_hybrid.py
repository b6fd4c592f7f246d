"""Ling and Ring 2.5 and 2.6 (BailingMoeV2_5): lightning attention, and latent attention in the last layer of a group.

The mixtures are Ling 2.0's. Source: modeling_bailing_moe_v2_5.py of github.com/inclusionAI/Ring-V2.5. By it layer i of
n, counted from 0, has the slopes of ALiBi times 1 - (i - 1) / (n - 1) + 1e-5, so that those of layer 0 are larger than
ALiBi's; vLLM and SGLang, whose layers have i in place of i - 1, decay more slowly. Ling 3.0, of the same model_type, is
another model, which is refused by the name of its class.
"""

import math
from dataclasses import replace
from functools import partial

from kernels.recurrence.sizes import RecurrenceSizes
from qualification.model.config import LayerConfig, ModelConfig, RopeConfig
from qualification.model.families.bailing_moe_v2 import KEYS as MIXTURE_KEYS
from qualification.model.families.bailing_moe_v2 import MISSING, read_experts
from qualification.model.families.family import ExpertNames, Family, RecurrenceNames, TensorNames
from qualification.model.families.latent import READ, WITHOUT_EFFECT, read_latent
from qualification.model.fields import Fields
from qualification.model.gated_delta import FixedDecayRule, GatedDeltaConfig
from qualification.model.keys import family_keys
from qualification.model.latent import LatentSizes
from qualification.model.mixtures import read_mixtures_behind
from qualification.model.rope import rope_section
from qualification.model.windows import read_num_layers

_SIZES = LatentSizes(latent=512, rotated=64, plain=128, value=128, query_latent=None)
_MOST_DIM = 256
_ROTATED, _SHARE, _HEADS = "rotary_dim", "partial_rotary_factor", "num_kv_heads_for_linear_attn"
_GROUP, _NORM_GROUPS = "layer_group_size", "group_norm_size"
_MISSING: dict[str, object] = {  # as its class has them
    **{name: MISSING[name] for name in ("head_dim", "rope_theta", "max_position_embeddings", "n_group", "topk_group")},
    "vocab_size": 157_184, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20,
    "num_attention_heads": 16,
}  # fmt: skip


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(**_MISSING)
    num_heads = fields.integer("num_attention_heads")
    model = read_latent(
        fields.changed(num_key_value_heads=num_heads),  # which its class makes of latents, whatever the field says
        "bailing_hybrid",
        sizes=_SIZES,
        norm_eps=1e-6,
        feed_forwards=partial(read_mixtures_behind, read_experts=read_experts, num_dense_missing=1),
    )
    num_layers, attends = model.num_layers, _read_attending(fields)
    rope = _read_rope(fields, model.attentions[0].rope)
    slopes = alibi_slopes(num_heads)
    rule, sizes = _read_rule(fields, rope, slopes)

    def layer(index: int, whole: LayerConfig) -> LayerConfig:
        if attends[index]:
            return whole
        factor = 1 - (index - 1) / (num_layers - 1) + 1e-5
        own = replace(rule, slopes=tuple(factor * it for it in slopes))
        return replace(whole, mixer=GatedDeltaConfig.of(sizes, model.hidden_size, fixed=own))

    return replace(model, layers=tuple(layer(*it) for it in enumerate(model.layers)))


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return 2^(-8 i / n) of heads 1 to n of a power of two; of other counts, every second one of the next power too.

    Source: Press et al. 2022 (ALiBi), section 3, and its code for counts that are no power of two.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = tuple(2.0 ** (-8 * (head + 1) / power) for head in range(power))
    between = (2.0 ** (-8 * (head + 1) / (2 * power)) for head in range(0, 2 * power, 2))
    return slopes + tuple(slope for _, slope in zip(range(num_heads - power), between, strict=False))


def _read_attending(fields: Fields) -> tuple[bool, ...]:
    """Read which layers attend by latents: the last one of each group, and those behind the last whole group."""
    num_layers, size = read_num_layers(fields), fields.integer(_GROUP, 5)
    return tuple((it + 1) % size == 0 or it >= num_layers // size * size for it in range(num_layers))


def _read_rope(fields: Fields, whole: RopeConfig) -> RopeConfig:
    """Read the rotation of lightning attention: that of latents, of as many numbers of a head. Raises a refusal."""
    head_dim, size = fields.integer("head_dim"), fields.integer("qk_rope_head_dim", _SIZES.rotated)
    rope = rope_section(fields) or Fields({}, fields.source)
    if int(rope.number(_SHARE, fields.number(_SHARE, 0.5)) * head_dim) != size:
        (rope if rope.has(_SHARE) else fields).refuse(
            _SHARE, f"such that qk_rope_head_dim ({size}) of head_dim ({head_dim}) are rotated in all layers"
        )
    if fields.integer(_ROTATED, size) != size:
        fields.refuse(_ROTATED, f"qk_rope_head_dim ({size}), which is rotated in all layers")
    return replace(whole, rotated_share=size / head_dim)


def _read_rule(fields: Fields, rope: RopeConfig, slopes: tuple[float, ...]) -> tuple[FixedDecayRule, RecurrenceSizes]:
    num_heads, dim = len(slopes), fields.integer("head_dim", most=_MOST_DIM)
    if fields.count(_HEADS, num_heads) not in (0, num_heads):
        fields.refuse(_HEADS, f"num_attention_heads ({num_heads}), as its class has it, or 0")
    num_groups = fields.integer(_NORM_GROUPS, 4)
    if num_heads * dim % num_groups:
        fields.refuse(_NORM_GROUPS, f"a divisor of num_attention_heads times head_dim ({num_heads * dim})")
    rule = FixedDecayRule(slopes, rope, num_groups, norms_heads=fields.flag("use_qk_norm", True))
    return rule, RecurrenceSizes(num_heads, num_heads, dim, dim, 1)


KEYS = family_keys(
    f"{READ} {_GROUP} {_NORM_GROUPS} {_ROTATED} {_HEADS} use_qk_norm moe_intermediate_size first_k_dense_replace "
    "moe_shared_expert_intermediate_size num_experts num_experts_per_tok num_shared_experts n_group topk_group "
    "routed_scaling_factor",
    without_effect=f"{WITHOUT_EFFECT} {' '.join(sorted(MIXTURE_KEYS.without_effect))} router_aux_loss_coef",
    # What its class does whatever these say, or has not; the last ones are Ling 3.0's.
    refused={
        **{name: MIXTURE_KEYS.refused[name] for name in ("norm_topk_prob", "score_function", "norm_head")},
        "moe_router_enable_expert_bias": (True, None),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
        "rope_interleave": (True, None),
        "use_qkv_bias": (False, None),
        "use_bias": (False, None),
        "attention_bias": (False, None),
        "linear_silu": (False, None),
        "use_linear_silu": (False, None),
        "linear_rope": (True, None),
        "lightning_layerwise_decay": (True, None),
        "layer_types": (None,),
        "use_mla_nope": (False, None),
        "short_conv_kernel_size": (None,),
        "kda_lower_bound": (None,),
    },
)
TENSORS = TensorNames(
    neighbours_are_pairs=True,
    attention="attention",
    attention_output="attention.dense",
    q_norm="attention.query_layernorm",
    k_norm="attention.key_layernorm",
    experts=ExpertNames(shared="mlp.shared_experts", correction="mlp.gate.expert_bias", router_is_plain=True),
    recurrence=RecurrenceNames("attention"),
)
BAILING_HYBRID = Family(
    "bailing_hybrid",
    ("BailingMoeV2_5ForCausalLM",),
    read_config,
    KEYS,
    TENSORS,
    tolerated=("rotary_emb.inv_freq", "attention.slope"),
    has_more_layers=True,
    renamed={"model.word_embeddings.": "model.embed_tokens."},
)
