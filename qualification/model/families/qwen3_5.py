"""Qwen 3.5, 3.6 and 3.8, dense and with experts: the layers of Qwen 3 Next, each of their products a tensor of its own.

Positions of text are three times the same. The text part of a model that also sees images has the same fields as a
model of text alone, and its names one word more.
"""

from functools import partial

from qualification.model.config import ModelConfig, QKNorm
from qualification.model.families.family import ExpertNames, Family, RecurrenceNames, TensorNames
from qualification.model.families.qwen3_next import (
    MISSING,
    RECURRENT_KEYS,
    read_attending_layers,
    read_gated_delta,
    read_partial_rope,
    with_recurrences,
)
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_qwen_mixtures
from qualification.model.shared import read_like_llama


def read_config(fields: Fields) -> ModelConfig:
    fields = fields.or_else(**{**MISSING, "num_key_value_heads": 4, "intermediate_size": 12_288})
    return _read(fields, "qwen3_5_text", has_experts=False)


def read_config_of_experts(fields: Fields) -> ModelConfig:
    return _read(fields.or_else(**MISSING), "qwen3_5_moe_text", has_experts=True)


def _read(fields: Fields, family: str, *, has_experts: bool) -> ModelConfig:
    has_bias = fields.flag("attention_bias", False)
    experts = partial(read_qwen_mixtures, num_experts=256, num_active=8, width=512, shared_width=512)
    model = read_like_llama(
        fields,
        family,
        attention_bias=has_bias,
        output_bias=has_bias,
        qk_norm=QKNorm.EACH_HEAD,
        rope=read_partial_rope,
        feed_forwards=experts if has_experts else None,
    )
    mixer = read_gated_delta(fields, num_key_heads=16, num_value_heads=32, dim=128)
    return with_recurrences(model, read_attending_layers(fields, model.num_layers), mixer)


_REFUSED: dict[str, tuple[object, ...]] = {
    "attn_output_gate": (True, None),
    "output_gate_type": ("swish", "silu", None),
    "mtp_use_dedicated_embeddings": (False, None),
}
# The layer that predicts a second token is not read; language_model_only is of files that have dropped the images.
_WITHOUT_EFFECT = "mtp_num_hidden_layers mtp_layer_types language_model_only"
KEYS = family_keys(RECURRENT_KEYS, without_effect=_WITHOUT_EFFECT, refused={**_REFUSED, "mlp_only_layers": ([], None)})
KEYS_OF_EXPERTS = family_keys(
    f"{RECURRENT_KEYS} moe_intermediate_size shared_expert_intermediate_size num_experts num_local_experts "
    "num_experts_per_tok",
    without_effect=f"{_WITHOUT_EFFECT} output_router_logits router_aux_loss_coef",
    refused={
        **_REFUSED,
        "mlp_only_layers": ([], None),
        "decoder_sparse_step": (1, None),
        "norm_topk_prob": (True, None),
    },
)
TENSORS = TensorNames(recurrence=RecurrenceNames())
QWEN3_5 = Family("qwen3_5_text", ("Qwen3_5ForCausalLM",), read_config, KEYS, TENSORS, not_read=("mtp.",))
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    ("Qwen3_5MoeForCausalLM",),
    read_config_of_experts,
    KEYS_OF_EXPERTS,
    TensorNames(experts=ExpertNames(router_is_plain=True), recurrence=RecurrenceNames()),
    not_read=("mtp.",),
)
