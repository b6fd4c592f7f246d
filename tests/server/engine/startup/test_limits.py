"""Values that the settings leave open, chosen for the model and the device."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.vocabulary.shape import Dtype
from qualification.decision.presets import preset_named
from qualification.model.config import LearnedPositions, ModelConfig, num_parameters
from qualification.model.families.reader import read_model
from qualification.model.families.towers import with_known_tower
from server.engine.startup.limits import choose_device, choose_limits
from server.engine.startup.subject import read_subject
from server.errors import SettingsError
from server.settings import CacheDtype, DeviceChoice, Settings

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(scope="module")
def llama_8b() -> ModelConfig:
    config = read_model(preset_named("llama-3.1-8b").config)
    assert num_parameters(config) == 8_030_261_248
    return config


def of_layers(config: ModelConfig, num_layers: int) -> ModelConfig:
    return replace(config, layers=config.layers[:1] * num_layers)


def interleaved(config: ModelConfig, device: torch.device = CUDA, **settings: int) -> int:
    return choose_limits(Settings(**settings), config, device).max_num_interleaved_tokens


def test_prompt_tokens_beside_streams_depend_on_the_model(
    llama_8b: ModelConfig,
) -> None:
    assert interleaved(llama_8b) == 2048
    assert interleaved(of_layers(llama_8b, 16)) == 3584  # 4.5e9 parameters
    assert interleaved(of_layers(llama_8b, 2)) == 8192  # all that a step takes
    assert interleaved(of_layers(llama_8b, 320)) == 512
    assert interleaved(of_layers(llama_8b, 2), CPU) == 512


def stretched(**scaling: object) -> ModelConfig:
    return read_model(
        {**preset_named("llama-3.1-8b").config, "max_position_embeddings": 32768, "rope_scaling": scaling}
    )


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (stretched(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768), 131072),
        (stretched(rope_type="yarn", factor=4.0), 131072),
        (stretched(rope_type="yarn", factor=2.0, original_max_position_embeddings=8192), 32768),
        (stretched(rope_type="linear", factor=3.0), 98304),
    ],
)
def test_a_stretched_rotation_is_served_beyond_its_positions(config: ModelConfig, longest: int) -> None:
    """The recipe of Qwen 2.5 and 3 for long texts, which leaves max_position_embeddings as it is."""
    assert choose_limits(Settings(), config, CPU).max_model_len == 32768
    assert choose_limits(Settings(max_model_len=longest), config, CPU).max_model_len == longest
    with pytest.raises(SettingsError, match=f"{longest + 1}, the model's positions end at {longest}: "):
        choose_limits(Settings(max_model_len=longest + 1), config, CPU)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"max_num_batched_tokens": 510, "max_num_seqs": 256},
            "max_num_batched_tokens is 510, .* at least 511: .* 256",
        ),
        ({"max_num_interleaved_tokens": 255}, "max_num_interleaved_tokens is 255, .* at least 256: .*--limit-images 0"),
    ],
)
def test_a_step_that_holds_no_whole_image_is_refused(settings: dict[str, int], why: str) -> None:
    given = preset_named("gemma-3-4b").config
    config = with_known_tower(read_model(given), given)
    choose_limits(Settings(max_num_batched_tokens=511, max_num_seqs=256), config, CUDA, 256)
    with pytest.raises(SettingsError, match=why):
        choose_limits(Settings(**settings), config, CUDA, 256)


def test_room_for_less_than_a_tile_is_refused() -> None:
    tower = {"model_type": "internvl_vision", "attention_bias": True}
    text = {**preset_named("qwen3-8b").config}
    given = {"model_type": "internvl", "text_config": text, "vision_config": tower, "tie_word_embeddings": False}
    config = with_known_tower(read_model(given), given)
    choose_limits(Settings(max_image_tokens=256), config, CPU)
    with pytest.raises(SettingsError, match=r"max_image_tokens is 255, it must be at least 256, .*--limit-images 0"):
        choose_limits(Settings(max_image_tokens=255), config, CPU)


def test_a_page_size_that_cuts_a_chunk_of_positions_is_refused(llama_8b: ModelConfig) -> None:
    layers = tuple(replace(it, mixer=replace(it.attention, chunk=96)) for it in llama_8b.layers)
    with pytest.raises(SettingsError, match="page_size is 64, it must divide 96"):
        choose_limits(Settings(page_size=64), replace(llama_8b, layers=layers), CPU)


def test_a_page_beyond_a_sequence_is_refused(llama_8b: ModelConfig) -> None:
    assert choose_limits(Settings(max_model_len=32), llama_8b, CUDA).page_size == 64  # nobody asked for it
    assert choose_limits(Settings(page_size=32, max_model_len=32), llama_8b, CUDA).page_size == 32
    with pytest.raises(SettingsError, match="page_size is 33, it must be at most max_model_len, which is 32: "):
        choose_limits(Settings(page_size=33, max_model_len=32), llama_8b, CUDA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_torch_does_not_see_is_refused() -> None:
    with pytest.raises(SettingsError, match="torch sees no CUDA device here: give this process a GPU, or serve with "):
        choose_device(Settings(device=DeviceChoice.CUDA))


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(SettingsError, match="--tensor-parallel-size is 3, it must be one of 1, 2, 4, 8"):
        read_subject(Settings(tensor_parallel_size=3))


def test_learned_positions_are_not_stretched(llama_8b: ModelConfig) -> None:
    learned = replace(llama_8b, max_position=2048, positions=LearnedPositions(2050, 2))
    assert choose_limits(Settings(), learned, CPU).max_model_len == 2048
    with pytest.raises(SettingsError, match="positions end at 2048: ask for fewer, it has learned no more"):
        choose_limits(Settings(max_model_len=4096), learned, CPU)


def test_what_is_set_stays(llama_8b: ModelConfig) -> None:
    assert interleaved(llama_8b, max_num_interleaved_tokens=100) == 100
    assert interleaved(of_layers(llama_8b, 2), max_num_batched_tokens=4096) == 4096


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(max_num_batched_tokens=128), r"max_num_batched_tokens is 128, .* max_num_seqs, which is 256"),
        (Settings(max_model_len=200_000), "200000, the model's positions end at 131072"),
        (Settings(max_model_len=1), "max_model_len is 1, it must be at least 2"),
    ],
)
def test_a_limit_that_cannot_hold_is_refused(llama_8b: ModelConfig, settings: Settings, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        choose_limits(settings, llama_8b, CUDA)
    assert choose_limits(Settings(max_model_len=2), llama_8b, CUDA).max_model_len == 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"kv_cache_dtype": CacheDtype.FP8},
            r"--kv-cache-dtype is fp8, .* latent attention \(glm4_moe_lite\): no",
        ),
        ({"kv_cache_dtype_skip_layers": "0"}, "--kv-cache-dtype-skip-layers is set, and the KV cache is bf16"),
    ],
)
def test_what_latents_do_not_have_is_refused_by_name(settings: dict[str, Any], why: str) -> None:
    config = read_model(preset_named("glm-4.7-flash").config)
    with pytest.raises(SettingsError, match=why):
        choose_limits(Settings(**settings), config, CUDA)


def test_a_file_that_asks_for_latents_of_8_bits_is_served_in_16(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(read_model(preset_named("glm-4.7-flash").config), caches_fp8=True)
    assert choose_limits(Settings(), config, CUDA).kv_dtype is Dtype.BF16
    assert any("bf16, though config.json asks for fp8, which cannot be with latent" in it for it in caplog.messages)
