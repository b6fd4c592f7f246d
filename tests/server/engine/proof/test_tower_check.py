"""A served tower beside the plain forward pass: a right one passes, and every planted fault is seen."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.functional import plan_varlen
from kernels.fused.activation_kind import Activation
from qualification.model.forward.bounded import Precision
from qualification.model.forward.checkpoint import Checkpoint
from qualification.model.forward.tower import TowerReference
from qualification.model.tower import Interpolation, TowerConfig
from server.engine.proof.tower_check import TowerCheck, TowerChecked, checked_grid
from server.model.load.load import load_config
from server.model.vision.geometry import Grid
from server.model.vision.load import load_tower, with_own_tower
from server.model.vision.operators import Attend, FirstPath, FirstPaths
from server.model.vision.tower import Image, Pixels, Tower
from server.model.vision.weights import GatedMerger, MeanMerger, Merger, NormWeights, TowerWeights
from support.engine.image_session import PIXELS
from support.models.tiny_images import GEMMA, PIXTRAL, save_tiny

CPU = torch.device("cpu")
ROTATING = ("qwen2 vl", "qwen2.5 vl", "qwen3 vl", "glm4v", "glm ocr", "paddleocr vl", "mistral 3", "gemma 4")


@pytest.fixture(scope="module", params=[*ROTATING, PIXTRAL, GEMMA, "internvl", "internvl, large"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tower")
    save_tiny(found, request.param)
    return found


def checked(
    folder: Path, made: Callable[..., Tower] = Tower, dtype: torch.dtype = torch.float32, **changes: object
) -> TowerChecked:
    """Check a tower that is made of the folder's weights, but of a configuration with changes."""
    config = with_own_tower(folder, load_config(folder)).tower
    assert config is not None
    weights = load_tower(folder, config, dtype=dtype, device=CPU)
    tower = made(replace(config, **changes), weights, PIXELS, is_reproducible=False)
    checkpoint = Checkpoint(folder, CPU)
    try:
        reference = TowerReference(checkpoint, config, Precision(dtype), checked_grid(tower))
        return TowerCheck(tower, reference, PIXELS).run()
    finally:
        checkpoint.close()


