"""Faults around an indexer: the check of the layers names the step that each is in."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.catalog import path_named
from qualification.measure.faults.indexed_faults import IndexedFault, wrong_indexed_kernel
from support.engine.checked_layers import CheckedLayers, Tensors, edited
from support.models.served_families import saved
from support.models.tiny_families import GLM_5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CheckedLayers:
    folder = tmp_path_factory.mktemp("models") / "glm 5"
    saved(folder, "glm_moe_dsa", **{**GLM_5, "indexer_types": ["full", "shared"]})
    return CheckedLayers.made(folder)


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: change(it) if part in name else it for name, it in tensors.items()}


FAULTS: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "keys without the weight of their norm": ("keys", changed("indexer.k_norm.weight", torch.ones_like)),
    "keys without the bias of their norm": ("keys", changed("indexer.k_norm.bias", lambda it: it + 0.5)),
    "keys of another product": ("keys", changed("indexer.wk", lambda it: it.roll(1, 0))),
    "queries of the neighbour head": (
        "queries of the indexer", changed("indexer.wq_b", lambda it: it.unflatten(0, (12, -1)).roll(1, 0).flatten(0, 1))
    ),
    "weights of the neighbour head": ("weights of the indexer", changed("weights_proj", lambda it: it.roll(1, 0))),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_around_an_indexer_is_seen_and_named(name: str, model: CheckedLayers, tmp_path: Path) -> None:
    section, change = FAULTS[name]
    found = model.check(model.decoder_of(edited(model.subject.folder, tmp_path / "wrong", None, change)))
    assert found.first is not None
    assert found.first.section == section
    assert found.first.factor > 1.5


def test_a_wrong_choice_of_keys_is_seen_and_named(model: CheckedLayers) -> None:
    right, dispatcher = path_named("sdpa.cpu.latent.indexed"), model.runner.worker.dispatcher
    dispatcher.substitute(replace(right, run=wrong_indexed_kernel(IndexedFault.OTHER_WEIGHT)))
    try:
        found = model.check().first
    finally:
        dispatcher.substitute(right)
    assert found is not None
    assert (found.section, found.layer) == ("choice of keys", 0)
    assert found.detail is not None
    assert "chooses key" in found.detail
    assert model.check().first is None
