"""Keys of quantization_config: what published files have is read, and any other key is refused by its name."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qualification.decision.presets import preset_named
from qualification.model.families.quantization_config import from_file_beside, read_quantization
from qualification.model.families.reader import read_model
from qualification.model.fields import Fields, ModelConfigError
from qualification.model.packing import Packing
from server.errors import ModelError
from server.model.load.load import load_config

Config = dict[str, Any]


def numbers(bits: int, kind: str, strategy: str, **others: object) -> Config:
    """Say how numbers are rounded, with all keys that llm-compressor 0.13 writes."""
    return {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": bits,
        "observer": "minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": strategy, "symmetric": True,
        "type": kind, "zp_dtype": None, **others,
    }  # fmt: skip


def compressed(name: str, weights: Config, inputs: Config | None, **others: object) -> Config:
    group = {
        "format": name, "input_activations": inputs, "output_activations": None, "targets": ["Linear"],
        "weights": weights,
    }  # fmt: skip
    return {
        "config_groups": {"group_0": group}, "format": name, "global_compression_ratio": None, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "sparsity_config": {}, "transform_config": {}, "version": "0.13.0", **others,
    }  # fmt: skip


BY_TOKEN = numbers(8, "float", "token", dynamic=True, observer=None)
OF_TENSOR = numbers(8, "float", "tensor")
DENSE = {"format": "dense", "global_sparsity": 0.13, "registry_requires_subclass": False, "sparsity_structure": "0:0"}
OF_MODELOPT = {"dynamic": False, "num_bits": 8, "type": "float"}
NVFP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
META = {"quantizer": ["gptqmodel:4.0.0"], "uri": "https://example.org", "damp_percent": 0.05, "mse": 0.0}
# As these makers publish them: every key, and values of one of their files.
PUBLISHED: dict[str, Config] = {
    "DeepSeek V3": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "DeepSeek V3.1": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "Qwen FP8": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
    },
    "MiMo": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "packed_modules_mapping": {},
        "ignored_layers": ["lm_head"], "weight_block_size": [128, 128],
    },
    "Ministral 3": {
        "activation_scheme": "static", "dequantize": False, "modules_to_not_convert": ["lm_head"],
        "quant_method": "fp8", "weight_block_size": None,
    },
    "transformers 5 fp8": {
        "activation_scheme": "dynamic", "dequantize": False, "expert_dtype": "fp8", "modules_to_convert": None,
        "modules_to_not_convert": ["lm_head"], "quant_method": "fp8", "scale_fmt": "float",
        "weight_block_size": [128, 128],
    },
    "AutoFP8": {
        "activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static",
        "quant_method": "fp8",
    },
    "Meta fbgemm": {
        "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"], "quant_method": "fbgemm_fp8",
    },
    "llm-compressor dynamic": compressed("float-quantized", numbers(8, "float", "channel"), BY_TOKEN),
    "llm-compressor of 2024": compressed(
        "float-quantized", OF_TENSOR, OF_TENSOR, global_compression_ratio=1.24, quantization_status="frozen",
        sparsity_config=DENSE, kv_cache_scheme=OF_TENSOR,
    ),
    "llm-compressor blocks": compressed(
        "float-quantized", numbers(8, "float", "block", block_structure=[128, 128]),
        numbers(8, "float", "group", dynamic=True, group_size=128),
    ),
    "llm-compressor w4a16": compressed("pack-quantized", numbers(4, "int", "group", group_size=128), None),
    "llm-compressor ordered": compressed(
        "pack-quantized", numbers(4, "int", "group", group_size=128, actorder="weight"), None, run_compressed=True
    ),
    "llm-compressor nvfp4": compressed(
        "nvfp4-pack-quantized",
        numbers(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
        numbers(4, "float", "tensor_group", group_size=16, dynamic="local"),
    ),
    "llm-compressor mxfp4": compressed(
        "mxfp4-pack-quantized", numbers(4, "float", "group", group_size=32, scale_dtype="torch.uint8"), None
    ),
    "AutoRound compressed": compressed(
        "pack-quantized", numbers(4, "int", "group", group_size=128), None, provider="auto-round"
    ),
    "ModelOpt FP8": {
        "config_groups": {"group_0": {
            "input_activations": OF_MODELOPT, "weights": OF_MODELOPT, "targets": ["Linear"],
        }},
        "ignore": ["lm_head"], "kv_cache_scheme": OF_MODELOPT, "producer": {"name": "modelopt", "version": "0.33.0"},
        "quant_algo": "FP8", "quant_method": "modelopt",
    },
    "ModelOpt NVFP4": {
        "config_groups": {"group_0": {"input_activations": NVFP4, "weights": NVFP4, "targets": ["Linear"]}},
        "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.33.0"},
        "quant_algo": "NVFP4", "quant_method": "modelopt",
    },
    "hf_quant_config.json": {
        "producer": {"name": "modelopt", "version": "0.23.0"},
        "quantization": {
            "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"],
        },
    },
    "AutoAWQ": {
        "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    },
    "transformers AWQ": {
        "backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
        "group_size": 128, "modules_to_fuse": None, "modules_to_not_convert": ["visual"], "quant_method": "awq",
        "version": "gemm", "zero_point": True,
    },
    "GPTQModel AWQ": {
        "bits": 4, "checkpoint_format": "gemm", "desc_act": False, "format": "gemm", "group_size": 128,
        "lm_head": False, "meta": META, "method": "awq", "pack_dtype": "int32", "quant_method": "awq", "sym": False,
        "version": "gemm", "zero_point": True,
    },
    "AutoGPTQ": {
        "bits": 4, "damp_percent": 0.01, "desc_act": False, "group_size": 128, "model_file_base_name": "model",
        "model_name_or_path": None, "quant_method": "gptq", "static_groups": False, "sym": True,
        "true_sequential": True, "is_marlin_format": False, "checkpoint_format": "gptq",
    },
    "GPTQModel": {
        "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "dynamic": {"-:.*gate$": {}}, "group_size": 128,
        "hyb_act": False, "lm_head": False, "meta": META, "pack_dtype": "int32", "quant_method": "gptq", "sym": True,
    },
    "Optimum": {
        "backend": None, "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
        "damp_percent": 0.1, "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128,
        "max_input_length": None, "model_seqlen": None, "module_name_preceding_first_block": None,
        "modules_in_block_to_quantize": None, "pad_token_id": None, "quant_method": "gptq", "sym": True,
        "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True,
    },
    "AutoRound GPTQ": {
        "autoround_version": "0.4.5", "bits": 4, "batch_size": 8, "damp_percent": 0.01, "data_type": "int",
        "dataset": "NeelNanda/pile-10k", "desc_act": False, "enable_minmax_tuning": True,
        "enable_quanted_input": True, "gradient_accumulate_steps": 1, "group_size": 128, "iters": 200,
        "low_gpu_mem_usage": False, "lr": 0.005, "minmax_lr": 0.005, "nsamples": 128, "quant_method": "gptq",
        "scale_dtype": "torch.float16", "seqlen": 2048, "sym": True, "to_quant_block_names": None,
        "true_sequential": False,
    },
    "gpt-oss": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
}  # fmt: skip
# Notes, an object of names, and those whose every key is refused with the whole.
_OTHERS = (
    "observer_kwargs", "meta", "producer", "exllama_config", "packed_modules_mapping", "dynamic", "sparsity_config",
    "transform_config",
)  # fmt: skip


def read(says: Config) -> object:
    if says.get("quant_method") == "mxfp4":
        return read_model({"model_type": "gpt_oss", "num_hidden_layers": 2, "hidden_size": 64, **GPT_OSS,
                           "quantization_config": says})  # fmt: skip
    return read_quantization(Fields(says if "quant_method" in says else dict(from_file_beside(says)), "config.json"))


GPT_OSS = {
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99,
}  # fmt: skip


def objects(says: Config) -> Iterator[Config]:
    """Yield each object whose keys are known: the file's own, and those within it."""
    yield says
    for name, value in says.items():
        if name == "config_groups":
            for group in value.values():
                yield from objects(group)
        elif isinstance(value, dict) and name not in _OTHERS:
            yield from objects(value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_keys_are_read_and_others_refused(name: str) -> None:
    read(copy.deepcopy(PUBLISHED[name]))
    changed = copy.deepcopy(PUBLISHED[name])
    for each in list(objects(changed)):
        each["made_up"] = None  # asks for nothing
        read(changed)
        each["made_up"] = [7]
        with pytest.raises(ModelConfigError, match=r"made_up must be absent .* delete it .* found \[7\]"):
            read(changed)
        del each["made_up"]


@pytest.mark.parametrize(("name", "where", "changes", "message"), [
    ("AWQ", "", {"backend": "llm-awq"}, "backend must be absent or autoawq"),
    ("AWQ", "", {"w_bit": 8}, "w_bit must be absent or the same as bits, found 8"),
    ("AWQ", "", {"act_bits": 8}, "act_bits must be absent or 16 or 32"),
    ("GPTQ", "", {"pack_dtype": "int16"}, "pack_dtype must be absent or int32"),
    ("GPTQ", "", {"is_marlin_format": True}, "is_marlin_format must be absent or false"),
    ("GPTQ", "", {"format": "gptq_v2"}, "format must be absent or the same as checkpoint_format"),
    ("fp8", "", {"dequantize": True}, "dequantize must be absent or false"),
    ("fp8", "", {"expert_dtype": "fp4"}, "expert_dtype must be absent or fp8"),
    ("fp8", "", {"ignored_layers": ["model.layers.1"]}, "modules_to_not_convert must be absent or the same as ign"),
    ("fp8", "", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme must be one of static, dynamic"),
    ("compressed", "", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config must be absent, empty or dense"),
    ("compressed", "", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config must be absent or em"),
    ("compressed", "weights", {"dynamic": True}, "dynamic must be false, of weights"),
    ("compressed", "weights", {"actorder": "group"}, "actorder must be one of static, weight"),
    ("compressed", "weights", {"group_size": 128}, "group_size must be absent or -1"),
    ("compressed", "weights", {"block_structure": [128, 128]}, "block_structure must be absent"),
    ("ModelOpt", "", {"exclude_modules": ["x"]}, "ignore must be absent or the same as exclude_modules"),
    ("ModelOpt", "", {"quantized_layers": {"model.layers.0": {}}}, "quantized_layers must be absent or {}"),
    ("ModelOpt", "", {"pre_quant_scale": True}, "pre_quant_scale must be absent or false"),
    ("ModelOpt", "group_0", {"targets": ["re:.*mlp.*"]}, "targets must be Linear alone, of NVFP4"),
    ("ModelOpt", "weights", {"num_bits": 8}, "num_bits must be 4, of NVFP4"),
    ("ModelOpt", "weights", {"group_size": 32}, "group_size must be 16, of NVFP4"),
])  # fmt: skip
def test_a_key_that_asks_for_more_is_refused(name: str, where: str, changes: Config, message: str) -> None:
    whole = {
        "AWQ": "transformers AWQ", "GPTQ": "AutoGPTQ", "fp8": "Qwen FP8", "compressed": "llm-compressor dynamic",
        "ModelOpt": "ModelOpt NVFP4",
    }[name]  # fmt: skip
    says = copy.deepcopy(PUBLISHED[whole])
    group = says.get("config_groups", {}).get("group_0", {})
    {"": says, "group_0": group, "weights": group.get("weights")}[where].update(changes)
    with pytest.raises(ModelConfigError, match=message):
        read(says)


def test_a_measured_cache_of_autofp8_asks_for_8_bits() -> None:
    assert read_quantization(Fields(PUBLISHED["AutoFP8"], "")).caches_fp8
    assert not read_quantization(Fields(PUBLISHED["Ministral 3"], "")).caches_fp8


def test_gptqs_list_says_what_of_a_layer_is_quantised() -> None:
    listed = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.experts.0.up_proj"]]
    found = read_quantization(Fields(PUBLISHED["Optimum"] | {"modules_in_block_to_quantize": listed}, ""))
    assert found.packing is Packing.GPTQ_SYMMETRIC
    names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.experts.0.up_proj", "self_attn.v_proj", "mlp.up_proj")
    assert [found.format_of(f"model.layers.3.{it}").name for it in names] == ["int4_128"] * 3 + ["plain"] * 2


STATIC = {"weights": OF_TENSOR, "input_activations": OF_TENSOR}
ROWS = {"weights": numbers(8, "float", "channel"), "input_activations": BY_TOKEN}
DOWN, VALUES = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.v_proj"


@pytest.mark.parametrize("order", [("all", "down", "mlp"), ("mlp", "down", "all"), ("down", "all", "mlp")])
def test_a_group_that_names_a_product_goes_before_one_of_all(order: tuple[str, ...]) -> None:
    groups = {
        "all": {"targets": ["Linear"], **STATIC},
        "mlp": {"targets": ["re:.*mlp.*"], **ROWS},
        "down": {"targets": [DOWN], **STATIC},
    }
    says = PUBLISHED["llm-compressor dynamic"] | {"config_groups": {name: groups[name] for name in order}}
    found = read_quantization(Fields(says, ""))
    names = (DOWN, "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", VALUES)
    assert [found.format_of(it).name for it in names] == ["fp8_static", "fp8_rows", "fp8_rows", "fp8_static"]


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
AWQ_BESIDE = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize(("name", "beside", "file"), [
    ("AutoGPTQ", {**PUBLISHED["AutoGPTQ"], "damp_percent": 0.02}, "quantize_config.json"),
    ("AutoAWQ", AWQ_BESIDE, "quant_config.json"),
])  # fmt: skip
def test_a_file_beside_config_must_say_the_same(tmp_path: Path, name: str, beside: Config, file: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": PUBLISHED[name]}))
    (tmp_path / file).write_text(json.dumps(beside))
    assert load_config(tmp_path).packing is not None
    changed = {"version": "gemv"} if "version" in beside else {"sym": False}
    (tmp_path / file).write_text(json.dumps({**beside, **changed}))
    with pytest.raises(ModelError, match=rf"{file}: (sym|version) must be .*, as quantization_config of config.json"):
        load_config(tmp_path)


BESIDE_MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}


def test_modelopts_file_beside_config_must_say_the_same(tmp_path: Path) -> None:
    says = PUBLISHED["ModelOpt FP8"]
    without = {name: it for name, it in says.items() if name != "kv_cache_scheme"}

    def caches_fp8(of_config: Config, **of_file: str | None) -> bool:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": of_config}))
        beside = {"producer": {}, "quantization": {**BESIDE_MODELOPT, **of_file}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
        return load_config(tmp_path).caches_fp8

    assert caches_fp8(says)
    assert caches_fp8({**says, "kv_cache_scheme": "FP8"}, quant_algo="fp8")  # as its earlier files have it
    assert not caches_fp8(without)  # as config.json has it, which published pairs let say less
    with pytest.raises(ModelError, match=r"hf_quant_config.json, quantization: quant_algo must be 'FP8', as .*'NVFP4'"):
        caches_fp8(says, quant_algo="NVFP4")
    with pytest.raises(ModelError, match=r"kv_cache_quant_algo must be FP8, as kv_cache_scheme .* found None"):
        caches_fp8(says, kv_cache_quant_algo=None)
    with pytest.raises(ModelError, match=r"kv_cache_quant_algo must be not FP8, as kv_cache_scheme .* found 'FP8'"):
        caches_fp8({**says, "kv_cache_scheme": "NVFP4"})


@pytest.mark.parametrize(
    ("key", "changes"),
    [("text_config", {}), ("llm_config", {"model_type": "internvl_chat", "architectures": ["InternVLChatModel"]})],
)
def test_a_text_part_that_says_otherwise_than_the_whole_is_refused(key: str, changes: Config) -> None:
    preset = preset_named("qwen3-vl-8b" if key == "text_config" else "qwen3-8b")
    whole = preset.whole if key == "text_config" else {key: preset.config, "vision_config": {}, **changes}
    blocks, rows = PUBLISHED["Qwen FP8"], {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}

    def read_both(of_text: Config | None) -> str:
        text = {**whole[key], "quantization_config": of_text}  # type: ignore[dict-item]
        return read_model({**whole, key: text, "quantization_config": blocks}).layers[0].formats.qkv.name

    assert [read_both(it) for it in (None, dict(blocks))] == ["fp8_blocks"] * 2
    with pytest.raises(ModelConfigError, match=f"{key}: quantization_config must be absent, or as beside {key}"):
        read_both(rows)
