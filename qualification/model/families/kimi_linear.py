"""Kimi Linear (48B-A3B): Kimi Delta Attention, and in every fourth layer latent attention that sees no positions.

The mixtures are DeepSeek V3's behind a first dense layer. Files have names of their own for some fields, beside which
transformers takes its own ones.
"""

from dataclasses import replace

from kernels.experts.kinds import Scores
from kernels.recurrence.sizes import RecurrenceSizes
from qualification.model.config import ExpertsConfig, FeedForward, ModelConfig, RopeConfig, RopeKind
from qualification.model.families.family import ExpertNames, Family, RecurrenceNames, TensorNames
from qualification.model.families.latent import READ, read_latent
from qualification.model.fields import Fields
from qualification.model.gated_delta import GatedDeltaConfig
from qualification.model.keys import family_keys
from qualification.model.latent import LatentSizes
from qualification.model.mixtures import KINDS, read_deepseek_experts, read_mixtures_by_kind
from qualification.model.windows import read_num_layers

_SIZES = LatentSizes(latent=512, rotated=64, plain=128, value=128, query_latent=None)
_FULL, _RECURRENT = "full_attention", "linear_attention"
_SECTION, _LISTS = "linear_attn_config", ("full_attn_layers", "kda_layers")
_DIM, _HEADS, _WIDTH = 128, 32, 4  # of the recurrence, as its class has them
_MOST_DIM, _MOST_WIDTH = 256, 8
# Names of transformers, and those of the files.
_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_OTHER = {"n_routed_experts": ("num_local_experts",)}
# As its class has them where the fields are missing.
_MISSING: dict[str, object] = {
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "max_position_embeddings": 1_048_576,
    "n_group": 1,
    "topk_group": 1,
}


def read_config(fields: Fields) -> ModelConfig:
    fields = _named(fields).or_else(**_MISSING)
    model = read_latent(
        fields,
        "kimi_linear",
        sizes=_SIZES,
        norm_eps=1e-5,
        feed_forwards=_read_feed_forwards,
        rope=lambda *_: RopeConfig(1.0, RopeKind.NONE),
    )
    mixer, attends = _read_mixer(fields), _read_attending(fields)
    layers = (
        layer if is_attending else replace(layer, mixer=mixer)
        for layer, is_attending in zip(model.layers, attends, strict=True)
    )
    return replace(model, layers=tuple(layers))


def _named(fields: Fields) -> Fields:
    """Return fields by the names of other families. Raises ModelConfigError where two names have two values."""
    found: dict[str, object] = {}
    for name, published in _NAMES.items():
        given = {it: fields.given(it) for it in (published, name, *_OTHER.get(name, ())) if fields.has(it)}
        for other, value in given.items():
            if value != found.setdefault(name, value):
                fields.refuse(other, f"{found[name]}, as {next(iter(given))}, or missing")
    if _NAMES["norm_topk_prob"] in fields.names:
        found.setdefault("norm_topk_prob", None)  # which is false, and not missing
    return fields.changed(**found)


def _read_feed_forwards(fields: Fields) -> tuple[FeedForward, ...]:
    num_dense = fields.count("first_k_dense_replace", 1)
    return read_mixtures_by_kind(fields, _read_experts, num_dense_missing=num_dense)


def _read_experts(fields: Fields) -> ExpertsConfig:
    return read_deepseek_experts(fields, scores=Scores.SIGMOID, scale=2.446, width=1024, num_experts=256, num_active=8)


def _read_mixer(fields: Fields) -> GatedDeltaConfig:
    """Read the layers that do not attend; the section of the files is before the fields of transformers."""
    section = fields.section(_SECTION) or Fields({}, fields.source)
    section.only("head_dim", "num_heads", "short_conv_kernel_size", *_LISTS)
    dim = section.integer("head_dim", fields.integer("linear_head_dim", _DIM), most=_MOST_DIM)
    heads = section.integer("num_heads", fields.integer("linear_num_heads", _HEADS))
    width = fields.integer("linear_conv_kernel_dim", _WIDTH)
    width = section.integer("short_conv_kernel_size", width, most=_MOST_WIDTH)
    sizes = RecurrenceSizes(heads, heads, dim, dim, width)
    return GatedDeltaConfig.of(sizes, fields.integer("hidden_size"), has_channel_decays=True)


def _read_attending(fields: Fields) -> tuple[bool, ...]:
    """Read which layers attend: by layer_types, else by two lists that count from 1. Raises ModelConfigError."""
    num_layers, section = read_num_layers(fields), fields.section(_SECTION)
    if fields.has("layer_types"):
        found = tuple(it == _FULL for it in fields.choices("layer_types", (_FULL, _RECURRENT), num_layers))
    elif section is not None and all(section.has(it) for it in _LISTS):
        full, recurrent = (section.given(it) for it in _LISTS)
        numbers = [*full, *recurrent] if isinstance(full, list) and isinstance(recurrent, list) else []
        if any(type(it) is not int for it in numbers) or sorted(numbers) != [*range(1, num_layers + 1)]:
            section.refuse(_LISTS[0], f"a list which with {_LISTS[1]} has each number from 1 to {num_layers} once")
        assert isinstance(full, list), "it was checked above"
        found = tuple(layer + 1 in full for layer in range(num_layers))
    else:
        found = tuple(layer > 0 and layer % 4 == 0 for layer in range(num_layers))
    if not any(found):
        fields.refuse("layer_types", f"such that a layer is {_FULL}: prompts are cached by the pages of such layers")
    return found


KEYS = family_keys(
    f"{READ} {' '.join(_NAMES)} {' '.join(_NAMES.values())} num_local_experts {_SECTION} {KINDS} layer_types "
    "linear_head_dim linear_num_heads linear_conv_kernel_dim first_k_dense_replace moe_intermediate_size topk_group "
    "routed_scaling_factor",
    # No layer rotates anything, whatever the fields of rotations say; a head's size follows from others.
    without_effect="qk_head_dim head_dim num_nextn_predict_layers output_router_logits rope_theta rope_scaling "
    "rope_parameters",
    refused={
        "quantization_config": (None,),
        "attention_bias": (False, None),
        "mla_use_nope": (True,),
        "moe_layer_freq": (1, None),
        "moe_router_activation_func": ("sigmoid",),
        "use_grouped_topk": (True,),
    },
)
TENSORS = TensorNames(
    experts=ExpertNames(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        gate="w1",
        up="w3",
        down="w2",
        shared="block_sparse_moe.shared_experts",
        router_is_plain=True,
    ),
    recurrence=RecurrenceNames("self_attn", is_apart=True),
)
KIMI_LINEAR = Family("kimi_linear", ("KimiLinearForCausalLM",), read_config, KEYS, TENSORS)
