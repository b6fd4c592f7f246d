"""Model families: how config.json is read, and what checkpoints call each weight."""

from collections.abc import Callable
from dataclasses import dataclass

from qualification.model.config import ModelConfig
from qualification.model.fields import Fields


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of a layer's tensors within it, as in most families. Norms that a layer lacks are not looked for.

    merged                whether queries, keys and values are one tensor, and gate and up another
    before_feed_forward   the norm of what the feed-forward reads
    """

    merged: bool = False
    before_feed_forward: str = "post_attention_layernorm"
    before_attention: str = "input_layernorm"
    after_attention: str = "post_attention_layernorm"
    after_feed_forward: str = "post_feedforward_layernorm"


@dataclass(frozen=True, slots=True)
class Family:
    """model_type, architectures   as in config.json
    read_config   fields of config.json -> ModelConfig; raises ModelConfigError
    tensors       None where the server does not serve the family, and only its attention is of interest
    tolerated     ends of names that a checkpoint may hold without need
    """

    model_type: str
    architectures: tuple[str, ...]
    read_config: Callable[[Fields], ModelConfig]
    tensors: TensorNames | None = TensorNames()
    tolerated: tuple[str, ...] = ("rotary_emb.inv_freq",)  # a constant that old exporters wrote down
