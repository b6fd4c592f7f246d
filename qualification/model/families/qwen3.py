"""Qwen 3, dense: every query and key head has its RMSNorm before the rotation; the head dim is its own number."""

from qualification.model.config import ModelConfig, QKNorm
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_like_llama
from qualification.model.windows import read_switched_windows


def read_config(fields: Fields) -> ModelConfig:
    fields.integer("head_dim")  # must be there: it does not follow from the hidden size
    has_bias = fields.flag("attention_bias", False)
    return read_like_llama(
        fields,
        "qwen3",
        attention_bias=has_bias,
        output_bias=has_bias,
        qk_norm=QKNorm.EACH_HEAD,
        windows=read_switched_windows,
    )


KEYS = family_keys("attention_bias sliding_window use_sliding_window max_window_layers layer_types")
# Qwen3Model: without a head, as embedding models are saved.
QWEN3 = Family("qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), read_config, KEYS)
