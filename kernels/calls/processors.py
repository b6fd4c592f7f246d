"""Properties of a GPU that choose tiles and splits: multiprocessors, and shared memory of one program."""

from functools import lru_cache

import torch


@lru_cache(maxsize=16)
def shared_bytes(device: torch.device) -> int | None:
    """Shared memory one program may have on the GPU; None in the interpreter."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@lru_cache(maxsize=16)
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the GPU; in the interpreter a few, so that contexts are split there too."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
