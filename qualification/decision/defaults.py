"""The defaults of a server's limits. A qualification measures for the same choices."""

from dataclasses import dataclass
from types import MappingProxyType

from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.shape import Dtype
from qualification.decision.model_shapes import ServingLimits
from qualification.model.config import ModelConfig

BATCHED_TOKENS = MappingProxyType({"cuda": 8192, "cpu": 2048})  # new tokens of a step, by the kind of device
NUM_SEQS = MappingProxyType({"cuda": 256, "cpu": 16})  # sequences that run at once
PAGE_SIZE = MappingProxyType({"cuda": 64, "cpu": 16})  # tokens
IMAGE_TOKENS = 16_384  # of the images of a prompt, whose embeddings take 320 MiB of a 4B with three layers' additions
_SERVED_AS = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16, "float32": Dtype.BF16}  # fp32 is served as bf16


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of the operator; None leaves a choice to the model and the device."""

    max_model_len: int | None = None  # tokens; a model that takes less is qualified for what it takes
    max_num_batched_tokens: int | None = None
    page_size: int | None = None
    dtype: Dtype | None = None
    kv_dtype: Dtype | None = None  # of the KV cache; None: as the checkpoint says how it is quantised, else `dtype`
    kv_skip_layers: tuple[str, ...] = ()  # kept out of a cache of 8 bits, as `skipping_fp8_cache` takes them
    max_drafted_tokens: int = 0  # of a sequence, that one step verifies; 0: no tokens are drafted
    rounds_at_load: bool = False  # products to 8 bits, as `serve --quantization fp8`


def served_dtype(checkpoint: str, device_type: str) -> Dtype:
    """The dtype of a server for a checkpoint of "bfloat16", "float16" or "float32"."""
    return Dtype.FP32 if device_type == "cpu" else _SERVED_AS[checkpoint]


def limits_of(model: ModelConfig, device_type: str, choices: Choices) -> ServingLimits:
    """The limits under which a server serves the model."""
    dtype = choices.dtype or served_dtype(model.dtype, device_type)
    max_model_len = min(choices.max_model_len or model.max_position, model.longest_context)
    return ServingLimits(
        max_model_len=max_model_len,
        max_num_batched_tokens=choices.max_num_batched_tokens or BATCHED_TOKENS[device_type],
        page_size=choices.page_size or PAGE_SIZE[device_type],
        dtype=dtype,
        kv_dtype=choices.kv_dtype or (FP8 if model.caches_fp8 else dtype),
        max_drafted_tokens=choices.max_drafted_tokens,
        max_num_seqs=NUM_SEQS[device_type],
        max_image_tokens=0 if model.tower is None else min(IMAGE_TOKENS, max_model_len),
    )
