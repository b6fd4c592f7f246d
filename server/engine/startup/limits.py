"""Limits of an engine, once settings, model and machine are known."""

import logging
from dataclasses import dataclass, replace

import torch

from kernels.fp8_cache.pages import HEAD_DIM_MULTIPLE
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.shape import Dtype
from qualification.decision.defaults import BATCHED_TOKENS, IMAGE_TOKENS, NUM_SEQS, PAGE_SIZE, served_dtype
from qualification.decision.model_shapes import ServingLimits
from qualification.model.cached_layers import FLAG
from qualification.model.config import ModelConfig, num_parameters
from qualification.model.tower import TowerConfig
from server.engine.execution.graph_keys import GraphSizes, graph_sizes
from server.engine.startup.drafting import drafting_of
from server.errors import SettingsError
from server.settings import CacheDtype, DeviceChoice, DtypeChoice, Settings

logger = logging.getLogger(__name__)

_CHOSEN_DTYPES = {DtypeChoice.FP32: Dtype.FP32, DtypeChoice.FP16: Dtype.FP16, DtypeChoice.BF16: Dtype.BF16}
LEAST_MODEL_LEN = 2  # tokens
_CPU_INTERLEAVED_TOKENS = 512
# Floating-point operations of one layer's attention in a step of a CPU, beyond which prompts wait for the next step:
# nothing is heard of the engine meanwhile. Twice as many took up to 7 s of two cores that eleven others wanted, where
# readiness ends after 5 s. An 8B reaches them with 1,448 tokens without context, the demo with 2,048 behind 7,000.
_CPU_ATTENTION_FLOPS = 2**34
# An 8B computes 2048 tokens in 52 ms, the longest pause of a stream then, and each as fast as of 8192 (H200). A smaller
# model computes more in that time, and must: a step beyond the graphs takes some 20 ms to launch, and with 2048 tokens
# in each a 0.6B had 0.8 of vLLM's throughput.
_INTERLEAVED_WORK = 1.65e13  # tokens x parameters
_LEAST_INTERLEAVED_TOKENS = 512  # under some 250 a step costs no less (H200)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Every choice that Settings leave open, made."""

    dtype: Dtype
    kv_dtype: Dtype
    max_model_len: int  # tokens of prompt and completion
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_interleaved_tokens: int
    page_size: int  # tokens
    max_attended_keys: int | None = None  # of all prompt tokens of a step together; None: no such limit
    max_drafted_tokens: int = 0  # of a sequence, that one step verifies
    state_snapshots: int | None = None  # slots for them; None: as many as sequences that run at once
    max_image_tokens: int = 0  # whose embeddings are kept; 0: images are refused
    max_num_batched_image_tokens: int = 0  # that the tower computes in a step, an image at least

    def tower_tokens(self, tower: TowerConfig) -> int:
        """Return the most tokens of images that a tower computes together.

        One image may have as many as are kept at all; where each has the same, a step's limit bounds them.
        """
        each = tower.tokens_of_each
        return self.max_image_tokens if each is None else max(each, self.max_num_batched_image_tokens)

    @property
    def serving(self) -> ServingLimits:
        return ServingLimits(
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            page_size=self.page_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            max_drafted_tokens=self.max_drafted_tokens,
            max_num_seqs=self.max_num_seqs,
            # One image may have more tokens than a step's images together: then it is computed alone.
            max_image_tokens=max(self.max_image_tokens, self.max_num_batched_image_tokens),
        )


def sizes_of_graphs(config: ModelConfig, limits: EngineLimits, max_context: int) -> GraphSizes:
    """Return the sizes of the graphs of an engine whose contexts are at most `max_context` tokens."""
    sizes = graph_sizes(
        config,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_context=max_context,
    )
    return replace(sizes, row_tokens=(1 + limits.max_drafted_tokens,)) if limits.max_drafted_tokens else sizes


