"""Sizing of the KV cache: the pages that there is room for."""

import os
from collections.abc import Callable

import torch

from qualification.model.config import DenseConfig, FeedForward, ModelConfig, kv_bytes_per_token, weight_bytes
from server.engine.execution.graph_keys import GraphSizes, graph_keys
from server.engine.execution.runner import ModelRunner
from server.engine.operators.launch_errors import blaming
from server.engine.startup.image_warmup import run_images
from server.engine.startup.limits import LEAST_MODEL_LEN, EngineLimits
from server.engine.startup.warmup import run_largest
from server.errors import ModelError, SettingsError
from server.model.vision.weights import tower_bytes
from server.settings import Settings

_DEFAULT_CPU_KV_TOKENS = 65536
# 114 graphs of 32 layers took 358 MiB, shared memory included: 100 KiB for each (H200, driver 580, Llama-3.1-8B shape).
_GRAPH_BYTES_A_LAYER = 128 * 1024


def num_pages(
    settings: Settings,
    config: ModelConfig,
    limits: EngineLimits,
    device: torch.device,
    *,
    sizes: GraphSizes | None,
    small_runner: Callable[[], ModelRunner],
) -> int:
    """Return the pages of the KV cache: what the settings say, or what the memory takes.

    sizes         of the graphs that will be captured; None without graphs
    small_runner  makes a runner with one page, to measure the memory of the largest step on a GPU
    Raises SettingsError when there are too few.
    """
    page_bytes = limits.page_size * kv_bytes_per_token(config, limits.dtype, limits.kv_dtype)
    if settings.kv_cache_tokens is not None:
        count = settings.kv_cache_tokens // limits.page_size
        _check_size(count * page_bytes, device)
    elif device.type == "cpu":
        count = -(-max(_DEFAULT_CPU_KV_TOKENS, limits.max_model_len) // limits.page_size)
    else:
        room_bytes = _room_bytes(small_runner(), limits, device) - _graph_bytes(config, limits, sizes)
        spared_bytes = int(device_bytes(device) * (1 - settings.gpu_memory_utilization))
        count = max(0, room_bytes - spared_bytes) // page_bytes
    _check_room(settings, limits, count * limits.page_size)
    return count


def _check_room(settings: Settings, limits: EngineLimits, num_tokens: int) -> None:
    """Raises SettingsError for a cache that holds less than was asked for, or no request at all."""
    asked = settings.max_model_len
    least = max(limits.page_size, LEAST_MODEL_LEN) if asked is None else asked
    if num_tokens >= least:
        return
    given = settings.kv_cache_tokens
    cause = f"--kv-cache-tokens {given}" if given else f"--gpu-memory-utilization {settings.gpu_memory_utilization:g}"
    needed = (
        f"at least {least} are needed, {limits.max_model_len} for the model's whole limit"
        if asked is None
        else f"--max-model-len needs {asked}"
    )
    raise SettingsError(f"{cause} gives room for {num_tokens} tokens, in pages of {limits.page_size}: {needed}")


def _room_bytes(runner: ModelRunner, limits: EngineLimits, device: torch.device) -> int:
    """Return the memory that is free beside the largest step: of several ranks on the one that has least."""
    with blaming(runner.suspects):
        allocated_bytes = run_largest(runner, limits, device)
        if runner.worker.tower is not None:
            run_images(runner.worker, [limits.tower_tokens(runner.worker.tower.config)])
    return runner.worker.others.least(room_beside_peak(device, allocated_bytes))


def room_beside_peak(device: torch.device, allocated_bytes: int) -> int:
    """Return the free memory less what was allocated at most, above `allocated_bytes`, since the peak was reset."""
    if device.type == "cpu":
        return device_bytes(device)
    peak_bytes = torch.cuda.max_memory_allocated(device) - allocated_bytes
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] - peak_bytes


def check_weights_fit(config: ModelConfig, limits: EngineLimits, device: torch.device) -> None:
    """Raises ModelError for a model whose weights and rotary tables alone are larger than the device's memory."""
    ropes = {(it.rope, it.rotary_dim) for it in config.attentions}
    table_bytes = 4 * config.max_position * sum(rope.rotated_dims(head_dim) for rope, head_dim in ropes)
    num_bytes, total_bytes = weight_bytes(config, limits.dtype) + table_bytes, device_bytes(device)
    if config.tower is not None:
        num_bytes += tower_bytes(config.tower, limits.dtype.num_bytes)
    if num_bytes > total_bytes:
        raise ModelError(
            f"weights in {limits.dtype.value} and the rotary table take {num_bytes / 2**30:.1f} GiB, the device has "
            f"{total_bytes / 2**30:.1f} GiB: serve a smaller model, or on a larger device"
        )


def check_sequences_fit(config: ModelConfig, limits: EngineLimits, device: torch.device) -> None:
    """Raises SettingsError where the logits of all sequences that run at once are larger than the device's memory.

    Otherwise the engine would die of the allocation at each of its starts.
    """
    row_bytes, total_bytes = 4 * config.vocab_size, device_bytes(device)
    if limits.max_num_seqs * row_bytes > total_bytes:
        took, has = limits.max_num_seqs * row_bytes / 2**30, total_bytes / 2**30
        raise SettingsError(
            f"max_num_seqs is {limits.max_num_seqs}: logits of so many sequences take {took:.1f} GiB, the device has "
            f"{has:.1f} GiB: ask for fewer"
        )


def _check_size(num_bytes: int, device: torch.device) -> None:
    """Raises SettingsError for a KV cache that cannot be allocated, however often the engine is started again."""
    total_bytes = device_bytes(device)
    if num_bytes > total_bytes:
        took, has = num_bytes / 2**30, total_bytes / 2**30
        raise SettingsError(f"--kv-cache-tokens asks for {took:.1f} GiB, the device has {has:.1f} GiB")


def device_bytes(device: torch.device) -> int:
    """Return the device's memory in bytes, used or free."""
    if device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(torch.cuda.mem_get_info(device)[1])


def _graph_bytes(config: ModelConfig, limits: EngineLimits, sizes: GraphSizes | None) -> int:
    """Estimate what the graphs will take: their results, their largest step, and the driver's memory for each."""
    if sizes is None:
        return 0
    keys = graph_keys(sizes)
    numbers_a_token = max(_feed_forward_numbers(layer.feed_forward, config) for layer in config.layers)
    numbers_a_token += 8 * config.hidden_size
    num_bytes = 4 * sizes.max_sampled * config.vocab_size + len(keys) * config.num_layers * _GRAPH_BYTES_A_LAYER
    return num_bytes + keys[0].num_tokens * numbers_a_token * limits.dtype.num_bytes


def _feed_forward_numbers(feed_forward: FeedForward | None, config: ModelConfig) -> int:
    """Numbers of a token between the products of a layer: gate, up, what they become, and a result of each expert.

    Where experts read a latent, also that and what they add of it.
    """
    if feed_forward is None:
        return 0
    if isinstance(feed_forward, DenseConfig):
        return (feed_forward.num_inner + 1) * feed_forward.width
    shared = 0 if feed_forward.shared is None or feed_forward.shared_is_expert else feed_forward.shared.width
    num_inner, size = feed_forward.num_inner + 1, feed_forward.read_size(config.hidden_size)
    of_latent = 2 * (feed_forward.latent or 0)
    return feed_forward.num_active_computed * (num_inner * feed_forward.width + size) + 3 * shared + of_latent
