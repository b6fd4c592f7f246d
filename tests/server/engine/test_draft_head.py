"""Drafts of a model's own head: what it drafts, that no answer shows it, and what is refused."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import server.engine.startup.subject as startup
from kernels.catalog import path_named
from kernels.linear.paths import LINEAR_PATHS, LinearPath
from kernels.linear.shape import FP8_BLOCKS, FP8_ROWS, PLAIN, LinearShape, WeightFormat
from kernels.linear.weights import PlainWeight
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Policy
from qualification.decision.presets import preset_named
from qualification.model.draft_head import with_draft_head
from qualification.model.families.reader import read_model
from server.engine.execution.head_steps import HeadSteps
from server.engine.scheduling.head_drafter import HeadDrafter
from server.engine.scheduling.sequence import Sequence
from server.engine.startup import drafting
from server.engine.startup.layers import check_layers
from server.engine.startup.subject import read_subject
from server.errors import SettingsError
from server.model.linear import Linear
from server.model.load.load import load_config
from server.model.load.rounded import rounded_copy
from server.protocol.messages import LayersStatus
from server.settings import DeviceChoice, Settings
from support.engine.closure_graphs import capture
from support.engine.reproducible_engine import Request, answers, build, different, requests
from support.models.draft_heads import PlainHead, add_draft_head
from support.models.quantized_hybrids import BLOCKS, QWEN, QuantizedHybrid
from support.models.tiny_families import QWEN_3_NEXT, RECURRENT, save_reference

H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580.95.05", "13.0", "91900", "2.11.0", "3.6.0")
SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 256, "eos_token_id": None}


class Recorded(HeadDrafter):
    """Keeps the tokens of greedy sequences, and what was drafted behind them."""

    seen: list[tuple[list[int], list[int]]]

    def draft(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:  # type: ignore[override]
        found = super().draft(wanted)
        for (seq, most), drafted in zip(wanted, self.take(found), strict=True):
            assert len(drafted) == max(most, 0), "the head drafts as many tokens as it is asked for"
            if seq.sampling.temperature == 0:
                self.seen.append((seq.tokens.copy(), drafted))
        return found


def asked_of(vocab_size: int = 97) -> list[Request]:
    """Return requests whose answers cross a border of 64 tokens; of some there are three."""
    found = requests(vocab_size, (50, 58, 110, 16))
    return [replace(it, sampling=msgspec.structs.replace(it.sampling, max_tokens=18)) for it in found]


@pytest.mark.parametrize(("family", "changes"), [("qwen3_5_text", RECURRENT), ("qwen3_next", QWEN_3_NEXT)])
def test_a_head_drafts_as_its_definition_and_changes_no_bit(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """In chunks, behind hits of other prompts, in forks, and after preemptions."""
    model = save_reference(tmp_path, family, {**changes, **SIZES})
    tensors = add_draft_head(tmp_path, 2)
    is_dense = family == "qwen3_5_text"
    asked = asked_of() if is_dense else asked_of()[:1]  # experts compute slowly on a CPU
    alone = answers(build(tmp_path, tmp_path / "cache", prefix_caching=False).engine, asked, at_once=1)
    crowded = build(tmp_path, tmp_path / "cache", kv_cache_tokens=208, max_num_batched_tokens=29, speculative_tokens=3)
    assert crowded.ready.layers is not None
    assert crowded.ready.layers.num_layers == 3  # the head's included
    drafter = crowded.engine.drafter
    assert isinstance(drafter, HeadDrafter)
    drafter.__class__, seen = Recorded, []
    drafter.seen = seen
    drafter.head = steps = HeadSteps(crowded.runner)
    if is_dense:
        for name in {choice.use.path for choice in crowded.runner.dispatcher.choices}:
            crowded.runner.dispatcher.substitute(replace(path_named(name), is_capturable=True))
        steps.capture(capture, 4, 200)  # of steps of few rows: prompts have none
    num_accepted = num_preempted = num_hit = 0
    step = crowded.engine.step

    def counted() -> object:
        nonlocal num_accepted, num_preempted, num_hit
        output = step()
        if output is not None:
            num_preempted += output.record.num_preemptions
            num_hit += output.record.num_prefix_hit_tokens
            num_accepted += 0 if output.record.drafts is None else sum(output.record.drafts.accepted)
        return output

    crowded.engine.step = counted  # type: ignore[method-assign, assignment]
    for seed in (1, 2) if is_dense else (1,):
        assert different(alone, answers(crowded.engine, asked, at_once=4, seed=seed)) == []
    assert seen
    if is_dense:
        assert min(num_accepted, num_preempted, num_hit, steps.num_replays) > 0
        plain = PlainHead(model, tensors)
        for tokens, drafted in seen[::4]:
            assert drafted == plain.drafts(tokens, len(drafted))


@pytest.mark.parametrize("most", [1, 5])
def test_a_head_drafts_where_steps_have_few_tokens(most: int, tmp_path: Path) -> None:
    save_reference(tmp_path, "qwen3_5_text", {**RECURRENT, **SIZES})
    add_draft_head(tmp_path, 2)
    asked, cache = asked_of()[:1], tmp_path / "cache"
    alone = answers(build(tmp_path, cache).engine, asked, at_once=1)
    few = build(tmp_path, cache, max_num_seqs=1, max_num_batched_tokens=most, speculative_tokens=2)
    assert different(alone, answers(few.engine, asked, at_once=1)) == []


@pytest.mark.parametrize(
    "asked",
    [{"speculative_tokens": 1}, {"speculative_config": '{"method": "qwen3_next_mtp", "num_speculative_tokens": 3}'}],
)
def test_a_head_that_is_not_there_is_refused(asked: dict[str, object], tmp_path: Path) -> None:
    save_reference(tmp_path, "qwen3_5_text", {**RECURRENT, **SIZES})
    settings = Settings(model=str(tmp_path), device=DeviceChoice.CPU, **asked)  # type: ignore[arg-type]
    with pytest.raises(
        SettingsError, match=r"own head \(mtp\) are asked for, and .* has no tensor mtp.fc.weight: fetch"
    ):
        read_subject(settings)
    other = tmp_path / "other"
    other.mkdir()
    save_reference(other, "llama", SIZES)
    with pytest.raises(SettingsError, match="models of llama have no draft head that is read; use ngram"):
        read_subject(msgspec.structs.replace(settings, model=str(other)))


def test_a_head_that_computes_something_else_is_found(tmp_path: Path) -> None:
    """A served head whose file has changed behind it, as a wrong reader's would have."""
    save_reference(tmp_path, "qwen3_5_text", {**RECURRENT, **SIZES})
    add_draft_head(tmp_path, 2)
    built = build(tmp_path, tmp_path / "cache", speculative_tokens=1, layer_check=False)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].roll(1, dims=1)
    save_file(tensors, file, metadata={"format": "pt"})
    sizes = {"max_model_len": 200, "kv_cache_tokens": 2048, "max_num_seqs": 10, "page_size": 8}
    settings = Settings(model=str(tmp_path), device=DeviceChoice.CPU, speculative_tokens=1, **sizes)  # type: ignore[arg-type]
    subject = read_subject(settings)
    report = check_layers(Settings(cache_dir=str(tmp_path / "cache")), subject, built.runner, lambda _, __: None)
    assert report.status is LayersStatus.FAILED
    assert report.detail.startswith("draft head, embedding, in ")


