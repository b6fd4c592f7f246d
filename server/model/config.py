"""A model's architecture as data, whatever its family."""

import math
from dataclasses import dataclass
from enum import Enum


class RopeKind(Enum):
    PLAIN = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding; the fields of other kinds than `kind` keep their defaults."""

    theta: float
    kind: RopeKind = RopeKind.PLAIN
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the decoder is built from. One instance for all families: a family's file fills it from config.json."""

    family: str  # config.json's model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool  # on q, k and v
    output_bias: bool  # on the output projection
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # one a layer
    softcap: float | None
    sinks: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)
