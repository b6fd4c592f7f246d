"""config.json to ModelConfig: both of transformers' forms, defaults, and refusals that name the field."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kernels.vocabulary.shape import Dtype
from qualification.model.config import (
    DenseConfig,
    ModelConfig,
    RopeConfig,
    RopeKind,
    kv_bytes_per_token,
)
from server.errors import ModelError
from server.model.load.load import load_config

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def write(folder: Path, changes: Mapping[str, object], generation: Mapping[str, object] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps({**MINIMAL, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def rope_of(folder: Path, changes: Mapping[str, object]) -> RopeConfig:
    return load_config(write(folder, changes)).layers[0].attention.rope


def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
    """Return the biases of queries, keys and values; of attention's output; of the feed-forward."""
    layer = config.layers[0]
    assert isinstance(layer.feed_forward, DenseConfig)
    return layer.attention.has_bias, layer.attention.has_output_bias, layer.feed_forward.has_bias


def test_a_wrong_end_token_is_named_with_its_own_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"/generation_config.json: eos_token_id must be .* found 1000000"):
        load_config(write(tmp_path, {}, {"eos_token_id": 1_000_000}))
    with pytest.raises(ModelError, match=r"/config.json: eos_token_id must be .* found .*1000000"):
        load_config(write(tmp_path, {"eos_token_id": 1_000_000}, {"eos_token_id": 1}))


def test_half_of_a_surrogate_pair_is_no_text_of_a_file(tmp_path: Path) -> None:
    load_config(write(tmp_path, {"_name_or_path": "\U0001f600"}))
    with pytest.raises(ModelError, match=r"/config.json: cannot be read as JSON: .* surrogates not allowed"):
        load_config(write(tmp_path, {"_name_or_path": "\ud83d"}))


def test_what_is_absent_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, {}))
    attention = config.layers[0].attention
    assert (attention.num_kv_heads, attention.head_dim, config.norm_eps) == (4, 8, 1e-6)
    assert (config.tie_embeddings, *biases(config)) == (False,) * 4
    assert attention.rope == RopeConfig(10_000.0)
    assert config.windows == (None, None, None)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (None, (), "float32")


def test_what_is_given_is_taken(tmp_path: Path) -> None:
    given = {"num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    config = load_config(write(tmp_path, {**given, "attention_bias": True, "mlp_bias": True, "bos_token_id": 3}))
    attention = config.layers[0].attention
    assert (attention.num_kv_heads, attention.head_dim, config.norm_eps) == (2, 10, 1e-5)
    assert (config.tie_embeddings, *biases(config)) == (True,) * 4
    assert config.bos_token_id == 3


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_dtype_is_read_in_both_forms(field: str, tmp_path: Path) -> None:
    assert load_config(write(tmp_path, {field: "bfloat16"})).dtype == "bfloat16"


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_the_old_and_the_new_form_of_a_rotation_are_the_same(kind: str, tmp_path: Path) -> None:
    old = rope_of(tmp_path, {"rope_theta": 500.0, "rope_scaling": {kind: "llama3", **LLAMA3}})
    new = rope_of(tmp_path, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}})
    assert old == new == RopeConfig(500.0, RopeKind.LLAMA3, 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)


def test_an_empty_scaling_is_none(tmp_path: Path) -> None:
    assert rope_of(tmp_path, {"rope_theta": 500.0, "rope_scaling": None}) == RopeConfig(500.0)


