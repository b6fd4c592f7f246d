"""gpt-oss: sinks, a window in every other layer, biases everywhere, and experts of 4 bits with a clamped activation."""

from functools import partial

from kernels.experts.kinds import MXFP4_BLOCK, ClampedSwiglu, ExpertFormat
from qualification.model.config import ExpertsConfig, ModelConfig, RopeConfig, RopeKind
from qualification.model.families.family import ExpertLayout, ExpertNames, Family, TensorNames
from qualification.model.families.quantization_keys import OF_METHOD, check_keys
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.mixtures import read_routing
from qualification.model.rope import rope_section
from qualification.model.shared import plain_ropes, read_like_llama
from qualification.model.windows import read_alternating_windows

TENSORS = TensorNames(experts=ExpertNames("mlp.router", layout=ExpertLayout.INTERLEAVED))
_QUANTIZATION = "quantization_config"


def read_config(fields: Fields) -> ModelConfig:
    has_bias = fields.flag("attention_bias", True)
    return read_like_llama(
        fields.or_else(head_dim=64, max_position_embeddings=131_072, vocab_size=201_088, rope_theta=150_000.0),
        "gpt_oss",
        norm_eps=1e-5,
        windows=partial(read_alternating_windows, missing=128),
        rope=_read_rope,
        has_sinks=True,
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=_read_experts,
    )


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    if rope_section(fields) is not None or fields.has("rope_parameters"):
        return plain_ropes(fields, head_dim)
    # As its class has it where config.json says nothing.
    given = {"rope_type": RopeKind.YARN.value, "factor": 32.0, "truncate": False}
    return plain_ropes(fields.or_else(rope_scaling={**given, "original_max_position_embeddings": 4096}), head_dim)


def _read_experts(fields: Fields) -> ExpertsConfig:
    fields.choice("hidden_act", ("silu",), "silu")  # a word for the clamped one
    width = fields.integer("intermediate_size", 2880)
    routing = read_routing(
        fields, "num_local_experts", renormalizes=True, num_experts_missing=128, num_active_missing=4
    )
    activation = ClampedSwiglu(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    return ExpertsConfig(
        width, routing, activation, has_bias=True, has_router_bias=True, format=_read_format(fields, width)
    )


def _read_format(fields: Fields, width: int) -> ExpertFormat:
    quantization = fields.section(_QUANTIZATION)
    if quantization is None:
        return ExpertFormat.PLAIN
    quantization.choice("quant_method", ("mxfp4",))
    check_keys(quantization, OF_METHOD["mxfp4"], "a file of mxfp4")
    if fields.integer("hidden_size") % MXFP4_BLOCK:
        fields.refuse("hidden_size", f"a multiple of {MXFP4_BLOCK}, the numbers in a block of mxfp4")
    if width % MXFP4_BLOCK:
        fields.refuse("intermediate_size", f"a multiple of {MXFP4_BLOCK}, the numbers in a block of mxfp4")
    return ExpertFormat.MXFP4


KEYS = family_keys(
    "attention_bias layer_types sliding_window num_local_experts num_experts_per_tok swiglu_alpha swiglu_limit",
    without_effect="experts_per_token initial_context_length output_router_logits router_aux_loss_coef",
)
GPT_OSS = Family("gpt_oss", ("GptOssForCausalLM",), read_config, KEYS, TENSORS, has_quantization=True)
