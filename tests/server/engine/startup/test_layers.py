"""The check of the layers at a start: kept for the next one, and what a failed one does under each policy."""

from pathlib import Path
from shutil import copytree

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from qualification.decision.decision import Policy
from server.engine.startup.builder import BuiltEngine, build_engine
from server.engine.startup.layers import refuse_failed
from server.engine.startup.plan import Unservable
from server.errors import LayersFailed
from server.protocol.messages import LayersReport, LayersStatus
from server.settings import LoadFormat, Settings
from support.engine.attested import proving, settings_for
from support.models.tiny_llama import TinyLlama


@pytest.fixture
def settings(tiny_llama: TinyLlama, tmp_path: Path) -> Settings:
    """Return settings for a copy of the model, whose files a test may change."""
    model = str(copytree(tiny_llama.folder, tmp_path / "model"))
    return replace(settings_for(tiny_llama, tmp_path / "cache"), model=model, attestation_interval_s=0)


def built(settings: Settings) -> BuiltEngine:
    return build_engine(settings, frozenset(), lambda *_: None, run_qualification=proving)


def built_of_files_that_change(settings: Settings) -> BuiltEngine:
    """Build an engine whose files are others than those it has loaded when its layers are checked."""
    file = Path(settings.model) / "model.safetensors"

    def progress(stage: str, _: str) -> None:
        if stage == "checking":
            tensors = load_file(file)
            tensors["model.layers.1.self_attn.v_proj.weight"] += 0.1
            save_file(tensors, file, {"format": "pt"})

    return build_engine(settings, frozenset(), progress, run_qualification=proving)


def test_only_other_weights_are_checked_again(settings: Settings) -> None:
    first, second = built(settings).ready.layers, built(settings).ready.layers
    assert (first.status, first.num_layers, first.is_cached) == (LayersStatus.PROVEN, 2, False)
    assert first.num_numbers > 1000
    assert second == replace(first, is_cached=True)
    file = Path(settings.model) / "model.safetensors"
    tensors = {name: tensor * 2 for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    found = built(settings).ready.layers
    assert (found.status, found.is_cached) == (LayersStatus.PROVEN, False)


def test_a_failed_check_ends_the_start_under_refuse() -> None:
    report = LayersReport(LayersStatus.FAILED, "layer 3, keys, in decode: off by 0.1, 20 times its limit of 0.005")
    with pytest.raises(LayersFailed, match=r"^layers: failed: layer 3, keys, in decode: .* what its files say$"):
        refuse_failed(report, Policy.REFUSE, list)


def test_a_failed_check_is_not_served_under_qualify(settings: Settings) -> None:
    with pytest.raises(Unservable, match="layers: failed: layer 1, values") as refused:
        built_of_files_that_change(settings)
    assert refused.value.plan


def test_a_failed_check_is_served_and_said_under_degrade(settings: Settings) -> None:
    found = built_of_files_that_change(replace(settings, on_unproven=Policy.DEGRADE)).ready.layers
    assert found.status is LayersStatus.FAILED
    assert found.detail.startswith("layer 1, values")


def test_what_is_not_checked_says_why(settings: Settings) -> None:
    off = built(replace(settings, layer_check=False)).ready.layers
    dummy = built(replace(settings, load_format=LoadFormat.DUMMY)).ready.layers
    assert {off.status, dummy.status} == {LayersStatus.NOT_CHECKED}
    assert (off.detail, dummy.detail) == ("--no-layer-check", "dummy weights have no files to be held to")
