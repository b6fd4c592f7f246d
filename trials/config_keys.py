"""Change each key of config.json, and compare what transformers and the server make of it.

PYTHONPATH=.:tests python trials/config_keys.py --out docs/benchmarks/configs.json
PYTHONPATH=.:tests python trials/config_keys.py --first 7 --time-limit 60

A base is a tiny random model of a family, with the weights that transformers saves. Each of its keys, and each key that
its family reads, is deleted and set to some ten values or more; keys that other families read are set to four. Then
either both compute the same logits of one short text, or one of them refuses: the server by the name of a key, or of
the tensors that do not fit. The exit status is 1 for logits that differ, for a refusal that names nothing, and for a
crash; the few documented differences are counted by name. `--first N --time-limit S` runs a sample of about S seconds,
another one for each N.
"""

import argparse
import copy
import json
import logging
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from qualification.model.config import ModelConfig, RopeKind
from qualification.model.families.registry import FAMILIES
from server.errors import ModelError
from server.model.load.load import load_config, load_decoder
from server.settings import LoadFormat
from support.models import tiny_families as tiny
from support.models.paged_runner import PagedRunner
from support.models.tiny_families import longrope, prompt, reference_logits, save_image_model, save_reference

ROOT = Path(__file__).resolve().parents[1]
NUM_TOKENS = 40  # several windows of 9, and beyond the original contexts of 16 and 32
TOLERANCE = 5e-4
Config = dict[str, Any]
Path_ = tuple[str, ...]  # keys from the outermost object to the changed one
Prompt = tuple[int, ...]  # token ids


class Outcome(Enum):
    SAME = "the same logits"
    BOTH_REFUSE = "both refuse"
    REFUSED = "refused by a key's name, computed by transformers"
    NO_FIT = "refused by the names of tensors that do not fit"
    LENIENT = "refused by transformers, computed as if the key were missing or by its value"
    DOCUMENTED = "documented difference"
    DIFFERENT = "DIFFERENT LOGITS"
    UNNAMED = "REFUSED WITHOUT A NAME"
    CRASH = "CRASH"


FAILURES = (Outcome.DIFFERENT, Outcome.UNNAMED, Outcome.CRASH)
LEAST_STEP = "transformers holds a state space's steps above time_step_min in prompts, and not in answers"
NEAR_TIE = "two scores of an indexer are as good as equal, and other keys are chosen: of another prompt the same logits"
PAD_ROW = "transformers makes the embedding of pad_token_id zeros behind loading it, which a checkpoint need not have"
LONGROPE = "LongRoPE takes the long factors for every request where the server's limit is beyond the original context"


@dataclass(frozen=True, slots=True)
class Base:
    """family       as in `tiny_families`, or the kind of an image model
    changes         of its class's parameters
    is_old          whether config.json has rope_theta and rope_scaling, as before transformers 5
    """

    family: str
    changes: Mapping[str, object]
    is_old: bool = False


