"""Scales of a quantised checkpoint, once they are loaded: numbers all, and those of inputs, which divide, positive."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kernels.experts.few_bits.weights import FewBitExperts
from kernels.linear.weights import StoredTensor
from qualification.model.families.family import TensorNames
from qualification.model.shard import Shard
from server.errors import ModelError
from server.model.layers import LayerWeights, MixtureWeights, Weights
from server.model.load.checkpoint import TensorEntry
from server.model.tensor_views import layer_views

_OF_WEIGHT, _OF_INPUTS = "weight_scale", "input_scale"  # last words of their names


def check_scales(
    folder: Path, weights: Weights, shard: Shard, names: TensorNames, entries: Mapping[str, TensorEntry]
) -> None:
    """Raise ModelError that names a tensor with a scale by which nothing can be multiplied. Waits for the device."""
    config = shard.local_config
    for index, layer in enumerate(weights.layers):
        if not _any_wrong(_stored_of(layer)):
            continue
        for name, stored in layer_views(index, layer, config.layers[index], names).items():
            product, _, word = name.rpartition(".")
            if _any_wrong([(word, stored)]):
                in_file = "weight" if config.rounds_at_load else word
                raise ModelError(_message(folder, _in_file(f"{product}.{in_file}", entries), word, stored))
        raise ModelError(f"{folder}: experts of layer {index}: a scale is NaN or infinite: fetch the checkpoint again")
    for word, stored in weights.head.weight.stored.items():
        if _any_wrong([(word, stored)]):
            raise ModelError(_message(folder, _in_file(f"lm_head.{word}", entries), word, stored))


def _in_file(name: str, entries: Mapping[str, TensorEntry]) -> str:
    """Return the name that a tensor has in its file; its own where it is made of several."""
    return entries[name].name if name in entries else name


def _stored_of(layer: LayerWeights) -> list[tuple[str, StoredTensor]]:
    """Return the tensors of a layer's products by their last words, those of all experts as one."""
    weights = [it.weight for it in layer.linears.values()]
    if isinstance(layer.feed_forward, MixtureWeights) and isinstance(layer.feed_forward.experts, FewBitExperts):
        weights += [layer.feed_forward.experts.gate_up, layer.feed_forward.experts.down]
    return [it for weight in weights for it in weight.stored.items()]


def _any_wrong(found: Iterable[tuple[str, StoredTensor]]) -> bool:
    flags = [_wrong(word, it.values).any() for word, it in found if word in (_OF_WEIGHT, _OF_INPUTS)]
    return bool(flags) and bool(torch.stack(flags).any())  # one wait, not one for each


def _wrong(word: str, scales: Tensor) -> Tensor:
    found = ~torch.isfinite(scales)
    return found | (scales <= 0) if word == _OF_INPUTS else found


def _message(folder: Path, name: str, word: str, stored: StoredTensor) -> str:
    wanted = "positive numbers were" if word == _OF_INPUTS else "finite numbers were"
    found = stored.values[_wrong(word, stored.values)][0].item()
    return f"{folder}: {name}: {wanted} expected, found {found:g}: fetch the checkpoint again"
