"""gpt-oss: sinks, a window in every other layer, and experts. Read for its attention only."""

from functools import partial

from qualification.model.config import ExpertsConfig, ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.shared import read_like_llama
from qualification.model.windows import read_alternating_windows


def read_config(fields: Fields) -> ModelConfig:
    return read_like_llama(
        fields.or_else(head_dim=64, max_position_embeddings=131_072, vocab_size=201_088),
        "gpt_oss",
        norm_eps=1e-5,
        windows=partial(read_alternating_windows, missing=128),
        has_sinks=True,
        attention_bias=True,
        output_bias=True,
        feed_forward=_read_experts,
    )


def _read_experts(fields: Fields) -> ExpertsConfig:
    return ExpertsConfig(
        fields.integer("intermediate_size", 2880),
        num_experts=fields.integer("num_local_experts", 128),
        num_active=fields.integer("num_experts_per_tok", 4),
    )


GPT_OSS = Family("gpt_oss", ("GptOssForCausalLM",), read_config, tensors=None)
