"""Splits of a model among ranks, and splits that are refused."""

import pytest

from kernels.vocabulary.shape import PLANNED_PHASES, Dtype
from qualification.decision.model_shapes import ServingLimits, shapes_needed, signature_of
from qualification.decision.presets import preset_named
from qualification.model.config import ExpertsConfig, SharedExpertConfig
from qualification.model.families.reader import read_model
from qualification.model.fields import ModelConfigError
from qualification.model.shard import local_heads, shard_of

LLAMA_70B = preset_named("llama-3.1-70b").config
LIMITS = ServingLimits(131072, 8192, 64, Dtype.BF16, Dtype.BF16)


@pytest.mark.parametrize(("world", "heads"), [(1, (64, 8)), (2, (32, 4)), (4, (16, 2)), (8, (8, 1)), (16, (4, 1))])
def test_ranks_of_a_70b_hold_their_heads(world: int, heads: tuple[int, int]) -> None:
    config = read_model(LLAMA_70B)
    shards = [shard_of(config, rank, world) for rank in range(world)]
    assert config.layers[0].attention.num_heads == 64
    for shard in shards:
        attention = shard.local_config.layers[0].attention
        assert (attention.num_heads, attention.num_kv_heads) == heads
    query = [head for shard in shards for head in shard.layers[0].heads.query]
    assert query == list(range(64))
    for shard in shards:  # each query head meets its own KV head
        own = shard.layers[0].heads
        assert {head // 8 for head in own.query} == set(own.kv)
    assert [row for shard in shards for row in shard.vocabulary] == list(range(config.vocab_size))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_shards_of_a_70b_need_shapes_of_their_own(world: int) -> None:
    config = read_model(LLAMA_70B)
    shapes = shapes_needed(signature_of(config, tensor_parallel_size=world), LIMITS)
    assert {(shape.num_heads, shape.num_kv_heads) for shape in shapes} == {(64 // world, max(1, 8 // world))}
    assert {shape.phase for shape in shapes} == set(PLANNED_PHASES)
    assert not set(shapes) & set(shapes_needed(signature_of(config), LIMITS))


@pytest.mark.parametrize(
    ("heads", "world", "message"),
    [
        ((28, 4), 8, "28 query heads cannot be split among 8 ranks"),
        ((24, 6), 4, "6 KV heads cannot be split among 4 ranks"),
    ],
)
def test_heads_that_do_not_divide_are_refused(heads: tuple[int, int], world: int, message: str) -> None:
    values = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 128}
    config = read_model({**preset_named("llama-3.1-8b").config, **values})
    with pytest.raises(ModelConfigError, match=message):
        local_heads(config.layers[0].attention, 0, world)
    with pytest.raises(ModelConfigError, match=message):
        signature_of(config, tensor_parallel_size=world)


def test_each_rank_has_columns_of_every_expert() -> None:
    config = read_model(preset_named("glm-4.5-air").config)
    shards = [shard_of(config, rank, 4) for rank in range(4)]
    assert [len(shard.layers[0].width) for shard in shards] == [2736] * 4  # of a dense layer
    assert [column for shard in shards for column in shard.layers[1].width] == list(range(1408))
    assert [column for shard in shards for column in shard.layers[1].shared] == list(range(1408))
    experts = shards[0].local_config.layers[1].feed_forward
    assert isinstance(experts, ExpertsConfig)
    assert (experts.num_experts, experts.width) == (128, 352)
    assert experts.shared == SharedExpertConfig(352)


def test_a_split_through_a_block_of_mxfp4_is_refused() -> None:
    config = read_model(preset_named("gpt-oss-20b").config)
    assert len(shard_of(config, 1, 2).layers[0].width) == 1440
    with pytest.raises(ModelConfigError, match=r"each of 4 ranks would have 720 columns, and blocks of mxfp4 have 32"):
        shard_of(config, 1, 4)
