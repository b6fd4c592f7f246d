"""Models whose layers do not all attend: what is counted of which of them."""

from dataclasses import replace

import pytest

from kernels.linear.epilogue import Epilogue
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.shape import Dtype
from qualification.decision.linear_shapes import linear_shapes_needed
from qualification.decision.model_shapes import signature_of
from qualification.decision.presets import preset_named
from qualification.model.cached_layers import skipping_fp8_cache
from qualification.model.config import (
    ModelConfig,
    RecurrenceConfig,
    StateTensor,
    kv_bytes_per_token,
    num_parameters,
    state_bytes,
)
from qualification.model.families.quantization import rounded_at_load
from qualification.model.families.reader import read_model
from qualification.model.shard import shard_of

PLAIN = read_model(preset_named("llama-3.1-8b").config)
STATE = StateTensor((32, 128, 128), Dtype.FP32), StateTensor((3, 8192), None)


def hybrid(plain: ModelConfig) -> ModelConfig:
    """Every fourth layer attends."""
    recurrence = RecurrenceConfig("a recurrence", STATE, num_parameters=7)
    return replace(
        plain,
        layers=tuple(
            layer if index % 4 == 3 else replace(layer, mixer=recurrence) for index, layer in enumerate(plain.layers)
        ),
    )


def test_keys_values_and_shapes_count_attention_layers_only() -> None:
    config = hybrid(PLAIN)
    assert config.attention_layers == (3, 7, 11, 15, 19, 23, 27, 31)
    assert 4 * kv_bytes_per_token(config, Dtype.BF16, Dtype.BF16) == kv_bytes_per_token(PLAIN, Dtype.BF16, Dtype.BF16)
    assert state_bytes(config, Dtype.BF16) == 24 * (2 * 2**20 + 2 * 3 * 8192)
    assert state_bytes(PLAIN, Dtype.BF16) == 0
    assert (signature_of(config), config.windows) == (signature_of(PLAIN), (None,) * 8)
    shapes = (linear_shapes_needed(it, Dtype.BF16, 128, "cuda") for it in (config, PLAIN))
    assert set.__eq__(*map(set, shapes)), "the layers that attend have products of the same shapes"
    attention = PLAIN.attentions[0]
    of_layer = 2 * PLAIN.hidden_size * (attention.query_size + attention.kv_size)
    assert num_parameters(PLAIN) - num_parameters(config) == 24 * (of_layer - 7)


@pytest.mark.parametrize(
    ("num_ranks", "rounded", "products"),
    [
        (1, False, {16480}),  # 10,240 channels, 6,144 gates of the result, 48 of writing and 48 of decay
        (4, False, {4120}),
        (8, False, {2048, 12}),  # 2,060 results are no multiple of 8
        (1, True, {16384, 96}),
    ],
)
def test_gates_are_made_by_the_first_product_where_they_can(num_ranks: int, rounded: bool, products: set[int]) -> None:
    config = read_model(preset_named("qwen3.5-27b").config)
    whole = rounded_at_load(config) if rounded else config
    own = shard_of(whole, 0, num_ranks).local_config
    recurrent = replace(own, layers=tuple(it for it in own.layers if isinstance(it.mixer, RecurrenceConfig)))
    shapes = linear_shapes_needed(recurrent, Dtype.BF16, 1, "cuda", num_ranks)
    first = {it.size_out for it in shapes if it.size_in == config.hidden_size and it.epilogue is Epilogue.NONE}
    assert first == products


def test_ranks_split_heads_of_the_layers_that_attend() -> None:
    shard = shard_of(hybrid(PLAIN), 1, 2)
    assert [len(layer.heads.query) for layer in shard.layers] == [0, 0, 0, 16] * 8
    assert shard.local_config.recurrences == hybrid(PLAIN).recurrences
    assert {attention.num_kv_heads for attention in shard.local_config.attentions} == {4}


def test_layers_kept_out_of_an_fp8_cache_count_as_the_models() -> None:
    shared = replace(PLAIN.layers[1], mixer=replace(PLAIN.layers[1].attention, reads_keys_of=0, window=64))
    config = replace(PLAIN, layers=(PLAIN.layers[0], shared, *hybrid(PLAIN).layers[2:]))
    found = skipping_fp8_cache(config, ["0"])
    assert [it.skips_fp8_cache for it in found.attentions] == [True, True, *[False] * 8]
    of_each = 2 * PLAIN.attentions[0].num_kv_heads * 128
    assert (
        kv_bytes_per_token(found, Dtype.BF16, FP8) - kv_bytes_per_token(config, Dtype.BF16, FP8) == of_each * 124 // 128
    )


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        (["32"], "32: the model's layers are 0 to 31"),
        (["2"], "2: this layer does not attend"),
        (["-1"], "must be 'sliding_window' or a layer's number"),
        (["sliding_window"], "no layer of this model has a window"),
        (["3", "7", "11", "15", "19", "23", "27", "31"], "every layer that attends is named"),
    ],
)
def test_layers_that_cannot_be_kept_out_are_refused(chosen: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=f"--kv-cache-dtype-skip-layers: .*{why}"):
        skipping_fp8_cache(hybrid(PLAIN), chosen)
