"""Layers whose keys and values stay in the model's dtype beside others that are cached in 8 bits."""

import re
from collections.abc import Sequence
from dataclasses import replace

from qualification.model.config import LayerConfig, ModelConfig

FLAG = "--kv-cache-dtype-skip-layers"  # of `hallmark serve` and `hallmark qualify`
SLIDING_WINDOW = "sliding_window"  # stands for all layers under a window


def skipping_fp8_cache(config: ModelConfig, chosen: Sequence[str]) -> ModelConfig:
    """Return the model with these layers kept out of a cache of 8 bits.

    chosen  numbers of layers, from 0, and SLIDING_WINDOW, as vLLM's --kv-cache-dtype-skip-layers takes them

    A layer that reads another's pages is as that one is. Raises ValueError for a layer that is not there or keeps no
    keys of its own, and where every layer is named.
    """
    if not chosen:
        return config
    skipped = {index for each in chosen for index in _layers_of(config, each)}
    if skipped.issuperset(i for i, it in enumerate(config.layers) if it.attends and it.attention.reads_keys_of is None):
        raise ValueError(f"{FLAG}: every layer that attends is named: leave out the fp8 cache itself")
    return replace(config, layers=tuple(_skipping(it, index, skipped) for index, it in enumerate(config.layers)))


def _layers_of(config: ModelConfig, chosen: str) -> list[int]:
    if chosen == SLIDING_WINDOW:
        found = [i for i, it in enumerate(config.layers) if it.attends and it.attention.window is not None]
        if not found:
            raise ValueError(f"{FLAG}: {SLIDING_WINDOW!r}: no layer of this model has a window")
        return found
    if re.fullmatch(r"\d{1,6}", chosen) is None:
        raise ValueError(f"{FLAG}: {chosen!r}: it must be {SLIDING_WINDOW!r} or a layer's number, from 0")
    index = int(chosen)
    if index >= config.num_layers:
        raise ValueError(f"{FLAG}: {index}: the model's layers are 0 to {config.num_layers - 1}")
    layer = config.layers[index]
    if not layer.attends:
        raise ValueError(f"{FLAG}: {index}: this layer does not attend, and has no keys to keep")
    if layer.attention.reads_keys_of is not None:
        raise ValueError(
            f"{FLAG}: {index}: this layer reads the keys of {layer.attention.reads_keys_of}: name that one"
        )
    return [index]


def _skipping(layer: LayerConfig, index: int, skipped: set[int]) -> LayerConfig:
    if not layer.attends:
        return layer
    source = layer.attention.reads_keys_of
    is_skipped = (index if source is None else source) in skipped
    return replace(layer, mixer=replace(layer.attention, skips_fp8_cache=is_skipped))