def choose_device(settings: Settings, rank: int = 0) -> torch.device:
    """Return the device of a rank. Raises SettingsError where CUDA is asked for and there is no such device."""
    has_cuda = torch.cuda.is_available()
    if settings.device is DeviceChoice.CUDA and not has_cuda:
        raise SettingsError(
            "--device is cuda, but torch sees no CUDA device here: give this process a GPU, or serve with --device cpu"
        )
    if settings.device is DeviceChoice.CPU or not has_cuda:
        return torch.device("cpu")
    num_devices, world = torch.cuda.device_count(), settings.tensor_parallel_size
    if num_devices < world:
        raise SettingsError(
            f"--tensor-parallel-size is {world}: each rank needs a GPU of its own, torch sees {num_devices}"
        )
    return torch.device("cuda", rank)


def choose_limits(
    settings: Settings, config: ModelConfig, device: torch.device, most_image_tokens: int | None = None
) -> EngineLimits:
    """Raises SettingsError for limits that disagree with the model or with each other.

    `most_image_tokens` of one image, by the model's processor; None where it has no bound.
    """
    kind = device.type
    max_model_len = settings.max_model_len or config.max_position
    if max_model_len > config.longest_context:
        remedy = "or stretch them as its authors say, by rope_scaling in config.json"
        if config.positions is not None:
            remedy = "it has learned no more"
        raise SettingsError(
            f"max_model_len is {max_model_len}, the model's positions end at {config.longest_context}: ask for "
            f"fewer, {remedy}"
        )
    if max_model_len < LEAST_MODEL_LEN:
        raise SettingsError(
            f"max_model_len is {max_model_len}, it must be at least {LEAST_MODEL_LEN}: a token to read, one to write"
        )
    dtype = choose_dtype(settings.dtype, config, kind)
    batched = settings.max_num_batched_tokens or BATCHED_TOKENS[kind]
    drafting = drafting_of(settings)
    limits = EngineLimits(
        dtype=dtype,
        kv_dtype=_cache_dtype(settings, config, dtype),
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs or NUM_SEQS[kind],
        max_num_batched_tokens=batched,
        max_num_interleaved_tokens=settings.max_num_interleaved_tokens or _interleaved_tokens(config, kind, batched),
        page_size=settings.page_size or PAGE_SIZE[kind],
        max_attended_keys=_attended_keys(config) if kind == "cpu" else None,
        max_drafted_tokens=0 if drafting is None else drafting.num_speculative_tokens,
        state_snapshots=settings.state_snapshots,
    )
    if config.tower is not None:
        image_tokens = settings.max_num_batched_image_tokens or limits.max_num_interleaved_tokens
        kept = settings.max_image_tokens or min(IMAGE_TOKENS, max_model_len)
        limits = replace(limits, max_image_tokens=kept, max_num_batched_image_tokens=image_tokens)
        if kept < config.tower.least_tokens:
            raise SettingsError(
                f"max_image_tokens is {kept}, it must be at least {config.tower.least_tokens}, those of the smallest "
                "image of this model; raise it and --max-model-len, or serve text alone with --limit-images 0"
            )
        if config.has_image_spans:
            _check_whole_images(limits, min(most_image_tokens or kept, kept))
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise SettingsError(
            f"max_num_batched_tokens is {limits.max_num_batched_tokens}, it must be at least max_num_seqs, "
            f"which is {limits.max_num_seqs}: each running sequence computes a token a step"
        )
    if settings.page_size is not None and settings.page_size > max_model_len:
        raise SettingsError(
            f"page_size is {settings.page_size}, it must be at most max_model_len, which is {max_model_len}: no "
            "sequence fills such a page"
        )
    if config.chunk is not None and config.chunk % limits.page_size:
        raise SettingsError(
            f"page_size is {limits.page_size}, it must divide {config.chunk}, the positions of a chunk of this model's "
            "attention"
        )
    return limits


