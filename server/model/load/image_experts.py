"""Experts of text in a checkpoint whose layers also have experts for the tokens of images: ERNIE 4.5 VL's.

    mlp.gate.weight, weight_1                    [H, E] each: the routers of text and of images, transposed
    mlp.experts.0 to E - 1, and E to 2 E - 1     of text, then of images, whose matrices have another width
    mlp.moe_statics.e_score_correction_bias      [2, E]: of text, then of images

Text visits none of the others, which are not read.
"""

from collections.abc import Mapping
from dataclasses import replace

from qualification.model.config import ExpertsConfig, ModelConfig
from qualification.model.families.family import TensorNames
from server.model.load.checkpoint import TensorEntry

_OF_BOTH = 2


def without_image_experts(
    entries: Mapping[str, TensorEntry], config: ModelConfig, names: TensorNames
) -> dict[str, TensorEntry]:
    """Return a checkpoint's tensors without those of images, of a family that has some; else all of them."""
    found, own = dict(entries), names.experts
    if own is None or not own.has_image_experts:
        return found
    for index, layer in enumerate(config.layers):
        if not isinstance(layer.feed_forward, ExpertsConfig):
            continue
        prefix, count = f"model.layers.{index}", layer.feed_forward.num_experts
        found.pop(f"{prefix}.{own.router}.weight_1", None)
        for expert in range(count, _OF_BOTH * count):
            for part in (own.gate, own.up, own.down):
                found.pop(f"{prefix}.{own.experts}.{expert}.{part}.weight", None)
        name = f"{prefix}.{own.correction_bias}"
        if name in found and found[name].shape == (_OF_BOTH, count):
            found[name] = replace(found[name], shape=(1, count))  # the first row, where the tensor begins
    return found
