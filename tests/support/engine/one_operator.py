"""Small dummy models in an engine on a CPU, of whose plan one operator alone is measured."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from kernels.catalog import PATHS
from kernels.convolution.paths import CONVOLUTION_PATHS, ConvolutionPath
from kernels.convolution.shape import ConvolutionShape
from kernels.experts.paths import EXPERTS_PATHS, ExpertsPath
from kernels.experts.shape import ExpertsShape
from kernels.linear.paths import LINEAR_PATHS, LinearPath
from kernels.linear.shape import LinearShape
from kernels.recurrence.paths import RECURRENCE_PATHS, RecurrencePath
from kernels.recurrence.shape import RecurrenceShape
from kernels.vocabulary.operators import RowsShape, operator_of
from kernels.vocabulary.path import Reject
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Decision, Pairs, Policy
from qualification.evidence.evidence import Evidence
from qualification.measure.qualify import Bench, Pair, Progress, qualify
from server.engine.operators.convolution import ConvolutionTable
from server.engine.operators.dispatch import Dispatcher
from server.engine.operators.experts import ExpertsTable
from server.engine.operators.linear import LinearTable
from server.engine.operators.recurrence import RecurrenceTable
from server.engine.operators.rows_table import RowsTable
from server.engine.startup.builder import BuiltEngine
from server.engine.startup.subject import operators_of
from server.model.decoder import Decoder
from server.protocol.messages import SamplingParams, StepOutput, Submit
from server.settings import DeviceChoice, LoadFormat, Settings
from support.engine.built_engine import built_engine
from support.qualification_fakes import evidence


def _small(model_type: str, architecture: str, **sizes: object) -> dict[str, object]:
    """Return a config.json of three layers, of a hybrid's the last one attends."""
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **sizes,
    }


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_LATENTS = {"num_key_value_heads": 2, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "v_head_dim": 8}
PRODUCTS = _small("qwen2", "Qwen2ForCausalLM", intermediate_size=40, num_hidden_layers=2, **_HEADS)
MIXTURE = _small(  # two layers have experts
    "qwen3_moe", "Qwen3MoeForCausalLM", intermediate_size=48, moe_intermediate_size=20, mlp_only_layers=[1],
    head_dim=32, num_experts=5, num_experts_per_tok=2, **_HEADS,
)  # fmt: skip
HYBRID = _small(
    "qwen3_5_text", "Qwen3_5ForCausalLM", full_attention_interval=3, head_dim=16, linear_num_key_heads=1,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=16, linear_conv_kernel_dim=4,
)  # fmt: skip
CONVOLVING = _small(
    "lfm2", "Lfm2ForCausalLM", block_auto_adjust_ff_dim=False, layer_types=["conv", "conv", "full_attention"]
)
STATE_SPACE = _small(
    "nemotron_h", "NemotronHForCausalLM", hybrid_override_pattern="M-*", head_dim=16, n_groups=1, mamba_num_heads=2,
    mamba_head_dim=16, ssm_state_size=8,
)  # fmt: skip
CHANNELS = _small(
    "kimi_linear", "KimiLinearForCausalLM", layer_types=["linear_attention", "linear_attention", "full_attention"],
    mlp_layer_types=["dense"] * 3, qk_rope_head_dim=4, linear_num_heads=2, linear_head_dim=16, **_LATENTS,
)  # fmt: skip
LIGHTNING = _small(
    "bailing_hybrid", "BailingMoeV2_5ForCausalLM", layer_group_size=3, group_norm_size=2, first_k_dense_replace=3,
    head_dim=16, qk_rope_head_dim=8, **_LATENTS,
)  # fmt: skip


def measuring(of: type[RowsShape]) -> Callable[..., None]:
    """Measure shapes of this class: other operators, and the trial of the checker, are other tests'."""

    def run(pairs: list[Pair], bench: Bench, *, progress: Progress, on_evidence: Callable[[Evidence], None]) -> None:
        for shape, path in pairs:
            if not isinstance(shape, of):
                on_evidence(evidence(shape, path, fingerprint=bench.fingerprint))
        own = [pair for pair in pairs if isinstance(pair[0], of)]
        qualify(own, bench, progress=progress, on_evidence=on_evidence, check_checker=lambda *_, **__: ())

    return run