def _check_whole_images(limits: EngineLimits, num_tokens: int) -> None:
    """Raise SettingsError where a step cannot hold an image, whose tokens see each other and are computed together."""
    others = limits.max_num_seqs - 1
    found = {
        "max_num_batched_tokens": (limits.max_num_batched_tokens, num_tokens + others),
        "max_num_interleaved_tokens": (limits.max_num_interleaved_tokens, num_tokens),
    }
    for name, (given, least) in found.items():
        if given < least:
            beside = f" beside a token of each of {others} other sequences" if least > num_tokens else ""
            raise SettingsError(
                f"{name} is {given}, it must be at least {least}: a step computes an image of this model whole, "
                f"{num_tokens} tokens{beside}; raise it, or serve text alone with --limit-images 0"
            )


def _cache_dtype(settings: Settings, config: ModelConfig, dtype: Dtype) -> Dtype:
    """Return the dtype of the KV cache. Raises SettingsError for an fp8 cache that the model cannot have."""
    found = _chosen_cache_dtype(settings, config, dtype)
    if settings.kv_cache_dtype_skip_layers is not None and found is not FP8:
        raise SettingsError(
            f"{FLAG} is set, and the KV cache is {found.value}: set --kv-cache-dtype fp8 with it, or leave it out"
        )
    return found


def _chosen_cache_dtype(settings: Settings, config: ModelConfig, dtype: Dtype) -> Dtype:
    choice, is_asked_by_file = settings.kv_cache_dtype, config.caches_fp8
    if choice is CacheDtype.AUTO and not is_asked_by_file:
        return dtype
    if choice not in (CacheDtype.AUTO, CacheDtype.FP8):
        return Dtype(choice.value)
    reason = None
    if settings.reproducible:
        reason = "--reproducible: no path of a fixed order of sums reads it"
    elif any(it.is_latent for it in config.attentions):
        reason = f"latent attention ({config.family}): no path reads latents of 8 bits"
    elif any(it.value_dim is not None for it in config.attentions):
        reason = f"values of a size of their own ({config.family}): no path reads those of 8 bits"
    elif any(it.head_dim % HEAD_DIM_MULTIPLE for it in config.attentions if not it.skips_fp8_cache):
        reason = f"heads of {config.attentions[0].head_dim} dimensions: they must be multiples of {HEAD_DIM_MULTIPLE}"
    if reason is None:
        origin = "config.json" if choice is CacheDtype.AUTO else "--kv-cache-dtype"
        logger.info(
            "KV cache: e4m3 by %s, a scale for each token and KV head is computed when they are written; static scales "
            "of the checkpoint, if it has any, are not used",
            origin,
        )
        return FP8
    if choice is CacheDtype.FP8:
        raise SettingsError(f"--kv-cache-dtype is fp8, which cannot be with {reason}; leave one of them out")
    logger.warning("KV cache: %s, though config.json asks for fp8, which cannot be with %s", dtype.value, reason)
    return dtype


def _attended_keys(config: ModelConfig) -> int:
    """Return the keys to attend to by `_CPU_ATTENTION_FLOPS`: 4 operations for each number of a query."""
    return _CPU_ATTENTION_FLOPS // (4 * max(it.query_size for it in config.attentions))


def _interleaved_tokens(config: ModelConfig, kind: str, max_num_batched_tokens: int) -> int:
    if kind == "cpu":
        return _CPU_INTERLEAVED_TOKENS
    tokens = int(_INTERLEAVED_WORK / num_parameters(config, num_tokens=1)) // 256 * 256
    return min(max(tokens, _LEAST_INTERLEAVED_TOKENS), max_num_batched_tokens)


def choose_dtype(choice: DtypeChoice, config: ModelConfig, kind: str) -> Dtype:
    """Return the dtype of a model's weights on a kind of device."""
    if choice is not DtypeChoice.AUTO:
        return _CHOSEN_DTYPES[choice]
    return served_dtype(config.dtype, kind)
