"""How the inputs of a CUDA graph lie in one piece of memory, the same on the host and on the device."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from server.engine.execution.graph_keys import GraphKey

_ALIGNMENT_BYTES = 64  # of every section: Triton compiles a kernel again for a pointer that 16 does not divide

Sections = list[tuple[torch.dtype, int]]  # dtype and number of elements of each array, in the order of HostArrays


@dataclass(frozen=True, slots=True)
class HostArrays:
    """The same memory on the host. Empty arrays for what the graph has no rows for."""

    token_ids: NDArray[np.int64]
    slots: NDArray[np.int64]
    sampled: NDArray[np.int64]
    chosen_at: NDArray[np.int64]
    positions: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    prompt_contexts: NDArray[np.int32]
    prompt_pages: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    page_table: NDArray[np.int32]
    is_pending: NDArray[np.bool_]

    def pad(self, start: int, stop: int, slots: NDArray[np.int64]) -> None:
        """Make the tokens [start, stop) such that they disturb nobody: they write to `slots`."""
        self.token_ids[start:stop] = 0
        self.slots[start:stop] = slots[: stop - start]
        self.positions[start:stop] = 0


@dataclass(frozen=True, slots=True)
class DeviceViews:
    """The same memory on the device, flat."""

    token_ids: Tensor
    slots: Tensor
    sampled: Tensor
    chosen_at: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    prompt_contexts: Tensor
    prompt_pages: Tensor
    context_lens: Tensor
    page_table: Tensor
    is_pending: Tensor


def host_arrays(key: GraphKey, views: list[Tensor]) -> HostArrays:
    host = HostArrays(*(view.numpy() for view in views))
    num_chunks, num_rows = host.prompt_contexts.size, 0 if key.decode is None else key.decode.size
    return replace(
        host,
        prompt_pages=host.prompt_pages.reshape(num_chunks, -1) if num_chunks else host.prompt_pages,
        page_table=host.page_table.reshape(num_rows, -1) if num_rows else host.page_table,
    )


def views_of(memory: Tensor, sections: Sections) -> list[Tensor]:
    """The sections, one after another in bytes of memory."""
    views, start = [], 0
    for dtype, size in sections:
        stop = start + size * dtype.itemsize
        views.append(memory[start:stop].view(dtype))
        start = _aligned(stop)
    return views


def num_bytes_of(sections: Sections) -> int:
    return sum(_aligned(dtype.itemsize * size) for dtype, size in sections)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
