"""A model's architecture as data, whatever its family."""

import math
from dataclasses import dataclass
from enum import Enum

from kernels.shape import Dtype


class RopeKind(Enum):
    PLAIN = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding, every default resolved; the fields of other kinds than `kind` keep theirs."""

    theta: float
    kind: RopeKind = RopeKind.PLAIN
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True  # the borders between the bands are whole dimensions
    attention_factor: float = 1.0  # of the cosines and sines


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


def kv_bytes_per_token(config: ModelConfig, kv_dtype: Dtype) -> int:
    """Bytes of cache that one token takes in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_dtype.num_bytes


def num_parameters(config: ModelConfig) -> int:
    """Numbers in the checkpoint; tied embeddings count once."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads, fed = config.num_kv_heads * config.head_dim, config.intermediate_size
    attention = 2 * hidden * (heads + kv_heads) + 2 * config.head_dim * config.qk_norm
    attention += (heads + 2 * kv_heads) * config.attention_bias + hidden * config.output_bias
    feed_forward = 3 * hidden * fed + (2 * fed + hidden) * config.mlp_bias
    embeddings = config.vocab_size * hidden * (1 if config.tie_embeddings else 2)
    return embeddings + config.num_layers * (attention + feed_forward + 2 * hidden) + hidden