def proving(pairs: list[Pair], bench: Bench, *, on_evidence: Callable[[Evidence], None], **_: object) -> None:
    """Stands in for `qualify`: prove every pair without a measurement."""
    for shape, path in pairs:
        on_evidence(evidence(shape, path, fingerprint=bench.fingerprint))


def serve_by(built: BuiltEngine, path: LinearPath | ExpertsPath | RecurrencePath | ConvolutionPath) -> Dispatcher:
    """Have a path of the test's serve its operator, before the proven one that its engine was built with."""
    runner = built.runner
    own = runner.dispatcher
    decisions = {it.shape: it for it in own.all_decisions}

    def redecide(shape: Any, broken: Pairs, taken_out: Pairs) -> Decision[Any]:
        before = decisions[shape]
        if operator_of(shape) is not path.operator:
            return before
        reasons = ((Reject.QUARANTINED, broken), (Reject.OPERATOR_OVERRIDE, taken_out))
        against = tuple(reason for reason, pairs in reasons if (path.name, str(shape)) in pairs)
        if not against:
            return replace(before, path=path.name, wanted=path.name)
        is_left = (before.path, str(shape)) not in broken | taken_out
        return replace(before, path=before.path if is_left else None, wanted=path.name, fallback_reasons=against)

    def state(of: type[RowsShape]) -> dict[Any, Decision[Any]]:
        return {shape: redecide(shape, frozenset(), frozenset()) for shape in decisions if isinstance(shape, of)}

    decoder = runner.worker.decoder
    linear = (*LINEAR_PATHS, path) if isinstance(path, LinearPath) else LINEAR_PATHS
    experts_paths = (*EXPERTS_PATHS, path) if isinstance(path, ExpertsPath) else EXPERTS_PATHS
    tables: list[RowsTable[Any, Any]] = [LinearTable(state(LinearShape), linear, redecide=redecide)]
    if own.experts is not None:
        of_experts = state(ExpertsShape)
        tables.append(ExpertsTable(decoder.config, Dtype.FP32, of_experts, experts_paths, redecide=redecide))
    if own.recurrence is not None:
        recurrences = (*RECURRENCE_PATHS, path) if isinstance(path, RecurrencePath) else RECURRENCE_PATHS
        of_recurrences = state(RecurrenceShape)
        tables.append(RecurrenceTable(decoder.config, Dtype.FP32, of_recurrences, recurrences, redecide=redecide))
    if own.convolution is not None:
        paths = (*CONVOLUTION_PATHS, path) if isinstance(path, ConvolutionPath) else CONVOLUTION_PATHS
        tables.append(ConvolutionTable(decoder.config, Dtype.FP32, state(ConvolutionShape), paths, redecide=redecide))
    dispatcher = Dispatcher(own.plan, PATHS, own.flags, redecide=redecide, tables=tables)
    runner.worker.dispatcher = dispatcher
    runner.worker.decoder = Decoder(decoder.config, decoder.weights, decoder.ranks, operators_of(dispatcher))
    return dispatcher


def serve(built: BuiltEngine, num_tokens: int) -> list[StepOutput]:
    """Answer one greedy prompt of so many tokens; the outputs of its steps."""
    built.engine.submit(Submit("a", list(range(num_tokens)), SamplingParams(max_tokens=3, temperature=0.0)))
    outputs = []
    while built.engine.has_work:
        output = built.engine.step()
        assert output is not None
        outputs.append(output)
    return outputs


def small_engine(
    folder: Path,
    config: Mapping[str, object],
    run_qualification: Callable[..., None],
    *,
    policy: Policy,
    max_num_batched_tokens: int,
    **changes: object,
) -> BuiltEngine:
    """Build the engine of a model with dummy weights in `folder`, where its evidence is kept too.

    `changes` of its settings
    """
    (folder / "config.json").write_text(json.dumps(config))
    settings = Settings(
        model=str(folder),
        device=DeviceChoice.CPU,
        load_format=LoadFormat.DUMMY,
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_tokens=512,
        page_size=8,
        on_unproven=policy,
        cache_dir=str(folder / "cache"),
        attestation_interval_s=0.0,
    )
    return built_engine(msgspec.structs.replace(settings, **changes), run_qualification)
