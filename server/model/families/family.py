"""What a model family is: how to read its config.json, and where its checkpoints keep each weight."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from server.model.config import ModelConfig
from server.model.families.fields import Fields
from server.model.layers import Weights


@dataclass(frozen=True, slots=True)
class Family:
    """model_type, architectures   as in config.json
    read_config       fields of config.json, eos ids of generation_config.json -> ModelConfig; raises ModelError
    checkpoint_views  every tensor of a checkpoint by name, as the (view of a) weight that it fills
    tolerated         ends of names that a checkpoint may hold without need
    """

    model_type: str
    architectures: tuple[str, ...]
    read_config: Callable[[Fields], ModelConfig]
    checkpoint_views: Callable[[Weights, ModelConfig], dict[str, Tensor]]
    tolerated: tuple[str, ...] = ("rotary_emb.inv_freq",)  # a constant that old exporters wrote down