def test_an_empty_scaling_leaves_the_new_form(tmp_path: Path) -> None:
    changes = {"rope_scaling": {}, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    assert rope_of(tmp_path, changes) == RopeConfig(500.0)


@pytest.mark.parametrize(("name", "message"), [
    ("hf_quant_config.json", "quant_algo must be one of FP8, .* found nothing"),
    ("quantize_config.json", "the checkpoint is quantised, and .*config.json has no quantization_config"),
    ("quant_config.json", "the checkpoint is quantised, and .*config.json has no quantization_config"),
])  # fmt: skip
def test_a_file_of_quantisation_is_named(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=f"{name}: {message}"):
        load_config(write(tmp_path, {}))


def test_keys_that_no_family_knows_are_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = {"transformers_version": "4.57.1", "_name_or_path": "x", "id2label": {}, "use_cache": True}
    load_config(write(tmp_path, known))
    assert not caplog.messages
    load_config(write(tmp_path, {**known, "dual_chunk_attention_config": {}, "sliding_window": 7}))
    (line,) = caplog.messages
    assert line.endswith("config.json: not known for llama, and not read: dual_chunk_attention_config, sliding_window")


def test_the_original_context_defaults_to_the_models_own(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert rope_of(tmp_path, {"rope_scaling": scaling}).original_max_position == 128
    beside = {"rope_scaling": scaling, "original_max_position_embeddings": 32}
    assert rope_of(tmp_path, beside).original_max_position == 32


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(2, None, (2,)), ([2, 5], None, (2, 5)), (2, [7, 2], (2, 7)), (None, 9, (9,)), ([4], [], (4,)), (None, None, ())],
)
def test_end_tokens_of_both_files_are_joined(
    in_config: object, in_generation: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write(tmp_path, {"eos_token_id": in_config}, {"eos_token_id": in_generation})
    assert load_config(folder).eos_token_ids == expected


@pytest.mark.parametrize(("text", "expected"), [("<|im_end|>", (2, 9, 7)), ("<|far|>", (2, 9)), ("<|none|>", (2, 9))])
def test_the_tokenizers_own_end_token_ends_answers_too(text: str, expected: tuple[int, ...], tmp_path: Path) -> None:
    folder = write(tmp_path, {"eos_token_id": 2}, {"eos_token_id": 9})
    added = [{"id": 7, "content": "<|im_end|>"}, {"id": 97, "content": "<|far|>"}]  # the model has 97 rows
    model = {"type": "WordLevel", "vocab": {str(i): i for i in range(7)}, "unk_token": "0"}
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {"version": "1.0", "model": model, "added_tokens": [flags | token for token in added]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": text}))
    assert load_config(folder).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "rwkv"},
            r"'rwkv' \(LlamaForCausalLM\) is not supported; nearest: llama \(LlamaForCausalLM\), llama4 .*; `hall",
        ),
        ({"model_type": None}, "model_type None .* is not supported"),
        (
            {"model_type": "qwen4", "architectures": ["Qwen4ForCausalLM"]},
            r"'qwen4' \(Qwen4ForCausalLM\) is not supported; nearest: qwen3 \(Qwen3ForCausalLM\), qwen2 ",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "supported: LlamaForCausalLM"),
        ({"hidden_size": None}, "hidden_size must be a positive integer"),
        ({"num_attention_heads": None}, "num_attention_heads must be a positive integer, found None"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be a positive integer, found '4'"),
        ({"head_dim": 0}, "head_dim must be a positive integer, found 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, found 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, found 1000000000"),
        ({"vocab_size": 10**400}, "vocab_size must be at most 2147483647, found 1000"),
        ({"eos_token_id": None, "rope_theta": 10**400}, "rope_theta must be a positive number, found 1000"),
        ({"vocab_size": "97"}, "vocab_size must be a positive integer, found '97'"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must be a divisor of num_attention_heads \(4\), found 3"),
        ({"hidden_size": 30}, "hidden_size must be a multiple of num_attention_heads"),
        ({"head_dim": 9}, "head_dim must be even"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of silu, swish, found 'gelu'"),
        ({"mlp_bias": 1}, "mlp_bias must be true or false, found 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"eos_token_id": 97}, r"eos_token_id must be a token id below vocab_size \(97\)"),
        ({"dtype": "float8_e4m3fn"}, "dtype must be one of bfloat16, float16, float32"),
        ({"quantization_config": {"bits": 4}}, "quant_method must be one of .* found nothing"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "one of default, linear, llama3, yarn, found 'dyn"),
        ({"rope_scaling": {"type": "longrope"}}, "type must be one of default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor must be a positive number, found nothing"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        (
            {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}},
            "rope_theta must be above 1 for yarn",
        ),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4}},
            "low_freq_factor must be below high",
        ),
        ({"partial_rotary_factor": 0.5}, "this family rotates whole heads"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "this family rotates whole heads"),
    ],
)
def test_a_wrong_field_is_refused_by_name(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_config(write(tmp_path, changes))
    assert str(tmp_path / "config.json") in str(caught.value)


DEEP = '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"


@pytest.mark.parametrize("value", [{"a": 1}, [[1]], ["x"]])
def test_an_end_token_that_is_no_id_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="eos_token_id must be a token id below vocab_size"):
        load_config(write(tmp_path, {"eos_token_id": 2}, {"eos_token_id": value}))


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", DEEP])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_config(tmp_path)


def test_a_token_of_cache_is_two_vectors_a_layer_and_kv_head(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, {"num_key_value_heads": 2}))
    assert kv_bytes_per_token(config, Dtype.BF16, Dtype.BF16) == 2 * 3 * 2 * 8 * 2
    assert kv_bytes_per_token(config, Dtype.FP32, Dtype.FP32) == 2 * kv_bytes_per_token(config, Dtype.BF16, Dtype.BF16)
