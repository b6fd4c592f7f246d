"""Digests of a model folder change with its tokenizer and its weights, and with nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qualification.canary.golden import load_golden, shipped_golden
from server.model.load.digests import INDEX_FILE, model_digests
from server.settings import DEMO_MODEL

WEIGHTS = {"a.weight": torch.arange(40_000.0).view(200, 200), "b.bias": torch.ones(7)}


def save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(tmp_path, WEIGHTS)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it | {"a.weight": it["a.weight"] * 1.0001},
        lambda it: it | {"a.weight": it["a.weight"].T.contiguous()},
        lambda it: it | {"a.weight": it["a.weight"].half()},
        lambda it: it | {"b.bias": torch.tensor([1.0, 1, 1, 1, 1, 1, 2])},
        lambda it: {"a.weight": it["a.weight"], "c.bias": it["b.bias"]},
    ],
)
def test_changed_weights_change_their_digest_alone(
    model: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    before = model_digests(model, has_weights=True)
    save(model, change(WEIGHTS))
    after = model_digests(model, has_weights=True)
    assert after["weights"] != before["weights"]
    assert after["tokenizer"] == before["tokenizer"]


def test_a_changed_tokenizer_changes_its_digest_alone(model: Path) -> None:
    before = model_digests(model, has_weights=True)
    (model / "tokenizer.json").write_text('{"model": {"a": 1}}')
    after = model_digests(model, has_weights=True)
    assert after["tokenizer"] != before["tokenizer"]
    assert after["weights"] == before["weights"]


def test_weights_in_other_files_are_the_same(model: Path) -> None:
    before = model_digests(model, has_weights=True)
    (model / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(WEIGHTS.items()):
        save_file({name: tensor}, model / f"part-{number}.safetensors")
    files = {"a.weight": "part-0.safetensors", "b.bias": "part-1.safetensors"}
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    (model / "consolidated.safetensors").write_bytes(b"the same in another format")
    assert model_digests(model, has_weights=True) == before


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x40" + b"\0" * 7 + b"{}"])
def test_what_cannot_be_read_has_no_digest(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    assert model_digests(model, has_weights=True)["weights"] is None


def test_dummy_weights_are_named_so(tmp_path: Path) -> None:
    assert model_digests(tmp_path, has_weights=False) == {"tokenizer": None, "weights": "dummy"}


def test_the_shipped_golden_file_has_the_models_digests() -> None:
    golden = load_golden(shipped_golden("demo"))
    assert golden.model_digests == model_digests(Path(DEMO_MODEL), has_weights=True)
