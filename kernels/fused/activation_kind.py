"""The functions that gate a feed-forward layer, by name: torch-free, so that a model's configuration can say which."""

from enum import Enum


class Activation(Enum):
    """The values are those of transformers, in a config.json's hidden_act or hidden_activation."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU = "gelu"
