"""The served layers beside the plain forward pass: right ones pass, and every planted fault is seen."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.catalog import path_named
from kernels.experts.few_bits.weights import AnyExperts
from kernels.linear.weights import PlainWeight
from kernels.recurrence.calls import RecurrenceRows
from kernels.vocabulary.shape import Phase
from qualification.measure.faults.indexed_faults import IndexedFault, wrong_indexed_kernel
from qualification.model.config import ExpertsConfig, LayerConfig, NormsConfig, QKNorm, RopeConfig
from server.engine.proof.layer_steps import LayerSteps, TooSmall
from server.engine.scheduling.sequence import Sequence
from server.model.decoder import Decoder, LayerObserver, Operators
from server.model.experts import ExpertProducts, products_of
from server.model.layers import LayerWeights, MixtureWeights
from server.model.linear import Linear
from server.model.step import Step
from server.settings import DtypeChoice
from support.engine.checked_layers import CheckedLayers, Tensors, edited
from support.models.served_families import saved
from support.models.tiny_families import (
    AFMOE,
    APERTUS,
    BAILING,
    BAMBA,
    COHERE,
    COHERE_MOE,
    COMMAND_R,
    CWM,
    CWM_TOKENS,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DOTS,
    ERNIE_MOE,
    EXAONE_4,
    EXAONE_MOE,
    FALCON_H1,
    FALCON_H1_NORMED,
    GEMMA,
    GEMMA_4_MOE,
    GEMMA_4_SMALL,
    GLM,
    GLM_4,
    GLM_5,
    GPT_2,
    GRANITE_HYBRID,
    HUNYUAN_MOE,
    KIMI_LINEAR,
    LAGUNA,
    LFM_2,
    LFM_2_MOE,
    LING_2_6,
    LLAMA3,
    LLAMA_4,
    MIMO,
    MINICPM,
    MINICPM_3,
    MINIMAX,
    MINISTRAL,
    MINISTRAL_8B,
    MISTRAL_4,
    MIXED,
    MULTIPLIERS,
    MXFP4,
    NEMOTRON,
    NEMOTRON_3,
    NEMOTRON_3_SUPER,
    NEOX,
    OLMOE,
    OPT,
    PHI_MOE,
    QWEN_2_MOE,
    QWEN_3_MOE,
    QWEN_3_NEXT,
    RECURRENT,
    STEP,
    SWASH,
    SWASH_MOE,
    YOUTU,
    save_mxfp4,
)
from support.models.tiny_images import GEMMA as TINY_GEMMA
from support.models.tiny_images import GEMMA_4_LARGE, save_tiny

WINDOW = {"sliding_window": 9}
LAGUNA_16 = {**LAGUNA, "head_dim": 16, "layer_types": MIXED[:2], "num_attention_heads_per_layer": [6, 4]}
_SWASH_2 = {"head_dim": 16, "layer_types": MIXED[:2], "layer_rope_theta": [50.0, 0]}
_OF_TWO_LAYERS = {
    "layer_types": MIXED[:2], "mlp_layer_types": ["dense", "sparse"], "swiglu_limits": [0, 0.5],
    "swiglu_limits_shared": [0.7, 0.6],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "qwen 3": ("qwen3", {"head_dim": 16}),
    "gemma 2": ("gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": 3.0}),
    "gemma 4, experts": ("gemma4", GEMMA_4_MOE),
    "gemma 4, small": (
        "gemma4", {**GEMMA_4_SMALL, "num_hidden_layers": 6, "layer_types": GEMMA_4_SMALL["layer_types"][:2] * 3}
    ),
    "granite": ("granite", MULTIPLIERS),
    "mistral": ("mistral", WINDOW),
    "glm 4": ("glm4", GLM_4),
    "ernie 4.5 moe": ("ernie4_5_moe", ERNIE_MOE),
    "minimax m2": ("minimax_m2", {**MINIMAX, "head_dim": 16, "rotary_dim": 8}),
    "bamba": ("bamba", {**BAMBA, "head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "internlm 2": ("internlm2", {"attention_bias": True}),
    "internlm 3": ("internlm3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "minicpm": ("minicpm", {**MINICPM, "attention_bias": True}),
    "minicpm 3": ("minicpm3", MINICPM_3),
    "falcon h1": ("falcon_h1", {**FALCON_H1, "head_dim": 16}),
    "falcon h1, a norm": (
        "falcon_h1",
        {**FALCON_H1_NORMED, "head_dim": 16, "attention_in_multiplier": 1.0, "attention_bias": True, "mlp_bias": True},
    ),
    "granite hybrid": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "bailing": ("bailing_moe_v2", {**BAILING, "head_dim": 16, "use_bias": True}),
    "cohere 2": ("cohere2", {**COHERE, "attention_bias": True}),
    "cohere 2 moe": ("cohere2_moe", {**COHERE_MOE, "head_dim": 16}),
    "ministral 3": ("ministral3", MINISTRAL),
    "exaone 4": ("exaone4", {**EXAONE_4, "head_dim": 16}),
    "laguna": ("laguna", LAGUNA_16),
    "mimo v2": (
        "mimo_v2_flash", {**MIMO, **WINDOW, "layer_types": MIXED[:2], "mlp_layer_types": ["dense", "sparse"]}
    ),
    "afmoe": ("afmoe", {**AFMOE, "hidden_size": 80, "head_dim": 16, "global_attn_every_n_layers": 2}),  # no square
    "step 3.5": ("step3p5", {**STEP, "head_dim": 16, **_OF_TWO_LAYERS}),
    "llama 4": ("llama4_text", {**LLAMA_4, "head_dim": 16, "moe_layers": [1], "attention_chunk_size": 64}),
    "hunyuan moe": ("hunyuan_v1_moe", {**HUNYUAN_MOE, "moe_topk": [3, 1]}),
    "nemotron": ("nemotron-nas", NEMOTRON),
    "nemotron 3": ("nemotron_h", {**NEMOTRON_3, "head_dim": 16}),
    "nemotron 3 super": ("nemotron_h", {**NEMOTRON_3_SUPER, "head_dim": 16}),
    "olmo 2": ("olmo2", {}),
    "phi 3": ("phi3", {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.75}}),
    "arcee": ("arcee", {"mlp_bias": True}),
    "command r": ("cohere", {**COMMAND_R, "attention_bias": True}),
    "cwm": ("cwm", {**CWM, "head_dim": 16, "layer_types": MIXED[:2], **CWM_TOKENS}),
    "dots": ("dots1", {**DOTS, "head_dim": 16}),
    "k-exaone": ("exaone_moe", {**EXAONE_MOE, "head_dim": 16}),
    "flex olmo": ("flex_olmo", OLMOE),
    "granite swash": ("granite_swa", {**SWASH, **_SWASH_2}),
    "granite swash, experts": ("granitemoe_swa", {**SWASH_MOE, **_SWASH_2}),
    "helium": ("helium", {"head_dim": 16}),
    "ministral": ("ministral", {**MINISTRAL_8B, "head_dim": 16, "layer_types": MIXED[:2]}),
    "olmoe": ("olmoe", OLMOE),
    "solar open": ("solar_open", {**GLM, "head_dim": 16, "n_group": 4, "topk_group": 2}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm, one norm": ("stablelm", {"use_parallel_residual": True}),
    "nemotron 4": ("nemotron", {"mlp_bias": True, "attention_bias": True}),
    "jais 2": ("jais2", {}),
    "olmo": ("olmo", {"attention_bias": True}),
    "starcoder 2": ("starcoder2", WINDOW),
    "starcoder 2, erf": ("starcoder2", {"hidden_act": "gelu"}),
    "phi 2": ("phi", {}),
    "apertus": ("apertus", {**APERTUS, "head_dim": 16}),
    "gpt bigcode": ("gpt_bigcode", GPT_2),
    "gpt bigcode, keys of each head": ("gpt_bigcode", {**GPT_2, "multi_query": False}),
    "gpt neox": ("gpt_neox", NEOX),
    "gpt neox, one after the other": ("gpt_neox", {**NEOX, "use_parallel_residual": False}),
    "opt": ("opt", OPT),
    "phi 3.5 moe": ("phimoe", {**PHI_MOE, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3}),
    "gpt 2": ("gpt2", {**GPT_2, "scale_attn_by_inverse_layer_idx": True}),
    "youtu": ("youtu", YOUTU),
    "qwen 2 moe": ("qwen2_moe", QWEN_2_MOE),
    "qwen 3 moe": ("qwen3_moe", {**QWEN_3_MOE, "norm_topk_prob": True}),
    "qwen 3 next": ("qwen3_next", {**QWEN_3_NEXT, "head_dim": 16}),
    "qwen 3.5": ("qwen3_5_text", {**RECURRENT, "head_dim": 16}),
    "kimi linear": (
        "kimi_linear", {**KIMI_LINEAR, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    ),
    "ling 2.6": ("bailing_hybrid", LING_2_6),
    "lfm2": ("lfm2", {**LFM_2, "head_dim": 16, "conv_bias": True}),
    "lfm2, experts": ("lfm2_moe", {**LFM_2_MOE, "head_dim": 16}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 16, **WINDOW}),
    "deepseek v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek v3.2": ("deepseek_v32", DEEPSEEK_V32),
    "glm 5": ("glm_moe_dsa", {**GLM_5, "indexer_types": ["full", "shared"]}),
    "mistral 4": ("mistral4", {**MISTRAL_4, "q_lora_rank": None}),
    "glm": (
        "glm4_moe",
        {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 16, "n_group": 4,
         "topk_group": 2, "use_qk_norm": True},
    ),
}  # fmt: skip


class Models:
    """Each of MODELS, made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, CheckedLayers] = {}

    def __getitem__(self, name: str) -> CheckedLayers:
        if name not in self._made:
            folder, (family, changes) = self._folder / name, MODELS[name]
            saved(folder, family, **changes)
            self._made[name] = CheckedLayers.made(folder)
        return self._made[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_every_family_are_proven_in_fp32(name: str, models: Models) -> None:
    found = models[name].check()
    assert found.first is None, str(found.first)
    assert found.largest.factor > 0.01


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", DtypeChoice.FP16),
        ("gemma 2", DtypeChoice.BF16),
        ("qwen 2 moe", DtypeChoice.BF16),
        ("qwen 3 next", DtypeChoice.BF16),
        ("nemotron 4", DtypeChoice.BF16),
        ("starcoder 2", DtypeChoice.BF16),
        ("phi 2", DtypeChoice.FP16),
        ("opt", DtypeChoice.BF16),
        ("apertus", DtypeChoice.BF16),
        ("phi 3.5 moe", DtypeChoice.BF16),
    ],
)
def test_layers_are_proven_in_16_bits(name: str, dtype: DtypeChoice, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    saved(tmp_path / "model", family, **changes)
    found = CheckedLayers.made(tmp_path / "model", dtype).check()
    assert found.first is None, str(found.first)


@pytest.mark.parametrize("kind", [TINY_GEMMA, GEMMA_4_LARGE])
def test_a_mask_that_is_causal_inside_an_image_is_named(kind: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, kind)
    subject, own = CheckedLayers.made(tmp_path), path_named("sdpa.cpu")
    right = subject.check()
    assert right.first is None, str(right.first)

    def causal(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        own.run(q, k, v, batch, replace(flags, spans=None), out)  # type: ignore[misc]

    subject.runner.worker.dispatcher.substitute(replace(own, run=causal))
    found = subject.check().first
    assert found is not None
    assert (found.section, found.layer, found.row) == ("attention", 0, "a prompt with an image")


@pytest.mark.parametrize("kind", [TINY_GEMMA, GEMMA_4_LARGE])
def test_spans_that_a_step_has_wrong_are_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels compute what the step says: attention, which is off too, is not the first to be named."""
    save_tiny(tmp_path, kind)
    subject, written = CheckedLayers.made(tmp_path), Sequence.seen_spans

    def late(seq: Sequence, start: int, stop: int, window: int | None) -> NDArray[np.int32]:
        spans = written(seq, start, stop, window)
        return np.where(spans > 0, spans + np.array([0, 1]), 0).clip(max=stop).astype(np.int32)

    monkeypatch.setattr(Sequence, "seen_spans", late)
    found = subject.check().first
    assert found is not None
    assert (found.section, found.layer, found.row) == ("spans of images in a step", None, "a prompt with an image")
    assert "the token at position 5 has the span [5, " in str(found)


def test_experts_of_mxfp4_are_proven(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "model", {**MXFP4, "head_dim": 16, "bos_token_id": None, "eos_token_id": None})
    found = CheckedLayers.made(tmp_path / "model").check()
    assert found.first is None, str(found.first)


@dataclass(frozen=True)
class Fault:
    """A wrong file that is served, or a wrong decoder of the right ones, and where that is seen."""

    model: str
    section: str
    config: dict[str, object] | None = None
    tensors: Callable[[Tensors], Tensors] | None = None
    decoder: Callable[[Decoder], Decoder] | None = None
    row: str = ""  # what the first wrong row begins with


class NextPosition(Decoder):
    """Rotates by position + 1, queries and keys alike."""

    def forward(self, step: Step, observer: LayerObserver | None = None) -> Tensor:
        return super().forward(replace(step, positions=step.positions + 1), observer)


class DecodeAtZero(Decoder):
    """Rotates each token of a decode step as if it were a sequence's first one."""

    def forward(self, step: Step, observer: LayerObserver | None = None) -> Tensor:
        is_decode = step.token_ids.shape[0] < 3
        shown = replace(step, positions=torch.zeros_like(step.positions)) if is_decode else step
        return super().forward(shown, observer)


class SlotsSwapped(Decoder):
    """Writes keys and values of the last two tokens of a step to each other's slots."""

    def forward(self, step: Step, observer: LayerObserver | None = None) -> Tensor:
        slots = torch.cat((step.slots[:-2], step.slots[-2:].flip(0)))
        return super().forward(replace(step, slots=slots), observer)


class OtherSources(Decoder):
    """Begins with states of other slots: `rows` gives those of a step from its own."""

    def __init__(self, decoder: Decoder, rows: Callable[[RecurrenceRows], RecurrenceRows]) -> None:
        super().__init__(decoder.config, decoder.weights)
        self._rows = rows

    def forward(self, step: Step, observer: LayerObserver | None = None) -> Tensor:
        assert step.states is not None
        states = replace(step.states, rows=self._rows(step.states.rows))
        return super().forward(replace(step, states=states), observer)


def swapped_slots(rows: RecurrenceRows) -> RecurrenceRows:
    """Give decode rows each other's states."""
    return rows if rows.phase is not Phase.DECODE else replace(rows, sources=rows.sources.flip(0))


def stale_snapshot(rows: RecurrenceRows) -> RecurrenceRows:
    """Begin from the state that the snapshot's sequence has by now."""
    return replace(rows, sources=torch.where(rows.sources == 3, 0, rows.sources))


def without_result_gates(weight: Tensor) -> Tensor:
    by_head = weight.view(-1, 2, 16, weight.shape[1]).clone()
    by_head[:, 1] = 0
    return by_head.view(weight.shape)


def with_layers(
    decoder: Decoder, change: Callable[[LayerConfig, LayerWeights], tuple[LayerConfig, LayerWeights]]
) -> Decoder:
    pairs = [change(*it) for it in zip(decoder.config.layers, decoder.weights.layers, strict=True)]
    config = replace(decoder.config, layers=tuple(it for it, _ in pairs))
    return Decoder(config, replace(decoder.weights, layers=tuple(it for _, it in pairs)))


def without_norms(decoder: Decoder) -> Decoder:
    def change(config: LayerConfig, weights: LayerWeights) -> tuple[LayerConfig, LayerWeights]:
        norms = NormsConfig(before=False)
        return replace(config, norms=norms), replace(weights, attention_norm=None, feed_forward_norm=None)

    return with_layers(decoder, change)


def without_jitter(config: LayerConfig, weights: LayerWeights) -> tuple[LayerConfig, LayerWeights]:
    """Weigh the experts of a sparse mixer by the softmax over all of them."""
    assert isinstance(config.feed_forward, ExpertsConfig)
    return replace(config, feed_forward=replace(config.feed_forward, jitter=None)), weights


def as_two_norms(decoder: Decoder) -> Decoder:
    """Give the feed-forward the norm of the residual behind attention, of the weights of attention's."""

    def change(config: LayerConfig, weights: LayerWeights) -> tuple[LayerConfig, LayerWeights]:
        own = replace(
            weights, feed_forward_norm=weights.attention_norm, feed_forward_norm_bias=weights.attention_norm_bias
        )
        return replace(config, norms=NormsConfig()), own

    return with_layers(decoder, change)


def without_qk_norm(decoder: Decoder) -> Decoder:
    def change(config: LayerConfig, weights: LayerWeights) -> tuple[LayerConfig, LayerWeights]:
        attention = replace(config.attention, qk_norm=QKNorm.NONE)
        return replace(config, mixer=attention), replace(weights, q_norm=None, k_norm=None)

    return with_layers(decoder, change)


def without_scaled_rotation(decoder: Decoder) -> Decoder:
    def change(config: LayerConfig, weights: LayerWeights) -> tuple[LayerConfig, LayerWeights]:
        rope = RopeConfig(config.attention.rope.theta)
        return replace(config, mixer=replace(config.attention, rope=rope)), weights

    return with_layers(decoder, change)


def without_shared_expert(decoder: Decoder) -> Decoder:
    def change(config: LayerConfig, weights: LayerWeights) -> tuple[LayerConfig, LayerWeights]:
        fed, mixture = config.feed_forward, weights.feed_forward
        assert isinstance(fed, ExpertsConfig)
        assert isinstance(mixture, MixtureWeights)
        shown = replace(mixture, shared=None, shared_gate=None)
        return replace(config, feed_forward=replace(fed, shared=None)), replace(weights, feed_forward=shown)

    return with_layers(decoder, change)


def with_shares(change: Callable[[Tensor], Tensor]) -> Callable[[Decoder], Decoder]:
    """Change the weights of the experts that each token visits."""

    def changed(config: ExpertsConfig, weights: AnyExperts) -> ExpertProducts:
        right = products_of(config, weights)
        return lambda hidden, experts, shares: right(hidden, experts, change(shares))

    return lambda decoder: Decoder(decoder.config, decoder.weights, operators=Operators(experts=changed))


def with_attention(**changes: object) -> Callable[[Decoder], Decoder]:
    """Compute the layers that read the keys of another one, or those that do not, by another configuration."""

    def change(config: LayerConfig, weights: LayerWeights) -> tuple[LayerConfig, LayerWeights]:
        attention = config.attention
        if attention.has_own_keys == ("reads_keys_of" in changes) or attention.window is None:
            return config, weights
        return replace(config, mixer=replace(attention, **changes)), weights  # type: ignore[arg-type]

    return lambda decoder: with_layers(decoder, change)


def config_of(**changes: object) -> Callable[[Decoder], Decoder]:
    return lambda decoder: Decoder(replace(decoder.config, **changes), decoder.weights)  # type: ignore[arg-type]


def moved(changes: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    """Give each tensor the numbers of another one."""
    return lambda tensors: {name: tensors[changes(name)].clone() for name in tensors}


def swapped(one: str, other: str) -> Callable[[str], str]:
    return lambda name: name.replace(one, "?").replace(other, one).replace("?", other)


def tied(decoder: Decoder) -> Decoder:
    head = Linear(PlainWeight(decoder.weights.embedding))
    return Decoder(decoder.config, replace(decoder.weights, head=head))


def replaced(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: change(it) if part in name else it for name, it in tensors.items()}


def by_kind(rows: Tensor) -> Tensor:
    """Put the rows of all queries before those of all keys and all values, of heads of 16 numbers."""
    return rows.view(-1, 3, 16, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


def queries_in_the_place_of_keys(tensors: Tensors) -> Tensors:
    """Fill the rows of keys with the first rows of queries."""
    pairs = {name: tensors[name.replace("k_proj", "q_proj")] for name in tensors if "k_proj.weight" in name}
    return tensors | {name: rows[: tensors[name].shape[0]].clone() for name, rows in pairs.items()}


def neighbours_first(weight: Tensor) -> Tensor:
    """Order the rows of each head of 16 as a rotation of neighbouring dimensions has them."""
    return weight.view(-1, 8, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def with_heads(weight: Tensor, rows: slice, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change some rows of each of four heads."""
    heads = weight.unflatten(0, (4, -1)).clone()
    heads[:, rows] = change(heads[:, rows])
    return heads.flatten(0, 1)


def of_neighbours(rows: slice) -> Callable[[Tensor], Tensor]:
    return lambda weight: with_heads(weight, rows, lambda it: it.roll(1, 0))


def latents_as_values(weight: Tensor) -> Tensor:
    return with_heads(weight, slice(PLAIN, None), lambda it: torch.eye(*it.shape[1:]).expand_as(it))


def without_rotated_rows(weight: Tensor) -> Tensor:
    return with_heads(weight, slice(PLAIN, None), torch.zeros_like)


PLAIN = 10  # numbers of a head of DEEPSEEK_V3 that are not rotated
FAULTS: dict[str, Fault] = {
    "epsilon of a norm": Fault("llama", "what attention reads", {"rms_norm_eps": 1e-5}),
    "offset of a norm": Fault("gemma 2", "what attention reads", decoder=config_of(zero_centred_norms=False)),
    "norm skipped": Fault("llama", "what attention reads", decoder=without_norms),
    "gelu approximated where it is not": Fault(
        "starcoder 2, erf", "residual behind the feed-forward", {"hidden_act": "gelu_new"}
    ),
    "bias of the head forgotten": Fault("phi 2", "logits", tensors=replaced("lm_head.bias", torch.zeros_like)),
    "bias of a norm forgotten": Fault(
        "stablelm", "what attention reads", tensors=replaced("1.input_layernorm.bias", torch.zeros_like)
    ),
    "bias of the final norm of another model": Fault(
        "stablelm", "logits", tensors=replaced("model.norm.bias", lambda it: it * 1.01)
    ),
    "two norms where one has both": Fault("stablelm, one norm", "what the feed-forward reads", decoder=as_two_norms),
    "feed-forward behind attention where it is beside": Fault(
        "gpt neox", "what the feed-forward reads", {"use_parallel_residual": False}
    ),
    "heads of queries, keys and values not taken apart": Fault(
        "gpt neox", "queries", tensors=replaced("query_key_value.weight", by_kind)
    ),
    "norm of the neighbour layer": Fault(
        "llama", "what attention reads", tensors=moved(lambda it: it.replace(".0.input_lay", ".1.input_lay"))
    ),
    "weight of the neighbour layer": Fault(
        "llama", "queries", tensors=moved(lambda it: it.replace("1.self_attn.q_proj.w", "0.self_attn.q_proj.w"))
    ),
    "rotation by position + 1": Fault("llama", "queries", decoder=lambda it: NextPosition(it.config, it.weights)),
    "decode rotated by position 0": Fault(
        "llama", "queries", decoder=lambda it: DecodeAtZero(it.config, it.weights), row="decode"
    ),
    "theta of another model": Fault(
        "qwen 3", "queries", {"rope_parameters": {"rope_type": "default", "rope_theta": 9e3}}
    ),
    "rotation of neighbours": Fault("qwen 3", "queries", tensors=replaced("q_proj.weight", neighbours_first)),
    "rotation's scaling forgotten": Fault("llama", "queries", decoder=without_scaled_rotation),
    "norm of queries and keys forgotten": Fault("qwen 3", "queries", decoder=without_qk_norm),
    "residual added twice": Fault("llama", "residual behind attention", decoder=config_of(residual_scale=2.0)),
    "depth scaled wrong": Fault("minicpm 3", "residual behind attention", {"scale_depth": 1.21}),
    "heads of groups in another order": Fault(
        "internlm 2", "queries", tensors=replaced("wqkv.weight", lambda it: it.roll(8, 0))
    ),
    "residual scaled wrong": Fault("granite", "residual behind attention", {"residual_multiplier": 0.61}),
    "embedding off by one row": Fault("llama", "embedding", tensors=replaced("embed_tokens", lambda it: it.roll(1, 0))),
    "learned positions forgotten": Fault("opt", "embedding", decoder=config_of(positions=None)),
    "learned positions from the first row on": Fault(
        "opt", "embedding", decoder=lambda it: config_of(positions=replace(it.config.positions, first=0))(it)
    ),
    "decode at the learned position 0": Fault(
        "opt", "embedding", decoder=lambda it: DecodeAtZero(it.config, it.weights), row="decode"
    ),
    "numbers of another layer's xielu": Fault(
        "apertus",
        "residual behind the feed-forward",
        tensors=moved(lambda it: it.replace(".0.mlp.act_fn.alpha_n", ".1.mlp.act_fn.alpha_n")),
    ),
    "relu where it is gelu": Fault("opt", "residual behind the feed-forward", {"activation_function": "gelu"}),
    "embedding's scale forgotten": Fault("gemma 2", "embedding", decoder=config_of(embedding_scale=1.0)),
    "softcap of logits forgotten": Fault("gemma 2", "logits", {"final_logit_softcapping": None}),
    "gates of a feed-forward scaled wrong": Fault(
        "falcon h1", "residual behind the feed-forward", {"mlp_multipliers": [0.71, 0.6]}
    ),
    "feed-forward scaled wrong": Fault(
        "falcon h1", "residual behind the feed-forward", {"mlp_multipliers": [0.7, 0.61]}
    ),
    "steps of a state space scaled wrong": Fault(
        "falcon h1", "gates of a recurrence", {"ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 1.41]}
    ),
    "x and gates of a state space scaled alike": Fault(
        "falcon h1", "what a recurrence reads", {"ssm_multipliers": [0.8, 0.8, 0.9, 1.1, 1.4]}
    ),
    "attention scaled wrong beside a recurrence": Fault(
        "falcon h1", "residual behind attention", {"attention_out_multiplier": 0.71}
    ),
    "recurrence scaled wrong beside attention": Fault(
        "falcon h1", "residual behind attention", {"ssm_out_multiplier": 0.61}
    ),
    "slots of states beside attention swapped": Fault(
        "falcon h1", "recurrence", decoder=lambda it: OtherSources(it, swapped_slots)
    ),
    "divisor of logits forgotten": Fault("granite", "logits", {"logits_scaling": 1.0}),
    "gate and up swapped": Fault(
        "qwen 3", "residual behind the feed-forward",
        tensors=moved(swapped("gate_proj", "up_proj")),
    ),
    "queries, keys and values split wrong": Fault(
        "phi 3", "queries", tensors=replaced("qkv_proj", lambda it: it.roll(1, 0))
    ),
    "keys and values swapped": Fault(
        "qwen 3", "keys",
        tensors=moved(swapped("k_proj", "v_proj")),
    ),
    "keys in each other's slots": Fault("llama", "keys", decoder=lambda it: SlotsSwapped(it.config, it.weights)),
    "queries in the place of keys": Fault("qwen 3", "keys", tensors=queries_in_the_place_of_keys),
    "a KV head repeated": Fault("qwen 3", "keys", tensors=replaced("k_proj", lambda it: it[:16].repeat(2, 1))),
    "softmax in place of a sparse mixer": Fault(
        "phi 3.5 moe", "residual behind the feed-forward", decoder=lambda it: with_layers(it, without_jitter)
    ),
    "jitter of another model": Fault("phi 3.5 moe", "residual behind the feed-forward", {"router_jitter_noise": 0.01}),
    "router without renormalisation": Fault(
        "qwen 3 moe", "residual behind the feed-forward", {"norm_topk_prob": False}
    ),
    "router that always renormalises": Fault(
        "qwen 2 moe", "residual behind the feed-forward", {"norm_topk_prob": True}
    ),
    "shared expert dropped": Fault("qwen 2 moe", "residual behind the feed-forward", decoder=without_shared_expert),
    "gate of the shared expert left out": Fault(
        "qwen 3 next", "residual behind the feed-forward",
        decoder=with_shares(lambda it: F.pad(it[:, :-1], (0, 1), value=1)),
    ),
    "sigmoid of the gate left out": Fault(
        "qwen 3 next", "residual behind the feed-forward",
        decoder=with_shares(lambda it: torch.cat((it[:, :-1], it[:, -1:].logit()), 1)),
    ),
    "gate of the shared expert on another": Fault(
        "qwen 3 next", "residual behind the feed-forward", decoder=with_shares(lambda it: it.roll(1, 1))
    ),
    "experts swapped": Fault(
        "qwen 3 moe", "residual behind the feed-forward",
        tensors=moved(lambda it: it.replace("experts.1.", "experts.2.")),
    ),
    "correction bias dropped": Fault(
        "glm", "residual behind the feed-forward", tensors=replaced("correction_bias", torch.zeros_like)
    ),
    "correction bias in steps of 1/32": Fault(
        "glm", "residual behind the feed-forward",
        tensors=replaced("correction_bias", lambda it: (it * 32).round() / 32),
    ),
    "latent of experts skipped": Fault(
        "nemotron 3 super", "residual behind the feed-forward",
        tensors=replaced("fc1_latent_proj", lambda it: torch.eye(*it.shape)),
    ),
    "product behind experts skipped": Fault(
        "nemotron 3 super", "residual behind the feed-forward",
        tensors=replaced("fc2_latent_proj", lambda it: torch.eye(*it.shape)),
    ),
    "scale of experts' weights left out": Fault(
        "nemotron 3", "residual behind the feed-forward", {"routed_scaling_factor": 1.0}
    ),
    "head tied where it is not": Fault("llama", "logits", decoder=tied),
    "one tensor loaded twice": Fault(
        "llama", "values", tensors=moved(lambda it: it.replace("1.self_attn.v_proj.w", "1.self_attn.k_proj.w"))
    ),
    "bias of queries dropped": Fault("llama", "queries", tensors=replaced("q_proj.bias", torch.zeros_like)),
    "bias behind attention dropped": Fault(
        "llama", "residual behind attention", tensors=replaced("o_proj.bias", torch.zeros_like)
    ),
    "scale of a layer forgotten": Fault(
        "gemma 4, small", "residual behind the layer", tensors=replaced("1.layer_scalar", torch.ones_like)
    ),
    "embeddings of the next layer": Fault(
        "gemma 4, small", "residual behind the layer",
        tensors=replaced("embed_tokens_per_layer", lambda it: it.roll(-6, 1)),
    ),
    "keys of another layer read": Fault("gemma 4, small", "attention", decoder=with_attention(reads_keys_of=0)),
    "norm of values forgotten": Fault("gemma 4, experts", "values", decoder=with_attention(norms_values=False)),
    "norms beside experts swapped": Fault(
        "gemma 4, experts", "residual behind the feed-forward",
        tensors=moved(swapped("post_feedforward_layernorm_1", "post_feedforward_layernorm_2")),
    ),
    "scales of experts dropped": Fault(
        "gemma 4, experts", "residual behind the feed-forward", tensors=replaced("per_expert_scale", torch.ones_like)
    ),
    "final norm skipped": Fault("llama", "logits", tensors=replaced("model.norm", torch.ones_like)),
    "slots of states swapped": Fault("qwen 3.5", "recurrence", decoder=lambda it: OtherSources(it, swapped_slots)),
    "a snapshot that is stale": Fault("qwen 3.5", "recurrence", decoder=lambda it: OtherSources(it, stale_snapshot)),
    "taps of a convolution reversed": Fault(
        "qwen 3.5", "recurrence", tensors=replaced("conv1d", lambda it: it.flip(2))
    ),
    "slots of inputs swapped": Fault("lfm2", "convolution", decoder=lambda it: OtherSources(it, swapped_slots)),
    "stale snapshot of inputs": Fault("lfm2", "convolution", decoder=lambda it: OtherSources(it, stale_snapshot)),
    "bias of a convolution dropped": Fault("lfm2", "convolution", tensors=replaced("conv.conv.bias", torch.zeros_like)),
    "gates of a convolution swapped": Fault(
        "lfm2", "what a convolution reads", tensors=replaced("conv.in_proj.weight", lambda it: it.roll(32, 0))
    ),
    "bias of decays dropped": Fault("qwen 3.5", "recurrence", tensors=replaced("dt_bias", torch.zeros_like)),
    "writing and decay swapped": Fault(
        "qwen 3.5", "gates of a recurrence", tensors=moved(swapped("in_proj_b", "in_proj_a"))
    ),
    "gates of attention's results dropped": Fault(
        "qwen 3.5", "residual behind attention", tensors=replaced("q_proj", without_result_gates)
    ),
    "groups of key heads read from another row": Fault(
        "qwen 3 next", "what a recurrence reads", tensors=replaced("in_proj_qkvz", lambda it: it.roll(1, 0))
    ),
    "one number of a weight": Fault(
        "mistral", "residual behind the feed-forward",
        tensors=replaced("1.mlp.down_proj", lambda it: torch.cat((it[:1] + torch.eye(1, it.shape[1]) / 100, it[1:]))),
    ),
    "latents without their norm": Fault("deepseek v3", "keys", tensors=replaced("kv_a_layernorm", torch.ones_like)),
    "latents as values, without a product": Fault(
        "deepseek v3", "residual behind attention", tensors=replaced("kv_b_proj", latents_as_values)
    ),
    "values of the neighbour head": Fault(
        "deepseek v3", "residual behind attention", tensors=replaced("kv_b_proj", of_neighbours(slice(PLAIN, None)))
    ),
    "keys of the neighbour head": Fault(
        "deepseek v3", "queries", tensors=replaced("kv_b_proj", of_neighbours(slice(PLAIN)))
    ),
    "rotated numbers of queries left out": Fault(
        "deepseek v3", "queries", tensors=replaced("q_b_proj", without_rotated_rows)
    ),
    "an indexer's keys without the weight of their norm": Fault(
        "glm 5", "keys", tensors=replaced("indexer.k_norm.weight", torch.ones_like)
    ),
    "an indexer's keys with another bias of their norm": Fault(
        "glm 5", "keys", tensors=replaced("indexer.k_norm.bias", lambda it: it + 0.5)
    ),
    "an indexer's keys of another product": Fault(
        "glm 5", "keys", tensors=replaced("indexer.wk", lambda it: it.roll(1, 0))
    ),
    "an indexer's queries of the neighbour head": Fault(
        "glm 5", "queries of the indexer",
        tensors=replaced("indexer.wq_b", lambda it: it.unflatten(0, (12, -1)).roll(1, 0).flatten(0, 1)),
    ),
    "an indexer's weights of the neighbour head": Fault(
        "glm 5", "weights of the indexer", tensors=replaced("weights_proj", lambda it: it.roll(1, 0))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen_and_named(name: str, models: Models, tmp_path: Path) -> None:
    fault = FAULTS[name]
    model = models[fault.model]
    decoder = model.decoder_of(edited(model.subject.folder, tmp_path / "wrong", fault.config, fault.tensors))
    found = model.check(decoder if fault.decoder is None else fault.decoder(decoder))
    assert found.first is not None
    assert found.first.section == fault.section
    assert found.first.factor > 1.5
    assert found.first.row.startswith(fault.row)


def other_scale(given: dict[str, object]) -> dict[str, object]:
    """Return another `mscale_all_dim`, with the `mscale` that leaves the rotation as it is."""
    rope: dict[str, Any] = dict(given["rope_parameters"])  # type: ignore[call-overload]
    log = math.log(rope["factor"]) / 10
    ratio = (1 + rope["mscale"] * log) / (1 + rope["mscale_all_dim"] * log)
    return {"rope_parameters": rope | {"mscale": (ratio * (1 + 0.2 * log) - 1) / log, "mscale_all_dim": 0.2}}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", {"sliding_window": 10}),
        ("gpt 2", {"scale_attn_by_inverse_layer_idx": False}),
        ("granite", {"attention_multiplier": 0.21}),
        ("falcon h1", {"key_multiplier": 0.41}),
        ("llama 4", {"attention_chunk_size": 128}),
        ("deepseek v3", other_scale(DEEPSEEK_V3)),
    ],
    ids=["window", "scale by layer", "scale", "scale of keys", "chunk", "scale of latents"],
)
def test_a_wrong_window_chunk_or_scale_of_scores_is_seen(
    name: str, change: dict[str, object], models: Models, tmp_path: Path
) -> None:
    model = models[name]
    found = model.check(folder=edited(model.subject.folder, tmp_path / "other", change))
    assert found.first is not None
    assert found.first.section == "attention"


def test_a_wrong_choice_of_keys_is_seen_and_named(models: Models) -> None:
    model, right = models["glm 5"], path_named("sdpa.cpu.latent.indexed")
    dispatcher = model.runner.worker.dispatcher
    dispatcher.substitute(replace(right, run=wrong_indexed_kernel(IndexedFault.OTHER_WEIGHT)))
    try:
        found = model.check().first
    finally:
        dispatcher.substitute(right)
    assert found is not None
    assert (found.section, found.layer) == ("choice of keys", 0)
    assert "chooses key" in str(found.detail)


def test_steps_that_do_not_fit_say_what_they_need() -> None:
    sizes = {"vocab_size": 9, "page_size": 16, "max_len": 128, "max_tokens": 64, "max_rows": 4}
    with pytest.raises(TooSmall, match="the cache has 3 pages"):
        LayerSteps(**sizes, num_pages=3).all()
    with pytest.raises(TooSmall, match="a step has at most 7 tokens, and the check needs 21"):
        LayerSteps(**{**sizes, "max_tokens": 7}, num_pages=30).all()