SMALL = {"num_hidden_layers": 2}
BASES: dict[str, Base] = {
    "llama": Base("llama", {}),
    "llama, llama3": Base("llama", {"rope_parameters": tiny.LLAMA3, "head_dim": 16}, is_old=True),
    "llama, yarn, tied": Base(
        "llama", {"rope_parameters": {**tiny.YARN, **tiny.BETAS}, "head_dim": 16, "tie_word_embeddings": True}
    ),
    "llama, linear": Base("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}}),
    "mistral": Base("mistral", {"sliding_window": 9}, is_old=True),
    "qwen2": Base("qwen2", {**tiny.SWITCHED_ON, "max_window_layers": 1}, is_old=True),
    "qwen2, yarn": Base("qwen2", {"rope_parameters": tiny.YARN, "hidden_size": 64}, is_old=True),
    "qwen3": Base(
        "qwen3", {"head_dim": 12, "layer_types": ["full_attention", "sliding_attention"], **tiny.SWITCHED_ON}
    ),
    "phi3": Base("phi3", {"sliding_window": 9}, is_old=True),
    "phi3, longrope": Base(
        "phi3",
        {
            "rope_parameters": {**longrope(3), "partial_rotary_factor": 0.75, "original_max_position_embeddings": 32},
            "original_max_position_embeddings": 32,
        },
    ),
    "olmo2": Base("olmo2", {}),
    "granite": Base("granite", tiny.MULTIPLIERS, is_old=True),
    "arcee": Base("arcee", {}, is_old=True),
    "cohere": Base("cohere", tiny.COMMAND_R, is_old=True),
    "cwm": Base(
        "cwm", {**tiny.CWM, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": tiny.LLAMA3}
    ),
    "dots1": Base("dots1", {**tiny.DOTS, "sliding_window": 9, "max_window_layers": 1}, is_old=True),
    "exaone_moe": Base("exaone_moe", tiny.EXAONE_MOE),
    "flex_olmo": Base("flex_olmo", tiny.OLMOE),
    "granite_swa": Base(
        "granite_swa",
        {**tiny.SWASH, "layer_types": ["sliding_attention", "full_attention"], "layer_rope_theta": [50.0, 0]},
    ),
    "granitemoe_swa": Base(
        "granitemoe_swa",
        {**tiny.SWASH_MOE, "layer_types": ["sliding_attention", "full_attention"], "layer_rope_theta": None},
    ),
    "helium": Base("helium", {"head_dim": 8}, is_old=True),
    "ministral": Base("ministral", {**tiny.MINISTRAL_8B, "layer_types": ["sliding_attention", "full_attention"]}),
    "olmoe": Base("olmoe", tiny.OLMOE, is_old=True),
    "solar_open": Base("solar_open", {**tiny.GLM, "n_group": 4, "topk_group": 2}),
    "stablelm": Base("stablelm", {"use_qkv_bias": True}, is_old=True),
    "stablelm, one norm": Base("stablelm", {"use_parallel_residual": True}),
    "nemotron": Base("nemotron", {"attention_bias": True, "mlp_bias": True}, is_old=True),
    "jais2": Base("jais2", {}, is_old=True),
    "olmo": Base("olmo", {}, is_old=True),
    "starcoder2": Base("starcoder2", {"sliding_window": 9}, is_old=True),
    "phi": Base("phi", {}, is_old=True),
    "opt": Base("opt", tiny.OPT),
    "gpt2": Base("gpt2", tiny.GPT_2),
    "apertus": Base("apertus", {**tiny.APERTUS, "rope_parameters": tiny.LLAMA3}),
    "gpt_bigcode": Base("gpt_bigcode", tiny.GPT_2),
    "gpt_neox": Base("gpt_neox", tiny.NEOX),
    "phimoe": Base("phimoe", {**tiny.PHI_MOE, "sliding_window": 9, "lm_head_bias": True}, is_old=True),
    "youtu": Base("youtu", tiny.YOUTU),
    "gemma2": Base("gemma2", tiny.GEMMA_2, is_old=True),
    "gemma3": Base(
        "gemma3",
        {**tiny.GEMMA, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": tiny.TWO_ROPES},
    ),
    "gemma4, as E2B": Base("gemma4", {**tiny.GEMMA_4_SMALL, "use_double_wide_mlp": True}),
    "gemma4, as 26B-A4B": Base(
        "gemma4", {**tiny.GEMMA_4_MOE, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "gemma4_unified": Base("gemma4_unified", tiny.GEMMA_4_WIDE),
    "qwen2_moe": Base("qwen2_moe", {**tiny.QWEN_2_MOE, **tiny.SWITCHED_ON, "max_window_layers": 1}),
    "qwen3_moe": Base("qwen3_moe", {**tiny.QWEN_3_MOE, "mlp_only_layers": [0]}, is_old=True),
    "qwen3_next": Base("qwen3_next", {**tiny.QWEN_3_NEXT, "mlp_only_layers": [0], "num_hidden_layers": 2}, is_old=True),
    "qwen3.5": Base("qwen3.5", {"num_hidden_layers": 2}),
    "qwen3.5, moe": Base("qwen3.5, moe", {"num_hidden_layers": 2}),
    "qwen3.5, text": Base("qwen3_5_text", {**tiny.RECURRENT, "num_hidden_layers": 2}),
    "mixtral": Base("mixtral", {**tiny.MIXTRAL, "sliding_window": 9}, is_old=True),
    "gpt_oss": Base("gpt_oss", {**tiny.GPT_OSS, "rope_parameters": {**tiny.YARN, "truncate": False}}),
    "glm4_moe": Base("glm4_moe", {**tiny.GLM, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "ernie4_5": Base("ernie4_5", {**tiny.ERNIE, "head_dim": 16}, is_old=True),
    "ernie4_5_moe": Base("ernie4_5_moe", tiny.ERNIE_MOE),
    "glm": Base("glm", tiny.GLM_4, is_old=True),
    "glm4": Base("glm4", tiny.GLM_4, is_old=True),
    "mellum": Base("mellum", {**tiny.MELLUM, "layer_types": ["sliding_attention", "full_attention"]}),
    "minimax_m2": Base("minimax_m2", tiny.MINIMAX, is_old=True),
    "granitemoe": Base("granitemoe", {key: it for key, it in tiny.GRANITE_SHARED.items() if "shared" not in key}),
    "bamba": Base("bamba", {**tiny.BAMBA, "num_hidden_layers": 2}),
    "falcon_h1": Base("falcon_h1", {**tiny.FALCON_H1, "num_hidden_layers": 2}),
    "internlm2": Base("internlm2", {}, is_old=True),
    "internlm3": Base("internlm3", {"head_dim": 16}, is_old=True),
    "minicpm": Base("minicpm", tiny.MINICPM, is_old=True),
    "minicpm3": Base("minicpm3", tiny.MINICPM_3),
    "granitemoehybrid": Base(
        "granitemoehybrid",
        {**tiny.GRANITE_HYBRID, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "granitemoeshared": Base("granitemoeshared", tiny.GRANITE_SHARED, is_old=True),
    "cohere2": Base("cohere2", tiny.COHERE, is_old=True),
    "bailing_hybrid": Base("bailing_hybrid", {**tiny.LING_2_6, "num_hidden_layers": 2, "layer_group_size": 2}),
    "bailing_moe_v2": Base("bailing_moe_v2", tiny.BAILING),
    "cohere2_moe": Base("cohere2_moe", tiny.COHERE_MOE),
    "ministral3": Base("ministral3", tiny.MINISTRAL),
    "ministral3, old": Base("ministral3", {**tiny.MINISTRAL, "sliding_window": 9}, is_old=True),
    "nemotron-nas": Base("nemotron-nas", tiny.NEMOTRON, is_old=True),
    "seed_oss": Base("seed_oss", tiny.SEED, is_old=True),
    "step3p5": Base("step3p5", {**tiny.STEP, "num_hidden_layers": 3}),
    "afmoe": Base("afmoe", tiny.AFMOE),
    "gemma": Base("gemma", {"head_dim": 12}, is_old=True),
    "smollm3": Base("smollm3", {**tiny.SMOLLM, **tiny.SWITCHED_ON}, is_old=True),
    "olmo3": Base(
        "olmo3",
        {**tiny.OLMO_3, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": tiny.TWO_ROPES},
    ),
    "exaone4": Base("exaone4", tiny.EXAONE_4, is_old=True),
    "hunyuan_v1_dense": Base("hunyuan_v1_dense", tiny.HUNYUAN, is_old=True),
    "hunyuan_v1_moe": Base("hunyuan_v1_moe", {**tiny.HUNYUAN_MOE, "moe_topk": 2}, is_old=True),
    "hy_v3": Base("hy_v3", {**tiny.HY_3, "num_shared_experts": 2}),
    "laguna": Base(
        "laguna",
        {
            **tiny.LAGUNA,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_attention_heads_per_layer": [6, 4],
        },
    ),
    "llama4_text": Base("llama4_text", {**tiny.LLAMA_4, "moe_layers": [1]}, is_old=True),
    "deepseek_v2": Base("deepseek_v2", {**tiny.LATENT, "num_hidden_layers": 2, "rope_parameters": tiny.LATENT_YARN}),
    "deepseek_v3": Base("deepseek_v3", {**tiny.DEEPSEEK_V3, "num_hidden_layers": 2}),
    "deepseek_v32": Base("deepseek_v32", {**tiny.DEEPSEEK_V32, "num_hidden_layers": 2}),
    "glm_moe_dsa": Base("glm_moe_dsa", {**tiny.GLM_5, "num_hidden_layers": 2, "indexer_types": ["full", "shared"]}),
    "kimi_linear": Base(
        "kimi_linear",
        {**tiny.KIMI_LINEAR, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "glm4_moe_lite": Base("glm4_moe_lite", {**tiny.GLM_LITE, "num_hidden_layers": 2}),
    "mistral4": Base("mistral4", {**tiny.MISTRAL_4, "num_hidden_layers": 2}),
    "nemotron_h": Base("nemotron_h", tiny.NEMOTRON_3_SUPER),
    "mimo_v2_flash": Base(
        "mimo_v2_flash",
        {**tiny.MIMO, "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    ),
    "lfm2": Base("lfm2", tiny.LFM_2),
    "lfm2_moe": Base("lfm2_moe", tiny.LFM_2_MOE),
    "gemma3, images": Base("gemma3 images", {"layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2 vl": Base("qwen2 vl", {}),
    "glm ocr": Base("glm ocr", {}),
    "hunyuan vl": Base("hunyuan vl", {}),
    "llava, pixtral": Base("llava, pixtral", {}),
    "ernie 4.5 vl": Base("ernie 4.5 vl", {}),
    "deepseek ocr 2": Base("deepseek ocr 2", {"mlp_layer_types": ["dense", "sparse"]}),
    "minicpm-v 4.6": Base("minicpm-v 4.6", {"num_hidden_layers": 2}),
    "paddleocr vl": Base("paddleocr vl", {}),
    "qwen2.5 vl": Base("qwen2.5 vl", {}),
    "qwen2.5 vl, as published": Base("qwen2.5 vl", {}, is_old=True),
    "qwen3 vl": Base("qwen3 vl", {}),
    "qwen3 vl, moe": Base("qwen3 vl, moe", {}),
    "glm4v": Base("glm4v", {}),
    "glm46v": Base("glm46v", {}),
    "gemma4, images": Base("gemma4 images", {"num_hidden_layers": 4}),
    "glm4v, moe": Base("glm4v, moe", {}),
    "mistral 3": Base("mistral 3", {}),
    "mistral 3, ministral": Base("mistral 3, ministral", {}),
    "muse glimmer": Base("muse glimmer", {"num_hidden_layers": 2}),
    "kimi k2.5": Base("kimi k2.5", {"num_hidden_layers": 2}),
    "internvl, qwen3": Base("internvl, qwen3", {}),
}
MISSING = "(deleted)"
VALUES: tuple[object, ...] = (MISSING, None, True, False, 0, 1, 2, -1, 0.5, "x", [], {})
SIZES = (3, 4, 8, 64)
FEW_VALUES = (None, True, False, 2)
KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "mrope", "proportional")
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")
SCALINGS: tuple[object, ...] = (
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mrope_section": [2, 1, 1]},
    {"type": "dynamic", "factor": 2.0},
    {"type": "mrope", "mrope_section": [2, 1, 1]},
    {"rope_type": "default", "rope_theta": 77.0},
    {"rope_theta": 77.0},
    {key: value for key, value in tiny.LLAMA3.items() if key != "rope_theta"},
)
# Values beside VALUES, by the last key of the path.
OWN_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "activation_function": (*ACTIVATIONS, "gelu_new", "gelu_fast"),
    "rope_type": KINDS,
    "type": KINDS,
    "rope_scaling": SCALINGS,
    "rope_parameters": SCALINGS,
    "layer_types": (
        ["full_attention"] * 2,
        ["sliding_attention"] * 2,
        ["sliding_attention", "full_attention"],
        ["full_attention"],
        ["chunked_attention"] * 2,
        ["linear_attention"] * 2,
        ["full_attention", "linear_attention"],
    ),
    "rope_theta": (100, 10_000.0, 1e6),
    "rope_local_base_freq": (100, 10_000.0),
    "factor": (4.0, 40.0),
    "original_max_position_embeddings": (8, 64, 128),
    "max_position_embeddings": (30, 64, 4096),
    "no_rope_layers": ([1, 0], [0, 1], [1, 1], [0, 0, 1], [1], [1, 2], [True, False]),
    "mlp_layer_types": (["sparse", "dense"], ["dense", "dense"], ["sparse", "sparse"], ["sparse"], ["x", "sparse"]),
    "compression_ratio": (1.0, 2.0),
    "layer_rope_theta": ([50.0, 500.0], [0, 0], [0, 7], [50.0], [50.0, -1]),
    "rotary_dim": (6, 7, 12, 13),
    "attn_type_list": ([1, 1], [1], [0, 1]),
    "scoring_func": ("sigmoid", "softmax"),
    "qk_norm_type": ("per_layer", "per_head"),
    "num_attention_heads_per_layer": ([4, 4], [6, 5], [6], [6, 4, 4]),
    "gating": ("per-head", "per-element", "per_head"),
    "gating_types": (["per_head"] * 2, ["per_element"] * 2, ["per_head", "per_element"]),
    "moe_layers": ([0], [0, 1], [2], []),
    "attention_chunk_size": (16, 40, 8192),
    "alpha": (2.0, 1000.0),
    "moe_topk": ([2, 1], [3, 3], [2], [2, 0]),
    "moe_intermediate_size": ([20, 20], [20, 16]),
    "num_shared_expert": ([1, 1], [1, 2]),
    "routed_scaling_factor": (2.5,),
    "layer_norm_eps": (1e-6, 1e-5, 0.1),
    "moe_norm_min": (1e-12, 1e-6),
    "sliding_window_pattern": ("LG", "LLLG", 3),
    "mlp_only_layers": ([0], [1], [0, 1]),
    "dtype": ("float32", "float16", "bfloat16", "float64", "auto"),
    "torch_dtype": ("float32", "float16", "bfloat16"),
    "eos_token_id": (96, 97, [2, 3]),
    "bos_token_id": (96, 97),
    "quantization_config": ({"quant_method": "fp8"},),
    "partial_rotary_factor": (0.75,),
    "rotary_pct": (0.75, 0.5),
    "router_jitter_noise": (0.01, 0.2),
    "rotary_emb_base": (100, 10_000.0),
    "rms_norm_eps": (1e-6, 1e-5, 0.1),
    "mrope_section": ([2, 1, 1], [1, 1, 2]),
}
ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor"),
    *("high_freq_factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    *("short_factor", "long_factor", "partial_rotary_factor", "mrope_section", "alpha"),
    "llama_4_scaling_beta",
)
ROPES = ("rope_parameters", "rope_scaling")
_SHARE = 0.8  # of a sample's time, beside the start of its processes
# By these the classes are chosen, here and there: of another class, other weights.
NOT_CHANGED = ("model_type", "architectures", "text_config", "vision_config")


def save_base(base: Base, folder: Path) -> Config:
    """Save a model and return its config.json."""
    image_kind = base.family.removesuffix(" images")
    if image_kind in tiny.IMAGE_MODELS and (base.family != image_kind or image_kind not in ("gemma3", "gemma4")):
        save_image_model(folder, image_kind, as_published=True, **(SMALL | base.changes))
    else:
        save_reference(folder, base.family, {**SMALL, **base.changes})
    values: Config = json.loads((folder / "config.json").read_text())
    if base.is_old and "text_config" in values:  # one object for all, with rope_scaling
        text = values.pop("text_config")
        text["rope_theta"] = text["rope_parameters"].pop("rope_theta")
        text["rope_scaling"] = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
        return {**text, **values}
    if base.is_old:
        rope = values.pop("rope_parameters")
        values["rope_theta"] = rope.pop("rope_theta")
        values["rope_scaling"] = rope if rope.get("rope_type") != "default" else None
    return values


def keys_of(values: Config) -> list[Path_]:
    """Return the paths of all keys that are changed: those of the file, of its family, and of the other families."""
    known = sorted({name for it in FAMILIES for name in it.keys.read | it.keys.without_effect | it.keys.refused.keys()})
    paths: list[Path_] = [(name,) for name in dict.fromkeys([*values, *known])]
    text = values.get("text_config")
    if isinstance(text, dict):
        paths += [("text_config", name) for name in dict.fromkeys([*text, *known])]
    for prefix in ((), ("text_config",)):
        place = at(values, prefix)
        for section in ROPES:
            if not isinstance(place, dict) or not isinstance(place.get(section), dict):
                continue
            nested = [key for key, it in place[section].items() if isinstance(it, dict)]
            paths += [
                (*prefix, section, *kind, name) for kind in ([(it,) for it in nested] or [()]) for name in ROPE_KEYS
            ]
    return [path for path in paths if path[-1] not in NOT_CHANGED]


def at(values: Any, path: Path_) -> Any:
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    return values


@dataclass(frozen=True, slots=True)
class Case:
    base: str
    path: Path_
    value: object

    @property
    def label(self) -> str:
        return f"{self.base}: {'.'.join(self.path)} = {json.dumps(self.value)}"

    def changed(self, values: Config) -> Config:
        changed = copy.deepcopy(values)
        place = at(changed, self.path[:-1])
        if self.value == MISSING:
            place.pop(self.path[-1], None)
        else:
            place[self.path[-1]] = self.value
        return changed


def cases_of(name: str, values: Config) -> Iterator[Case]:
    """Change a key of the file, or one that its family reads, in every way; a few values for what others read."""
    text = values.get("text_config", values)
    family = next(it for it in FAMILIES if it.model_type in (text["model_type"], f"{text['model_type']}_text"))
    inner = () if text is values else ("text_config",)
    for path in keys_of(values):
        is_own = (
            len(path) > len(inner) + 1
            or at(values, path) is not None
            or (path[:-1] == inner and path[-1] in family.keys.read | family.keys.refused.keys())
        )
        for value in (*VALUES, *OWN_VALUES.get(path[-1], SIZES)) if is_own else FEW_VALUES:
            yield Case(name, path, value)


class Comparison:
    """Logits of one base, by transformers and by the server. What is the same is computed once.

    read_config  of a folder; another one only to see that the comparison notices
    """

    def __init__(self, name: str, folder: Path, read_config: Callable[[Path], ModelConfig] = load_config) -> None:
        self.name, self.folder, self._read_config = name, folder, read_config
        self.values = save_base(BASES[name], folder)
        self._ours: dict[tuple[ModelConfig, Prompt], Tensor] = {}
        self._theirs: dict[tuple[str, Prompt], Tensor | None] = {}
        (folder / "config.json").write_text(json.dumps(self.values))
        if self._their_logits(tuple(prompt(NUM_TOKENS).tolist())) is None:
            raise RuntimeError("transformers does not compute the base itself, so that no change could be seen")

    def run(self, case: Case) -> tuple[Outcome, str]:
        """Return what came out, with a line about it."""
        (self.folder / "config.json").write_text(json.dumps(case.changed(self.values)))
        tokens, refusal, config = tuple(prompt(NUM_TOKENS).tolist()), None, None
        try:
            config = self._read_config(self.folder)
            tokens = tokens[: config.max_position]
            logits = self._our_logits(config, tokens)
        except ModelError as error:
            refusal = str(error)
        except Exception as error:
            return Outcome.CRASH, f"{type(error).__name__}: {error}"
        expected = self._their_logits(tokens)
        if refusal is not None:
            if expected is None:
                return Outcome.BOTH_REFUSE, refusal
            if "the weights do not fit config.json" in refusal:
                return Outcome.NO_FIT, refusal
            named = re.search(r"config\.json[\w, ]*: \w+(\.\w+)* (must be|\[|.* not supported)", refusal)
            return (Outcome.REFUSED if named else Outcome.UNNAMED), refusal
        if expected is None:
            return Outcome.LENIENT, ""
        error = (logits - expected).abs().max().item()
        if is_same(logits, expected):
            return Outcome.SAME, ""
        assert config is not None
        if "index_topk" in self.values:
            again = self._their_logits(tokens[::-1])
            if again is not None and is_same(self._our_logits(config, tokens[::-1]), again):
                return Outcome.DOCUMENTED, NEAR_TIE
        rope = config.attentions[-1].rope
        if rope.kind is RopeKind.LONGROPE and len(tokens) <= (rope.original_max_position or 0) < config.max_position:
            return Outcome.DOCUMENTED, LONGROPE
        if config.family == "youtu" and case.path[-1] == "pad_token_id":
            return Outcome.DOCUMENTED, PAD_ROW
        if case.path[-1] == "time_step_min":
            return Outcome.DOCUMENTED, LEAST_STEP
        return Outcome.DIFFERENT, f"error {error:.2g} of {expected.abs().max().item():.2g}"

    def _our_logits(self, config: ModelConfig, tokens: Prompt) -> Tensor:
        key = replace(config, eos_token_ids=(), bos_token_id=None, dtype="float32"), tokens
        if key not in self._ours:
            decoder = load_decoder(
                self.folder, config, dtype=torch.float32, device=tiny.CPU, load_format=LoadFormat.AUTO
            )
            self._ours[key] = PagedRunner(decoder).logits(torch.tensor(tokens), [len(tokens)])
        return self._ours[key]

    def _their_logits(self, tokens: Prompt) -> Tensor | None:
        """None where transformers refuses, or would make up weights."""
        try:
            config = AutoConfig.from_pretrained(self.folder)
            key = json.dumps(config.to_dict(), sort_keys=True, default=str), tokens
            if key not in self._theirs:
                self._theirs[key] = self._reference(config, tokens)
            return self._theirs[key]
        except Exception:
            return None

    def _reference(self, config: Any, tokens: Prompt) -> Tensor | None:
        auto = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
        try:
            model, report = auto.from_pretrained(
                self.folder,
                config=config,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
        except Exception:
            return None
        if report["missing_keys"] or report["mismatched_keys"]:
            return None
        try:
            return reference_logits(model.eval(), torch.tensor(tokens))
        except Exception:
            return None


def is_same(logits: Tensor, expected: Tensor) -> bool:
    return torch.allclose(logits, expected, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)


@dataclass(frozen=True, slots=True)
class Work:
    """Cases of one base: all, or those of a sample that begin within `time_s`, in an order of its own."""

    base: str
    seed: int = 0
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Outcomes of some cases of a base, of `num_all`."""

    base: str
    num_all: int
    outcomes: list[tuple[Case, Outcome, str]]


def run_work(work: Work) -> Found:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    begun, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            comparison = Comparison(work.base, Path(folder))
        except Exception as error:  # of a class of transformers' that no pipe carries: the pool would wait for ever
            raise RuntimeError(f"{work.base}: {error}") from None
        cases = list(cases_of(work.base, comparison.values))
        if work.time_s is not None:
            random.Random(f"{work.seed} {work.base}").shuffle(cases)
        for case in cases:
            if work.time_s is not None and time.monotonic() - begun > work.time_s:
                break
            outcomes.append((case, *comparison.run(case)))
    return Found(work.base, len(cases), outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", nargs="*", default=list(BASES), choices=list(BASES), metavar="NAME")
    parser.add_argument("--first", type=int, help="number of the sample")
    parser.add_argument("--time-limit", type=float, metavar="S", help="run a sample of about so many seconds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--out", type=Path, help="JSON file of the counts")
    parser.add_argument("--all", action="store_true", help="print each case that is not the same")
    args = parser.parse_args()
    begun, found = time.monotonic(), []
    time_s = None if args.time_limit is None else _SHARE * args.time_limit * args.jobs / len(args.bases)
    works = [Work(name, args.first or 0, time_s) for name in args.bases]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for it in pool.imap_unordered(run_work, works):
            found.append(it)
            took_s = time.monotonic() - begun
            print(f"{it.base}: {len(it.outcomes)} of {it.num_all} cases, {took_s:.0f} s", flush=True)
    counts: dict[str, Counter[str]] = {}
    documented: Counter[str] = Counter()
    failures = []
    for case, outcome, line in (it for one in found for it in one.outcomes):
        counts.setdefault(case.base, Counter())[outcome.value] += 1
        documented[line] += outcome is Outcome.DOCUMENTED
        said = f"{outcome.value}: {case.label}: {line}"
        if outcome in FAILURES:
            failures.append(said)
        if outcome in FAILURES or (args.all and outcome is not Outcome.SAME):
            print(said)
    total = sum(counts.values(), Counter[str]())
    num_all = sum(it.num_all for it in found)
    print(f"{total.total()} of {num_all} changed configs, {len(failures)} wrong: {dict(total)}")
    if args.out is not None:
        result = {
            "command": " ".join(["python", "trials/config_keys.py", *sys.argv[1:]]),
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cases": total.total(),
            "cases_in_all": num_all,
            "outcomes": dict(total),
            "outcomes_by_base": {name: dict(counts[name]) for name in BASES if name in counts},
            "documented_differences": {line: num for line, num in documented.items() if num},
            "others": failures,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
