"""Families of towers: what they are read from, and what is read of all of them alike."""

from collections.abc import Callable
from dataclasses import dataclass

from qualification.model.config import ModelConfig
from qualification.model.fields import Fields
from qualification.model.keys import Keys, family_keys
from qualification.model.tower import TowerConfig, TowerNames

AXIAL_THETA = 10_000.0  # of rotations in two dims, where a file names none
_NOTES = "model_type tokens_per_second spatial_patch_size dtype torch_dtype architectures"


@dataclass(frozen=True, slots=True)
class TowerSource:
    """The parts of a config.json that a tower is read from: vision_config, the whole, and the model of its text."""

    vision: Fields
    whole: Fields
    text: ModelConfig


ReadTower = Callable[[TowerSource], TowerConfig]
# (fields of the rotation of the text, pairs of dimensions of a head) -> which part of a position rotates each pair
ReadParts = Callable[[Fields, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TowerFamily:
    """names   of the tensors, as far as all towers of the family have the same
    read_parts  None where positions of images have one part, as those of text
    """

    names: TowerNames
    read: ReadTower
    read_parts: ReadParts | None = None


def check_keys(fields: Fields, own: str, notes: str = "") -> None:
    """Raise ModelConfigError for a key that is not known: what it asks for would be missing from each image."""
    without_effect = frozenset(f"{_NOTES} {notes}".split()) | family_keys().without_effect
    known = Keys(frozenset(own.split()), without_effect)
    for name in known.unknown(fields.names):
        fields.refuse(name, "absent (it is not known for this tower, and its images would be others)")


def num_read_layers(whole: Fields, num_layers: int) -> int:
    """Return how many layers are computed: those up to the one whose results the projector reads."""
    name = "vision_feature_layer"
    given = whole.given(name) if whole.has(name) else -1
    layer = given[0] if isinstance(given, list) and len(given) == 1 else given
    if type(layer) is not int or not 0 < (found := layer if layer >= 0 else num_layers + 1 + layer) <= num_layers:
        whole.refuse(name, f"one layer, from 1 to {num_layers}, or from -{num_layers} to -1 counted from the last one")
    return found