def test_a_head_chooses_by_a_copy_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer changes, the plan has the product, and a copy that is rounded wrongly is found."""
    save_reference(tmp_path, "qwen3_5_text", {**RECURRENT, **SIZES})
    add_draft_head(tmp_path, 2)
    asked, cache = asked_of()[:2], tmp_path / "cache"
    alone = answers(build(tmp_path, cache, reproducible=False).engine, asked, at_once=1)
    monkeypatch.setattr(startup, "rounds_draft_logits", lambda *_: True)
    built = build(tmp_path, cache, speculative_tokens=2, reproducible=False)
    assert built.ready.layers is not None
    assert built.ready.layers.status is LayersStatus.PROVEN
    drafted = answers(built.engine, asked, at_once=2)
    assert {name: it.tokens for name, it in drafted.items()} == {name: it.tokens for name, it in alone.items()}
    served = built.runner.dispatcher.paths_served
    assert {path for shape, path in served.items() if f"{FP8_ROWS.name} in32 out97 " in shape} == {"torch.linear.fp8"}
    monkeypatch.setattr(startup, "rounded_copy", lambda it: rounded_copy(Linear(PlainWeight(it.weight.values * 1.01))))
    other = {"reproducible": False, "on_unproven": Policy.DEGRADE}
    wrong = build(tmp_path, tmp_path / "other", speculative_tokens=2, **other)
    assert wrong.ready.layers is not None
    assert wrong.ready.layers.status is LayersStatus.FAILED
    assert wrong.ready.layers.detail.startswith("draft head, logits")


@pytest.mark.parametrize(
    ("is_copied", "device", "dtype", "head", "asked"),
    [
        (True, "cuda", Dtype.BF16, PLAIN, {}),
        (False, "cpu", Dtype.BF16, PLAIN, {}),
        (False, "cuda", Dtype.FP32, PLAIN, {}),
        (False, "cuda", Dtype.BF16, FP8_ROWS, {}),
        (False, "cuda", Dtype.BF16, PLAIN, {"reproducible": True}),
    ],
    ids=["16 bits", "a CPU", "fp32", "8 bits already", "in one order"],
)
def test_a_head_is_copied_where_that_is_less_to_read(
    is_copied: bool, device: str, dtype: Dtype, head: WeightFormat, asked: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def first_path(shape: LinearShape, _: object) -> LinearPath:
        return next(path for path in LINEAR_PATHS if not path.rejects(shape, H200))

    monkeypatch.setattr(drafting, "first_path", first_path)
    model = replace(read_model(preset_named("qwen3.5-35b-a3b").config), head_format=head)
    settings = Settings(model="any", **asked)  # type: ignore[arg-type]
    assert drafting.rounds_draft_logits(settings, model, dtype, torch.device(device)) == is_copied


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_head_in_blocks_is_held_to_its_file(is_listed: bool, tmp_path: Path) -> None:
    """Read its layer in 8 bits, as Qwen's files have it, or in 16 where it is listed; the product before it in 16."""
    apart = ("in_proj_a", "in_proj_b", "lm_head", "embed_tokens", "mtp.fc")
    plain = (*apart, "mtp.") if is_listed else apart

    def save(folder: Path) -> PreTrainedModel:
        model = save_reference(folder, "qwen3_5_text", {**QWEN, "max_position_embeddings": 256, "eos_token_id": None})
        add_draft_head(folder, 2)
        return model

    says = {**BLOCKS, "modules_to_not_convert": [*BLOCKS["modules_to_not_convert"], *(["mtp"] if is_listed else [])]}
    file = QuantizedHybrid(tmp_path / "model", save, "blocks", says, lambda it: not any(word in it for word in plain))
    built = build(file.folder, tmp_path / "cache", speculative_tokens=1, reproducible=False)
    assert built.ready.layers is not None
    assert (built.ready.layers.status, built.ready.layers.num_layers) == (LayersStatus.PROVEN, 3)
    of_layer = with_draft_head(load_config(file.folder)).layers[-1].formats
    assert {of_layer.qkv, of_layer.output, of_layer.gate_up, of_layer.down} == {PLAIN if is_listed else FP8_BLOCKS}
