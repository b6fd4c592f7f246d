"""Activations of a feed-forward without a gate, as data: torch-free, so that a model's configuration can hold them."""

from enum import Enum


class Ungated(Enum):
    """down(activation(up)). The values are those of transformers. Source: So et al. 2021 (Primer) of relu2."""

    RELU2 = "relu2"  # max(x, 0)^2