def wrong(found: TowerChecked) -> str | None:
    """Return the first section that is beyond its limit."""
    return next((str(it) for it in found.differences if it.factor > 1), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_tower_is_within_its_limits(folder: Path, dtype: torch.dtype) -> None:
    found = checked(folder, dtype=dtype)
    assert wrong(found) is None
    assert max(it.factor for it in found.differences) > 0.01  # a limit that nothing comes near would see nothing


class Transposed(Tower):
    """Takes an image's width for its height."""

    def _patches(self, image: Image) -> torch.Tensor:
        turned = Image(image.pixels.transpose(0, 1).contiguous(), (image.grid[1], image.grid[0]))
        return super()._patches(turned)


class ColumnsFirst(Tower):
    """Turns the pairs of a row by the column, and those of a column by the row."""

    def _places(self, grids: tuple[Grid, ...]) -> Any:
        found = super()._places(grids)
        cosines, sines = (it.roll(it.shape[1] // 2, 1) for it in found.turns)
        return replace(found, turns=(cosines, sines))


class _CausalPaths(FirstPaths):
    def attend(self, ends: torch.Tensor, longest: int) -> Attend:
        return FirstPath(plan_varlen(ends, ends, longest, longest))


class Causal(Tower):
    """Lets a patch see those before it alone."""

    def __init__(self, config: TowerConfig, weights: TowerWeights, pixels: Pixels, *, is_reproducible: bool) -> None:
        super().__init__(config, weights, pixels, is_reproducible=is_reproducible, operators=_CausalPaths())


class RowsFirst(Tower):
    """Gives windows their lengths, and not their order: it cuts patches into windows as they come row by row."""

    def _ends(self, lengths: tuple[int, ...]) -> tuple[torch.Tensor, int]:
        return super()._ends(tuple(reversed(lengths)))


@pytest.mark.parametrize(
    ("made", "changes", "where"),
    [
        (Transposed, {}, "patches"),
        (Causal, {}, "layer 0, tower, attention"),
        (Tower, {"rope_theta": 1000.0}, "layer 0, tower, queries"),
        (Tower, {"norm_eps": 1e-2}, "what attention reads|patches"),
    ],
)
def test_a_planted_fault_is_named_where_it_is(
    folder: Path, made: type[Tower], changes: dict[str, object], where: str
) -> None:
    assert re.search(where, wrong(checked(folder, made, **changes)) or "")


@pytest.mark.parametrize("folder", ROTATING, indirect=True)
def test_another_order_of_rotations_is_named(folder: Path) -> None:
    assert "layer 0, tower, queries" in (wrong(checked(folder, ColumnsFirst)) or "")


@pytest.mark.parametrize(
    ("made", "changes", "where"),
    [
        (RowsFirst, {}, "layer 0, tower, windows of patches, in an image: a path is told 12 windows of other patches"),
        (Tower, {"window": 3}, "layer 0, tower, windows of patches, in an image: a path is told 6 windows, and the"),
        (Tower, {"full_layers": frozenset({1})}, "layer 3, tower, windows of patches, in an image: a path is told 12"),
    ],
)
def test_wrong_windows_are_named(tmp_path: Path, made: type[Tower], changes: dict[str, object], where: str) -> None:
    save_tiny(tmp_path, "qwen2.5 vl")
    assert where in (wrong(checked(tmp_path, made, **changes)) or "")


class Neighbours(Tower):
    """Has heads whose numbers are turned with those beside them, in a tower that turns halves."""

    def __init__(self, config: TowerConfig, weights: TowerWeights, pixels: Pixels, *, is_reproducible: bool) -> None:
        for layer in weights.layers:
            values = layer.qkv.weight.stored["weight"].values[: 2 * config.hidden_size]
            heads = values.view(-1, config.head_dim // 2, 2, config.hidden_size)
            values.copy_(heads.transpose(1, 2).reshape(values.shape))
        super().__init__(config, weights, pixels, is_reproducible=is_reproducible)


class Unfolded(Tower):
    """Leaves the columns of the merging product as a checkpoint has them: those of one number of all patches first."""

    def __init__(self, config: TowerConfig, weights: TowerWeights, pixels: Pixels, *, is_reproducible: bool) -> None:
        assert isinstance(weights.merger, Merger | GatedMerger) and weights.merger.merging is not None  # noqa: PT018
        values = weights.merger.merging.weight.stored["weight"].values
        values.copy_(values.view(len(values), config.merge**2, -1).transpose(1, 2).flatten(1))
        super().__init__(config, weights, pixels, is_reproducible=is_reproducible)


def unbounded(config: TowerConfig, weights: TowerWeights, pixels: Pixels, *, is_reproducible: bool) -> Tower:
    """Leave out the bounds of products."""
    layers = tuple(replace(it, bounds=None) for it in weights.layers)
    return Tower(config, replace(weights, layers=layers), pixels, is_reproducible=is_reproducible)


def without_norms_of_heads(
    config: TowerConfig, weights: TowerWeights, pixels: Pixels, *, is_reproducible: bool
) -> Tower:
    """Leave out the norms of queries and keys."""
    layers = tuple(replace(it, q_norm=None, k_norm=None) for it in weights.layers)
    return Tower(config, replace(weights, layers=layers), pixels, is_reproducible=is_reproducible)


class WithoutLastNorm(Tower):
    """Leaves patches as the last layer makes them."""

    def _normed(self, norm: NormWeights, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        return x if norm is self.weights.last_norm else super()._normed(norm, x, eps)


def without_class_tokens(config: TowerConfig, weights: TowerWeights, pixels: Pixels, *, is_reproducible: bool) -> Tower:
    """Leave rows of patches without pixels in the place of class tokens."""
    return Tower(config, replace(weights, class_token=None), pixels, is_reproducible=is_reproducible)


def unscaled(config: TowerConfig, weights: TowerWeights, pixels: Pixels, *, is_reproducible: bool) -> Tower:
    """Leave out what multiplies the results of layers."""
    layers = tuple(replace(it, attention_scale=None, feed_forward_scale=None) for it in weights.layers)
    return Tower(config, replace(weights, layers=layers), pixels, is_reproducible=is_reproducible)


def unstandardized(config: TowerConfig, weights: TowerWeights, pixels: Pixels, *, is_reproducible: bool) -> Tower:
    """Leave out what is taken from means, and multiplies them."""
    assert isinstance(weights.merger, MeanMerger)
    merger = replace(weights.merger, bias=None)
    return Tower(config, replace(weights, merger=merger), pixels, is_reproducible=is_reproducible)


@pytest.mark.parametrize(
    ("kind", "made", "changes", "where"),
    [
        ("qwen2 vl", Tower, {"activation": Activation.GELU}, "layer 0, tower, activation"),
        ("glm4v", Tower, {"interpolation": Interpolation.LINEAR}, "tower, patches"),
        ("glm4v", Unfolded, {}, "tower, merged patches"),
        ("glm4v", Tower, {"merger_eps": 1e-2}, "what the merger's gates read"),
        ("glm ocr", without_norms_of_heads, {}, "layer 0, tower, queries"),
        ("paddleocr vl", Tower, {"interpolation": Interpolation.CORNERS}, "tower, patches"),
        ("paddleocr vl", Tower, {"interpolation": Interpolation.CUBIC}, "tower, patches"),
        ("paddleocr vl", WithoutLastNorm, {}, "tower, normed patches behind the last layer"),
        ("paddleocr vl", Tower, {"merger_eps": 1e-2}, "what the merger reads"),
        ("internvl", Tower, {"full_layers": frozenset({1})}, "layer 1, tower, windows of patches"),
        ("internvl", without_class_tokens, {}, "tower, patches"),
        ("internvl", unscaled, {}, "layer 0, tower, residual behind attention"),
        ("internvl", Tower, {"merger_eps": 1e-2}, "what the merger reads"),
        ("internvl, large", without_norms_of_heads, {}, "layer 0, tower, queries"),
        ("mistral 3", Neighbours, {}, "layer 0, tower, queries"),
        ("mistral 3", Tower, {"alternates_rates": False}, "layer 0, tower, queries"),
        ("mistral 3", Unfolded, {}, "tower, merged patches"),
        ("mistral 3", Tower, {"merger_eps": 1e-2}, "what the merger reads"),
        ("gemma 4", Tower, {"splits_heads": False}, "layer 0, tower, queries"),
        ("gemma 4", unbounded, {}, "layer 0, tower, queries"),
        ("gemma 4", unstandardized, {}, "what the merger reads"),
    ],
)
def test_wrong_parts_of_one_tower_are_named(
    tmp_path: Path, kind: str, made: Callable[..., Tower], changes: dict[str, object], where: str
) -> None:
    save_tiny(tmp_path, kind)
    assert where in (wrong(checked(tmp_path, made, **changes)) or "")


class WithoutOne(Tower):
    """Multiplies a mean of patches by its norm's weights, and not by 1 more."""

    def __init__(self, config: TowerConfig, weights: TowerWeights, pixels: Pixels, *, is_reproducible: bool) -> None:
        assert isinstance(weights.merger, MeanMerger)
        assert weights.merger.token_norm is not None
        weights.merger.token_norm.sub_(1)
        super().__init__(config, weights, pixels, is_reproducible=is_reproducible)


def test_the_wrong_norm_of_pooled_patches_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, GEMMA)
    assert "the merger's last product reads" in (wrong(checked(tmp_path, WithoutOne)) or "")


def test_rows_of_the_wrong_layer_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3 vl")
    assert "merger" in (wrong(checked(tmp_path, deepstack=(0, 1))) or "")
