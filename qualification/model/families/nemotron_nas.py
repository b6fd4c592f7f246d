"""Llama-Nemotron (Super, Ultra): a Llama whose layers a search has made unlike: block_configs says what each has.

A layer may have no attention, or no feed-forward, or neither; others have KV heads and a width of their own.
"""

from collections.abc import Collection
from dataclasses import replace

from kernels.fused.activation_kind import Activation
from qualification.model.config import DenseConfig, LayerConfig, ModelConfig
from qualification.model.families.family import Family
from qualification.model.fields import Fields
from qualification.model.keys import family_keys
from qualification.model.shared import read_activation, read_like_llama
from qualification.model.windows import read_num_layers

_BLOCKS, _ABSENT, _GROUP, _WIDTH = "block_configs", "no_op", "n_heads_in_group", "ffn_mult"
_WIDTH_STEP = 256  # every width is a multiple of it


def read_config(fields: Fields) -> ModelConfig:
    blocks = fields.sections(_BLOCKS, read_num_layers(fields))
    activation, has_bias = read_activation(fields), fields.flag("attention_bias", False)
    mlp_bias, hidden_size = fields.flag("mlp_bias", False), fields.integer("hidden_size")
    fed = [_read_feed_forward(block, hidden_size, activation, has_bias=mlp_bias) for block in blocks]
    model = read_like_llama(
        fields,
        "nemotron-nas",
        attention_bias=has_bias,
        output_bias=has_bias,
        feed_forward=lambda _: DenseConfig(1, activation),  # each layer's own takes its place
    )
    num_heads = fields.integer("num_attention_heads")
    counts = [_read_num_kv_heads(block, num_heads) for block in blocks]
    if not any(counts):
        fields.refuse(_BLOCKS, "such that a layer attends")

    def layer(whole: LayerConfig, count: int | None, own: DenseConfig | None) -> LayerConfig:
        mixer = None if count is None else replace(whole.attention, num_kv_heads=count)
        return replace(whole, mixer=mixer, feed_forward=own)

    return replace(model, layers=tuple(map(layer, model.layers, counts, fed)))


def _read_num_kv_heads(block: Fields, num_heads: int) -> int | None:
    """Return the KV heads of a layer; None of one that does not attend."""
    attention = _section(block, "attention", (_GROUP, _ABSENT))
    if attention.flag(_ABSENT, False):
        return None
    group = attention.integer(_GROUP)
    if num_heads % group:
        attention.refuse(_GROUP, f"a divisor of num_attention_heads ({num_heads})")
    return num_heads // group


def _read_feed_forward(
    block: Fields, hidden_size: int, activation: Activation, *, has_bias: bool
) -> DenseConfig | None:
    """Return a layer's feed-forward: as wide as two thirds of ffn_mult times the model, and up to a multiple."""
    fed = _section(block, "ffn", (_WIDTH, _ABSENT))
    if fed.flag(_ABSENT, False):
        return None
    width = int(2 * fed.number(_WIDTH) * hidden_size / 3)
    return DenseConfig(-(-width // _WIDTH_STEP) * _WIDTH_STEP, activation, has_bias)


def _section(block: Fields, name: str, read: Collection[str]) -> Fields:
    """Return a part of a block. Whatever else it asks for (a linear map, a window, sinks) is refused by name."""
    found = block.section(name)
    if found is None:
        block.refuse(name, "an object")
    for key in found.names:
        if key not in read and found.given(key) not in (None, False):
            found.refuse(key, f"absent, null or false (what it asks for is not supported; {', '.join(read)} are read)")
    return found


KEYS = family_keys(f"{_BLOCKS} attention_bias mlp_bias")
NEMOTRON_NAS = Family("nemotron-nas", ("DeciLMForCausalLM",), read_config, KEYS)
