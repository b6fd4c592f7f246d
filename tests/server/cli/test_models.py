"""The table of models is what families, matrices and benchmarks say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.catalog import ALL_PATHS
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.shape import Dtype
from qualification.decision.decision import Book
from qualification.decision.presets import preset_named
from qualification.decision.reviewed import unproven_operators
from qualification.model.config import num_parameters, weight_bytes
from qualification.model.families.reader import read_model
from qualification.model.fields import ModelConfigError
from qualification.model.shard import shard_of
from server.cli.main import main
from server.cli.models import family_of, formats_of, gpus, num_gpus
from server.cli.published import PUBLISHED, UNPUBLISHED, PublishedModel, Stored

BENCHMARKS = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"
OF_PRESETS = [model for model in PUBLISHED if model.preset is not None]


@pytest.mark.parametrize("model", OF_PRESETS, ids=lambda model: model.preset)
def test_what_is_written_of_a_model_is_what_its_preset_says(model: PublishedModel) -> None:
    assert model.preset is not None
    config = preset_named(model.preset).config
    read = read_model(config)
    assert model.billions == pytest.approx(num_parameters(read) / 1e9, rel=0.01)
    if model.gigabytes is not None:
        assert model.gigabytes == pytest.approx(weight_bytes(read, Dtype.BF16) / 1e9, rel=0.01)
    if "ForConditional" not in model.architecture:
        assert family_of(model.architecture).model_type == config["model_type"]
    for gigabytes in (80, 141):
        shard_of(read, 0, num_gpus(model, gigabytes) or 1)


def test_names_are_once_and_classes_are_served() -> None:
    assert len({model.name for model in PUBLISHED}) == len(PUBLISHED)
    assert all(family_of(model.architecture).tensors is not None for model in PUBLISHED)
    assert all((model.gigabytes is not None) == (model.stored in (Stored.MXFP4, Stored.INT4)) for model in PUBLISHED)
    assert not {*UNPUBLISHED} & {model.architecture for model in PUBLISHED}
    assert all(family_of(architecture) for architecture in UNPUBLISHED)
    with pytest.raises(KeyError):
        family_of("MambaForCausalLM")


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.name)
def test_formats_of_fewer_bits_are_named_where_they_are_read(model: PublishedModel) -> None:
    values = {"quantization_config": {"quant_method": "fp8"}}
    refused = False
    try:
        family_of(model.architecture).keys.check(values, "config.json")
    except ModelConfigError:
        refused = True
    assert not (refused and "fp8" in formats_of(model).replace("published in fp8", ""))


def test_times_are_those_of_the_benchmarks() -> None:
    found = [times for model in PUBLISHED for times in model.measured]
    assert len(found) > 4
    for times in found:
        rows = {row["case"]: row for row in json.loads((BENCHMARKS / times.file).read_bytes())["sides"][0]["rows"]}
        assert f"{rows['ttft 2048']['ttft_p50_ms']:.3g}" == f"{times.first_token_ms:g}"
        assert f"{rows['tpot 1']['tpot_p50_ms']:.3g}" == f"{times.token_ms:g}"


@pytest.mark.parametrize(
    ("billions", "gigabytes", "count"), [(8.0, 80, 1), (32.8, 80, 1), (36.2, 80, 2), (70.6, 141, 2), (600.0, 141, None)]
)
def test_a_model_fits_the_fewest_gpus_that_hold_it(billions: float, gigabytes: int, count: int | None) -> None:
    assert num_gpus(PublishedModel("org/name", "LlamaForCausalLM", billions), gigabytes) == count


def test_what_is_proven_follows_from_the_evidence() -> None:
    (gpu,) = (it.reviewed for it in gpus() if it.name == "H200")
    config = preset_named("qwen3-0.6b").config
    without = replace(gpu.book.reviewed, evidence={})
    assert unproven_operators(config, replace(gpu, book=Book(without)), ALL_PATHS) == [
        Operator.ATTENTION,
        Operator.LINEAR,
    ]
    of_attention = {key: it for key, it in gpu.book.reviewed.evidence.items() if "linear" not in key[1]}
    some = replace(gpu, book=Book(replace(gpu.book.reviewed, evidence=of_attention)))
    assert Operator.LINEAR in unproven_operators(config, some, ALL_PATHS)


def test_the_command_prints_the_models_of_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "qwen3-8b"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["model", "class"]
    assert row.split()[:6] == ["Qwen/Qwen3-8B", "Qwen3ForCausalLM", "8.19", "bf16,", "fp8,", "int4"]
    assert main(["models", "qwn3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hallmark: no model of the list has qwn3 in its name or class: nearest: qwen3 (Qwen3ForC")
    assert error.count("\n") == 1
