"""Presets, and the shapes, limits and signatures that follow from a model's config."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig

from kernels.catalog import ALL_PATHS, PATHS, path_named
from kernels.vocabulary.buckets import Bucket, bucket_of
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import AnyPath, Tier
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Dtype, Mask, Phase
from kernels.vocabulary.value_shape import Values
from qualification.decision.decision import Book, Policy
from qualification.decision.defaults import Choices, limits_of
from qualification.decision.model_shapes import (
    AttentionSignature,
    ServingLimits,
    distinct_windows,
    plan_shapes,
    shapes_needed,
    signature_of,
    signatures_of,
)
from qualification.decision.orders import Known, choose_orders
from qualification.decision.presets import PRESETS, Preset, Rounding, preset_named, rounded_config
from qualification.evidence.matrix import Matrix
from qualification.measure.campaign import targets_of
from qualification.model.config import num_parameters, weight_bytes
from qualification.model.families.gemma3 import LEFT_OUT
from qualification.model.families.quantization_config import CONFIG_KEY
from qualification.model.families.reader import read_model
from qualification.model.fields import ModelConfigError
from qualification.model.shard import shard_of

MASKS = (Mask.CAUSAL, Mask.SPANS)
H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580.95.05", "13.0", "91900", "2.11.0", "3.6.0")
WANTED = {
    "demo": AttentionSignature(4, 2, 64),
    "glm-4.7-flash": AttentionSignature(20, 1, 576, values=Values(512, is_latent=True)),
    "llama-3.1-8b": AttentionSignature(32, 8, 128),
    "llama-3.1-70b": AttentionSignature(64, 8, 128),
    "llama-3.2-1b": AttentionSignature(32, 8, 64),
    "qwen3-0.6b": AttentionSignature(16, 8, 128),
    "qwen3-8b": AttentionSignature(32, 8, 128),
    "qwen2.5-7b": AttentionSignature(28, 4, 128),
    "mistral-7b-v0.1": AttentionSignature(32, 8, 128, (4096,)),
    "gemma-2-9b": AttentionSignature(16, 8, 256, (None, 4096), 50.0),
    "gemma-3-4b": AttentionSignature(8, 4, 256, (None, 1024), spans=True),
    "qwen2.5-vl-7b": AttentionSignature(28, 4, 128),
    "qwen3-vl-8b": AttentionSignature(32, 8, 128),
    "glm-4.1v-9b": AttentionSignature(32, 2, 128),
    "internvl3.5-8b": AttentionSignature(32, 8, 128),
    "mistral-small-3.1-24b": AttentionSignature(32, 8, 128),
    "phi-3-mini": AttentionSignature(32, 32, 96, (2047,)),
    "gemma-3-1b": AttentionSignature(4, 1, 256, (None, 512)),
    "olmo-2-7b": AttentionSignature(32, 32, 128),
    "granite-3.3-8b": AttentionSignature(32, 8, 128),
    "phi-3.5-mini": AttentionSignature(32, 32, 96),
    "gpt-oss-20b": AttentionSignature(64, 8, 64, (None, 128), sinks=True),
    "qwen3-30b-a3b": AttentionSignature(32, 4, 128),
    "qwen3-235b-a22b": AttentionSignature(64, 4, 128),
    "mixtral-8x7b": AttentionSignature(32, 8, 128),
    "glm-4.5-air": AttentionSignature(96, 8, 128),
    "qwen3.5-35b-a3b": AttentionSignature(16, 2, 256),
    "qwen3.5-27b": AttentionSignature(24, 4, 256),
    "qwen3.5-9b": AttentionSignature(16, 4, 256),
    "qwen3-next-80b-a3b": AttentionSignature(16, 2, 256),
    "kimi-linear-48b-a3b": AttentionSignature(32, 1, 576, values=Values(512, is_latent=True)),
    "ling-2.6-flash": AttentionSignature(32, 1, 576, values=Values(512, is_latent=True)),
    "nemotron-3-nano-30b-a3b": AttentionSignature(32, 2, 128),
    "nemotron-3-super-120b-a12b": AttentionSignature(32, 2, 128),
}
OF_TWO_KINDS = {
    "gemma-4-31b": (AttentionSignature(32, 16, 256, (1024,)), AttentionSignature(32, 4, 512)),
    "gemma-4-26b-a4b": (AttentionSignature(16, 8, 256, (1024,)), AttentionSignature(16, 2, 512)),
    "gemma-4-e4b": (AttentionSignature(8, 2, 256, (512,)), AttentionSignature(8, 2, 512)),
}
# Of the published weights: in all, and of those that one token is multiplied by.
PARAMETERS = {
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "gemma-4-26b-a4b": (25_233_141_790, 3_822_530_590),
    "ling-2.6-flash": (104_186_915_584, 7_449_488_128),
    "kimi-linear-48b-a3b": (49_122_681_728, 3_484_459_904),
}


def signature_from(config: Mapping[str, object]) -> AttentionSignature:
    return signature_of(read_model(config))


def limits_from(config: Mapping[str, object], device_type: str, choices: Choices) -> ServingLimits:
    return limits_of(read_model(config), device_type, choices)


def test_each_preset_has_the_attention_of_its_model() -> None:
    wanted = {name: (signature,) for name, signature in WANTED.items()} | OF_TWO_KINDS
    assert {preset.name: signatures_of(read_model(preset.config)) for preset in PRESETS} == wanted


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_mixture_has_the_published_number_of_parameters(name: str) -> None:
    model = read_model(preset_named(name).config)
    assert (num_parameters(model), num_parameters(model, num_tokens=1)) == PARAMETERS[name]


def test_four_bit_experts_take_a_quarter_and_their_scales() -> None:
    model = read_model(preset_named("gpt-oss-20b").config)
    in_experts = 24 * 32 * 3 * 2880 * 2880
    due = 2 * (num_parameters(model) - in_experts) + in_experts * 17 // 32
    assert weight_bytes(model, Dtype.BF16) == due


def test_every_preset_has_limits_and_shapes_in_every_phase() -> None:
    for preset in PRESETS:
        limits = limits_from(preset.config, "cuda", Choices())
        assert limits.dtype is Dtype.BF16
        for signature in signatures_of(read_model(preset.config)):
            shapes = shapes_needed(signature, limits)
            assert {shape.phase for shape in shapes} == set(PLANNED_PHASES), preset.name


def test_a_path_of_a_fixed_order_serves_every_shape_of_every_preset() -> None:
    ordered = path_named("gluon.ordered.hopper")
    for preset in PRESETS:
        limits = limits_from(preset.config, "cuda", Choices())
        narrow = [it for it in signatures_of(read_model(preset.config)) if it.head_dim < 512]  # no order serves 512 yet
        shapes = [shape for it in narrow for shape in shapes_needed(it, limits)]
        shapes = [*shapes, *(replace(it, phase=Phase.VERIFY) for it in shapes if it.phase is Phase.DECODE)]
        assert {str(it): found for it in shapes if (found := ordered.rejects(it, H200))} == {}, preset.name


@pytest.mark.parametrize(
    ("name", "rounding", "gigabytes"),
    [("llama-3.1-70b", Rounding.FP8, 38.4), ("qwen3-235b-a22b", Rounding.FP8_BLOCKS, 119.5)],
)
def test_a_rank_of_two_has_a_first_choice_for_each_shape_in_8_bits(
    name: str, rounding: Rounding, gigabytes: float
) -> None:
    model = read_model(rounded_config(preset_named(name).config, rounding))
    part = shard_of(model, 1, 2).local_config
    assert weight_bytes(part, Dtype.BF16) / 1e9 == pytest.approx(gigabytes, abs=0.1)
    shapes = plan_shapes(part, limits_of(model, "cuda", Choices()), "cuda", 2)
    first = [path for path in ALL_PATHS if path.tier is Tier.FIRST]
    assert [str(it) for it in shapes if all(path.rejects(it, H200) for path in first)] == []


QWEN_3_5, QWEN_3_NEXT = (preset_named(it).config for it in ("qwen3.5-35b-a3b", "qwen3-next-80b-a3b"))
IN_8_BITS = rounded_config(QWEN_3_5, Rounding.FP8)


@pytest.mark.parametrize(
    ("config", "experts", "num_logits"),
    [
        (QWEN_3_5, "bf16 plain e257:9", 272),
        (QWEN_3_NEXT, "bf16 plain e513:11", 528),
        (IN_8_BITS, "bf16 fp8_rows e257:9", 272),
        ({**QWEN_3_5, "shared_expert_intermediate_size": 1024}, "bf16 plain e256:8", 256),
        (
            {**IN_8_BITS, CONFIG_KEY: {**IN_8_BITS[CONFIG_KEY], "modules_to_not_convert": ["gate", "shared_expert"]}},
            "bf16 fp8_rows e256:8", 256,
        ),
    ],
    ids=["qwen 3.5", "qwen 3 next", "8 bits", "wider", "in another format"],
)  # fmt: skip
def test_a_gated_expert_that_all_visit_is_one_of_the_others_where_alike(
    config: Mapping[str, Any], experts: str, num_logits: int
) -> None:
    model = read_model(config)
    shapes = plan_shapes(model, limits_of(model, "cuda", Choices()), "cuda", 1)
    lines = [str(it).partition(" h2048 ")[0] for it in shapes]
    assert {it for it in lines if it.startswith("experts")} == {f"experts {experts}"}
    width = config["shared_expert_intermediate_size"]
    assert any(f"in{width} out2048" in it for it in lines) == (num_logits == 256)
    routers = [it for it in shapes if f"in2048 out{num_logits} fp32" in str(it)]
    first = [path for path in ALL_PATHS if path.tier is Tier.FIRST]
    assert routers
    assert [str(it) for it in routers if all(path.rejects(it, H200) for path in first)] == []


def test_the_demo_preset_is_the_bundled_model() -> None:
    folder = Path(__file__).parents[3] / "server" / "model" / "demo"
    bundled = json.loads((folder / "config.json").read_text())
    demo = preset_named("demo").config
    assert signature_from(demo) == signature_from(bundled)
    assert limits_from(demo, "cuda", Choices()) == limits_from(bundled, "cuda", Choices())


def test_limits_are_what_the_server_takes_by_itself() -> None:
    config = preset_named("llama-3.1-8b").config
    on_gpu, on_cpu = (limits_from(config, kind, Choices()) for kind in ("cuda", "cpu"))
    assert (on_gpu.max_model_len, on_gpu.max_num_batched_tokens, on_gpu.page_size) == (131072, 8192, 64)
    assert (on_cpu.max_num_batched_tokens, on_cpu.page_size) == (2048, 16)
    assert (on_gpu.dtype, on_cpu.dtype) == (Dtype.BF16, Dtype.FP32)


def test_choices_go_before_defaults_but_not_beyond_the_model() -> None:
    config = preset_named("phi-3-mini").config
    limits = limits_from(config, "cuda", Choices(99999, 512, 16, Dtype.FP16))
    assert (limits.max_model_len, limits.max_num_batched_tokens, limits.page_size) == (4096, 512, 16)
    assert limits.dtype is limits.kv_dtype is Dtype.FP16
    assert limits_from(config, "cuda", Choices(1000)).max_model_len == 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": None}, "max_position_embeddings must be a positive integer, found None"),
        ({"torch_dtype": "int4"}, "dtype must be one of .*, found 'int4'"),
    ],
)
def test_a_config_without_limits_is_refused_by_its_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        limits_from({**preset_named("llama-3.1-8b").config, **changes}, "cuda", Choices())


def test_images_add_prompt_shapes_and_no_decode_shapes() -> None:
    config = preset_named("gemma-3-4b").config
    shapes = shapes_needed(signature_from(config), limits_from(config, "cuda", Choices(max_model_len=2048)))
    masks = {(shape.phase, shape.window, shape.mask) for shape in shapes}
    prompts = {
        (phase, window, mask) for phase in (Phase.PREFILL, Phase.EXTEND) for window in (None, 1024) for mask in MASKS
    }
    assert masks == prompts | {(Phase.DECODE, None, Mask.CAUSAL), (Phase.DECODE, 1024, Mask.CAUSAL)}
    assert len(set(shapes)) == len(shapes)


@pytest.mark.parametrize("preset", [it for it in PRESETS if "vision_config" in it.whole], ids=lambda it: it.name)
def test_a_run_of_a_preset_that_sees_images_proves_them(preset: Preset) -> None:
    (target,) = targets_of(
        {preset.name: preset.whole}, Choices(), device_type="cuda", phases=("prefill",), paths=PATHS, file_of=Path
    )
    masks = {(shape.mask, shape.window) for shape in target.shapes if isinstance(shape, AttentionShape)}
    due = {"gemma-3-4b": {None, 1024}, "gemma-4-31b": {1024}, "gemma-4-26b-a4b": {1024}}.get(preset.name, set())
    assert {window for mask, window in masks if mask is Mask.SPANS} == due
    assert (Mask.FULL, None) in masks


# Of the public config.json files: what a Gemma 3 leaves out is as its configuration class has it.
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "siglip_vision_model"},
}
GEMMA_3_12B_TEXT = {
    "intermediate_size": 15360,
    "hidden_size": 3840,
    "model_type": "gemma3_text",
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "sliding_window": 1024,
}


def test_the_public_file_of_gemma_3_is_read_as_the_preset_is() -> None:
    preset = preset_named("gemma-3-4b").config
    assert signature_from(GEMMA_3_4B) == signature_from(preset)
    assert limits_from(GEMMA_3_4B, "cuda", Choices()) == limits_from(preset, "cuda", Choices())


def test_the_head_dim_of_a_gemma_is_no_quotient() -> None:
    config = {**GEMMA_3_4B, "text_config": GEMMA_3_12B_TEXT}
    assert signature_from(config) == AttentionSignature(16, 8, 256, (None, 1024), spans=True)
    assert Gemma3TextConfig(**GEMMA_3_12B_TEXT).head_dim == 256
    gemma_2 = {key: value for key, value in preset_named("gemma-2-9b").config.items() if key != "head_dim"}
    assert signature_from(gemma_2).head_dim == 256


def test_what_a_gemma_3_leaves_out_is_as_its_class_has_it() -> None:
    known = Gemma3TextConfig()
    assert {key: getattr(known, key) for key in LEFT_OUT} == LEFT_OUT


LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
}


def limits(max_model_len: int, max_num_batched_tokens: int) -> ServingLimits:
    return ServingLimits(max_model_len, max_num_batched_tokens, 16, Dtype.FP32, Dtype.FP32)


def test_head_dim_and_kv_heads_follow_from_what_is_given() -> None:
    assert signature_from(LLAMA) == AttentionSignature(32, 8, 128)
    assert signature_from(LLAMA | {"head_dim": 64}).head_dim == 64
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert signature_from(config).num_kv_heads == 32


def test_distinct_windows_are_ordered_whatever_the_layers_order() -> None:
    assert distinct_windows([512, None, 128, None, 512]) == (None, 128, 512)


def test_signatures_name_themselves_differently() -> None:
    names = {
        str(signature)
        for signature in (
            AttentionSignature(32, 8, 128),
            AttentionSignature(32, 8, 128, (4096,)),
            AttentionSignature(32, 8, 128, (None, 4096)),
            AttentionSignature(32, 8, 128, softcap=50.0),
            AttentionSignature(32, 8, 128, sinks=True),
        )
    }
    assert names == {"h32-8-d128", "h32-8-d128-w4096", "h32-8-d128-wfull-4096", "h32-8-d128-cap50", "h32-8-d128-sinks"}


def test_verify_is_needed_only_where_tokens_are_drafted() -> None:
    plain = limits(600, 100)
    shapes = shapes_needed(AttentionSignature(4, 2, 64, spans=True), replace(plain, max_drafted_tokens=3))
    verified = [shape for shape in shapes if shape.phase is Phase.VERIFY]
    decoded = [replace(shape, phase=Phase.VERIFY) for shape in shapes if shape.phase is Phase.DECODE]
    assert verified == decoded
    able = {path.name for path in PATHS if path.serves(verified[0])}  # each lists its phases
    assert able > {"gluon.extend.hopper", "triton.extend", "sdpa.cpu", "torch.attention.tiles"}
    assert not able & {"gluon.decode.hopper", "gluon.prefill.hopper"}
    without = shapes_needed(AttentionSignature(4, 2, 64, spans=True), plain)
    assert without == tuple(shape for shape in shapes if shape not in verified)


@pytest.mark.parametrize(("max_model_len", "budget"), [(1, 1), (128, 64), (129, 4096), (600, 100), (9000, 2048)])
def test_shapes_are_exactly_those_that_batches_can_have(max_model_len: int, budget: int) -> None:
    """Compare with brute force over the longest query and the longest context of a batch."""
    longest_query = min(max_model_len, budget)
    interesting = sorted(
        {n for edge in (1, 128, 512, 2048, 8192, longest_query, max_model_len) for n in (edge, edge + 1)}
    )
    queries = [n for n in interesting if n <= longest_query]
    contexts = [n for n in interesting if n <= max_model_len]
    met = {(Phase.PREFILL, bucket_of(q), bucket_of(q)) for q in queries}
    met |= {(Phase.EXTEND, bucket_of(q), bucket_of(c)) for q in queries for c in contexts if c >= q}
    met |= {(Phase.DECODE, Bucket.LE_128, bucket_of(c)) for c in contexts}
    shapes = shapes_needed(AttentionSignature(4, 2, 64), limits(max_model_len, budget))
    assert len(shapes) == len(set(shapes))
    assert {(shape.phase, shape.query_bucket, shape.context_bucket) for shape in shapes} == met
    assert {shape.page_size for shape in shapes if shape.phase is not Phase.PREFILL} == {16}
    assert {shape.page_size for shape in shapes if shape.phase is Phase.PREFILL} == {None}


def classes_without_an_order(preset: Preset, paths: Sequence[AnyPath], world: int) -> list[str]:
    model = read_model(preset.config)
    shapes = plan_shapes(model, limits_of(model, "cuda", Choices()), "cuda", world)
    known = Known(paths, H200, Book(Matrix({}, ""), {}), Policy.QUALIFY, frozenset())
    return [name for name, order in choose_orders(shapes, known).items() if order.wanted is None]


def test_every_preset_can_be_reproducible_on_hopper() -> None:
    """Look for an order in which some path can compute every shape of a class, on one rank and on two."""
    assert {
        (preset.name, world): lacking
        for preset in PRESETS
        for world in (1, 2)
        if (lacking := classes_without_an_order(preset, ALL_PATHS, world))
    } == {}
    others = [path for path in ALL_PATHS if path.name != "triton.latent.ordered"]
    [lacking] = classes_without_an_order(preset_named("glm-4.7-flash"), others, 1)
    assert lacking.startswith("attention bf16 h20:1 d576/latent-512")
