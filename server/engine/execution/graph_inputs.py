"""The inputs of CUDA graphs: memory that stays where it is, filled on the host and copied to the device at once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.buckets import Bucket
from kernels.shape import Phase
from server.engine.attention.dispatch import PhasePart
from server.engine.execution.graph_keys import GraphKey, PartKey
from server.engine.execution.graph_memory import DeviceViews, HostArrays, Sections, host_arrays, num_bytes_of, views_of
from server.engine.execution.graph_rows import HostRows
from server.engine.scheduling.sequence import Batch, Sequence


@dataclass(frozen=True, slots=True)
class GraphTensors:
    """What a graph of n tokens reads: prompts first, then decode rows.

    token_ids   [n] int64
    slots       [n] int64, page * page_size + offset
    positions   [n] int32
    sampled     [num_prompts + decode rows] int64, the tokens whose logits are computed; None for all of them
    is_pending  [decode rows] bool, whether the host does not know the token yet; None without decode rows
    chosen_at   [decode rows] int64, where it is then among the latest tokens
    parts       the attention's, one for each kind of rows
    """

    token_ids: Tensor
    slots: Tensor
    positions: Tensor
    sampled: Tensor | None
    is_pending: Tensor | None
    chosen_at: Tensor | None
    parts: list[PhasePart]


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """How the memory is used for one key. `hosts`, `rows` and `sources` (bytes): one for each of the pinned buffers."""

    hosts: tuple[HostArrays, ...]
    rows: tuple[HostRows, ...]
    sources: tuple[Tensor, ...]
    target: Tensor
    tensors: GraphTensors


class GraphInputs:
    """All graphs share one buffer on the device, for only one runs at a time; each key lays it out for itself.

    On the host there are two, used in turns: one is filled while the device may still have to copy the other.
    """

    def __init__(
        self,
        keys: Iterable[GraphKey],
        *,
        num_prompts: int,
        page_size: int,
        num_pages: int,
        max_context: int,
        device: torch.device,
    ) -> None:
        """`num_prompts` that a graph takes. `num_pages`: those that sequences may own; padding writes behind them."""
        self._num_prompts = num_prompts
        self._page_size = page_size
        self._max_context = max_context
        keys = list(keys)
        most = max(key.num_tokens for key in keys)
        # Several padding tokens may share a slot of nobody's page; what it holds is of no account.
        self._padding_slots = num_pages * page_size + np.arange(most) % page_size
        num_bytes = max(num_bytes_of(self._sections(key)) for key in keys)
        is_cuda = device.type == "cuda"
        self._pinned = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self._latest: list[_Layout | None] = [None, None]  # that the buffers were filled by
        self._turn = 0
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        # One query a decode row, padding included: the same for every batch.
        self._one_query_each = torch.arange(1 + most, dtype=torch.int32, device=device)
        self._layouts = {key: self._layout(key) for key in keys}

    def tensors(self, key: GraphKey) -> GraphTensors:
        """What a graph of this key reads."""
        return self._layouts[key].tensors

    def fill(self, key: GraphKey, batch: Batch, chosen_at: Mapping[Sequence, int]) -> None:
        """Write a batch that the key is for, and start its copy to the device. The copy before the latest must be done.

        Padding rows have no context, so that they read no page, and write to a page that nobody reads.
        `chosen_at`: where the device has the tokens that the launch before chose, PENDING here or known by now.
        """
        layout = self._layouts[key]
        self._turn = 1 - self._turn
        host, rows = layout.hosts[self._turn], layout.rows[self._turn]
        latest = self._latest[self._turn]
        if layout is not latest:
            if latest is not None:
                latest.rows[self._turn].forget()
            self._latest[self._turn] = layout
        num_prompts = batch.num_prefill + batch.num_extend
        if key.prompts is not None:
            self._fill_prompts(host, key.prompts, batch, num_prompts)
        if key.decode is not None:
            rows.fill(batch, num_prompts, chosen_at)
        layout.target.copy_(layout.sources[self._turn], non_blocking=True)

    def _fill_prompts(self, host: HostArrays, part: PartKey, batch: Batch, num_prompts: int) -> None:
        size = self._page_size
        ends = list(accumulate(batch.query_lens[:num_prompts]))
        for row, (stop, length) in enumerate(zip(ends, batch.query_lens, strict=False)):
            start, context_len = stop - length, batch.context_lens[row]
            first = context_len - length
            host.token_ids[start:stop] = batch.sequences[row].span(first, context_len)
            places = np.arange(first, context_len)
            host.positions[start:stop] = places
            table = np.array(batch.page_tables[row], dtype=np.int64)
            host.slots[start:stop] = table[places // size] * size + places % size
            if part.phase is Phase.EXTEND:
                host.prompt_pages[row, : table.size] = table
        host.pad(ends[-1], part.size, self._padding_slots)
        host.cu_seqlens[0] = 0
        host.cu_seqlens[1 : num_prompts + 1] = ends
        host.cu_seqlens[num_prompts + 1 :] = ends[-1]
        if part.phase is Phase.EXTEND:
            host.prompt_contexts[:num_prompts] = batch.context_lens[:num_prompts]
            host.prompt_contexts[num_prompts:] = 0
        host.sampled[:num_prompts] = ends
        host.sampled[:num_prompts] -= 1
        host.sampled[num_prompts : self._num_prompts] = 0
        host.sampled[self._num_prompts :] = np.arange(part.size, part.size + host.sampled.size - self._num_prompts)

    def _longest(self, longest: Bucket) -> int:
        """The most tokens of a sequence in this bucket."""
        return min(longest.hi or self._max_context, self._max_context)

    def _table_width(self, part: PartKey) -> int:
        return -(-self._longest(part.longest) // self._page_size)

    def _sections(self, key: GraphKey) -> Sections:
        """dtype and number of elements of the arrays of `HostArrays`, in its order."""
        num_rows = 0 if key.decode is None else key.decode.size
        num_prompts = 0 if key.prompts is None else self._num_prompts
        num_chunks = num_prompts if key.prompts is not None and key.prompts.phase is Phase.EXTEND else 0
        return [
            (torch.int64, key.num_tokens),
            (torch.int64, key.num_tokens),
            (torch.int64, num_prompts and num_prompts + num_rows),
            (torch.int64, num_rows),
            (torch.int32, key.num_tokens),
            (torch.int32, num_prompts and num_prompts + 1),
            (torch.int32, num_chunks),
            (torch.int32, 0 if key.prompts is None else num_chunks * self._table_width(key.prompts)),
            (torch.int32, num_rows),
            (torch.int32, 0 if key.decode is None else num_rows * self._table_width(key.decode)),
            (torch.bool, num_rows),
        ]

    def _layout(self, key: GraphKey) -> _Layout:
        sections = self._sections(key)
        views = DeviceViews(*views_of(self._device, sections))
        parts = []
        if key.prompts is not None:
            parts.append(self._prompts_part(key.prompts, views))
        if key.decode is not None:
            parts.append(self._decode_part(key, key.decode, views))
        num_bytes = num_bytes_of(sections)
        hosts = tuple(host_arrays(key, views_of(memory, sections)) for memory in self._pinned)
        num_rows = 0 if key.decode is None else key.decode.size
        return _Layout(
            hosts,
            tuple(HostRows(host, num_rows, self._page_size, self._padding_slots) for host in hosts),
            tuple(memory[:num_bytes] for memory in self._pinned),
            self._device[:num_bytes],
            GraphTensors(
                views.token_ids,
                views.slots,
                views.positions,
                sampled=None if key.prompts is None else views.sampled,
                is_pending=None if key.decode is None else views.is_pending,
                chosen_at=None if key.decode is None else views.chosen_at,
                parts=parts,
            ),
        )

    def _prompts_part(self, part: PartKey, views: DeviceViews) -> PhasePart:
        bound = self._longest(part.longest)
        is_fresh = part.phase is Phase.PREFILL
        return PhasePart(
            phase=part.phase,
            tokens=slice(0, part.size),
            batch=AttentionBatch(
                cu_seqlens_q=views.cu_seqlens,
                max_seqlen_q=min(part.size, bound),
                max_context=min(part.size, bound) if is_fresh else bound,
                cu_seqlens_k=views.cu_seqlens if is_fresh else None,
                page_table=None if is_fresh else views.prompt_pages.view(self._num_prompts, -1),
                context_lens=None if is_fresh else views.prompt_contexts,
            ),
            num_sequences=self._num_prompts,
            num_tokens=part.size,
        )

    def _decode_part(self, key: GraphKey, part: PartKey, views: DeviceViews) -> PhasePart:
        return PhasePart(
            phase=Phase.DECODE,
            tokens=slice(key.num_tokens - part.size, key.num_tokens),
            batch=AttentionBatch(
                cu_seqlens_q=self._one_query_each[: part.size + 1],
                max_seqlen_q=1,
                max_context=self._longest(part.longest),
                page_table=views.page_table.view(part.size, -1),
                context_lens=views.context_lens,
            ),
            num_sequences=part.size,
            num_tokens=part.size,
        )
