"""Faults of latent attention around its kernel: the check of the layers names the step that each is in."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.engine.checked_layers import CheckedLayers, Tensors, edited
from support.models.served_families import saved
from support.models.tiny_families import DEEPSEEK_V3

HEADS, PLAIN, ROTATED, VALUE, LATENT = 4, 10, 6, 14, 20  # of DEEPSEEK_V3
Change = Callable[[Tensor], Tensor]  # of a product's weights by head


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CheckedLayers:
    folder = tmp_path_factory.mktemp("models") / "deepseek v3"
    saved(folder, "deepseek_v3", **DEEPSEEK_V3)
    return CheckedLayers.made(folder)


def by_head(part: str, rows: slice, change: Change) -> Callable[[Tensors], Tensors]:
    """Change some rows of each head of a product."""

    def changed(weight: Tensor) -> Tensor:
        heads = weight.unflatten(0, (HEADS, -1)).clone()
        heads[:, rows] = change(heads[:, rows])
        return heads.flatten(0, 1)

    return lambda tensors: {name: changed(it) if part in name else it for name, it in tensors.items()}


def latents_as_values(rows: Tensor) -> Tensor:
    return torch.eye(VALUE, LATENT).expand_as(rows)


def neighbours(rows: Tensor) -> Tensor:
    return rows.roll(1, 0)


KEYS, VALUES = slice(PLAIN), slice(PLAIN, None)
FAULTS: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "latents without their norm": (
        "keys", lambda tensors: {n: torch.ones_like(it) if "kv_a_layernorm" in n else it for n, it in tensors.items()}
    ),
    "latents as values, without a product": (
        "residual behind attention", by_head("kv_b_proj", VALUES, latents_as_values)
    ),
    "values of the neighbour head": ("residual behind attention", by_head("kv_b_proj", VALUES, neighbours)),
    "keys of the neighbour head": ("queries", by_head("kv_b_proj", KEYS, neighbours)),
    "rotated numbers of queries left out": ("queries", by_head("q_b_proj", slice(PLAIN, None), torch.zeros_like)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_around_latents_is_seen_and_named(name: str, model: CheckedLayers, tmp_path: Path) -> None:
    section, change = FAULTS[name]
    found = model.check(model.decoder_of(edited(model.subject.folder, tmp_path / "wrong", None, change)))
    assert found.first is not None
    assert found.first.section == section
    assert found.first.factor > 1.5


def test_another_scale_of_scores_is_seen(model: CheckedLayers, tmp_path: Path) -> None:
    """Another `mscale_all_dim`, with the `mscale` that leaves the rotation as it is."""
    rope = dict(DEEPSEEK_V3["rope_parameters"])  # type: ignore[call-overload]
    log = math.log(rope["factor"]) / 10
    ratio = (1 + rope["mscale"] * log) / (1 + rope["mscale_all_dim"] * log)
    rope |= {"mscale": (ratio * (1 + 0.2 * log) - 1) / log, "mscale_all_dim": 0.2}
    found = model.check(folder=edited(model.subject.folder, tmp_path / "other", {"rope_parameters": rope}))
    assert found.first is not None
    assert (found.first.section, found.first.factor > 1.5) == ("attention", True)
