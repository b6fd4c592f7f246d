"""A folder to a tower: its configuration, its weights, and how pixels become numbers."""

import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from qualification.model.config import ModelConfig
from qualification.model.families.towers import TOWERS, with_tower
from qualification.model.fields import ModelConfigError
from qualification.model.tower import TowerConfig
from server.errors import ModelError
from server.model.load.checkpoint import Piece, TensorEntry, Wanted, check_entries, copy_pieces, read_entries, tenths
from server.model.load.folder import CONFIG_FILE
from server.model.load.json_file import read_object
from server.model.vision.weights import TowerWeights, as_computed, empty_tower, tower_shapes
from server.settings import LoadFormat

_DUMMY_RANGE = 1e-3
_TEXT_ALONE = "serve its text alone with --limit-images 0"


def has_known_tower(folder: Path) -> bool:
    """Return whether the folder's model sees images, by a tower that is known. Raises ModelError."""
    config = read_object(folder / CONFIG_FILE)
    return config.get("model_type") in TOWERS and isinstance(config.get("vision_config"), dict)


def has_tower_tensors(folder: Path) -> bool:
    """Return whether the checkpoint has its tower's tensors: one of the text alone has none. Raises ModelError."""
    names = TOWERS[str(read_object(folder / CONFIG_FILE).get("model_type"))].names
    return any(names.own(name) is not None for name in read_entries(folder))


def with_own_tower(folder: Path, model: ModelConfig) -> ModelConfig:
    """Return the folder's model with its tower. Raises ModelError for one that has none that can be computed."""
    path = folder / CONFIG_FILE
    try:
        return with_tower(model, read_object(path), str(path))
    except ModelConfigError as error:
        raise ModelError(f"{error}; or {_TEXT_ALONE}") from error


def check_tower(folder: Path, config: TowerConfig) -> dict[str, TensorEntry]:
    """Return the tower's tensors, by their names as `TowerNames` has them, from the headers of the files.

    Layers behind the last one that is computed are left out. Raises ModelError where a tensor is missing, unknown, or
    of another shape.
    """
    entries = {}
    for name, entry in read_entries(folder).items():
        own = config.names.own(name)
        layer = None if own is None else config.names.layer_of(own)
        if own is not None and (layer is None or layer < config.num_layers):
            entries[own] = entry
    try:
        check_entries(folder, entries, {name: Wanted(shape) for name, shape in tower_shapes(config).items()}, ())
    except ModelError as error:
        raise ModelError(f"{error.message}; or {_TEXT_ALONE}") from error
    return entries


def load_tower(
    folder: Path,
    config: TowerConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = LoadFormat.AUTO,
    progress: Callable[[str], None] = lambda _: None,
) -> TowerWeights:
    """Return the tower's weights, all of them: each rank has the whole tower. Raises ModelError.

    Dummy weights are uniform within about 1e-3, and the same on every start.
    """
    weights = empty_tower(config, dtype, device)
    named = weights.named(config)
    with torch.inference_mode():
        if load_format is LoadFormat.DUMMY:
            for name, target in named.items():
                generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
                target.uniform_(-_DUMMY_RANGE, _DUMMY_RANGE, generator=generator)
        else:
            pieces = [Piece(name, target) for name, target in named.items()]
            copy_pieces(check_tower(folder, config), pieces, tenths(progress))
        return as_computed(weights, config)
