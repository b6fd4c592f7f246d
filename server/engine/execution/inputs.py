"""A batch as tensors on the device: two copies a step, one for each integer width."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import AttentionBatch
from kernels.shape import Phase
from server.engine.attention.dispatch import PhasePart
from server.engine.scheduling.sequence import PENDING, Batch, Sequence

# Every section starts at a multiple of this many elements: Triton compiles a kernel again for a pointer that is not
# aligned to 16 bytes, and page tables of a width that 16 divides keep one specialisation of their row stride.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T tokens of a batch, rows in order, and R rows to sample.

    token_ids  [T] int64
    positions  [T] int32
    slots      [T] int64, page * page_size + offset
    sampled    [R] int64, the tokens whose hidden states are sampled from
    pending    [2, P] int64: tokens whose ids only the device knows yet, and where the step before has chosen them
    parts      one a phase that the batch has
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled: Tensor
    pending: Tensor
    parts: list[PhasePart]


class Staging:
    """Host memory (pinned where the device is a GPU) that is filled section by section and copied at once."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=dtype)

    def sections(self, sizes: list[int]) -> tuple[list["NDArray[np.int64]"], list[Tensor]]:
        """Host arrays to fill and the tensors that `upload` fills; both live until the next call."""
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        starts = [0, *ends[:-1]]
        if ends[-1] > self._host.numel():
            is_cuda = self._device.type == "cuda"
            self._host = torch.zeros(2 * ends[-1], dtype=self._host.dtype, pin_memory=is_cuda)
        used = self._host[: ends[-1]]
        self._pending = (used, used if self._device.type == "cpu" else torch.empty_like(used, device=self._device))
        host = used.numpy()
        arrays = [host[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        tensors = [self._pending[1][start : start + size] for start, size in zip(starts, sizes, strict=True)]
        return arrays, tensors

    def upload(self) -> None:
        """Start the copy. The host memory must stay as it is until the device has done it."""
        host, device = self._pending
        if host is not device:
            device.copy_(host, non_blocking=True)


class InputBuilder:
    """Turns batches into tensors. Its host memory is used in turns: call `build` only when the device has done the step
    before the latest one.
    """

    def __init__(self, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._stagings = [(Staging(torch.int64, device), Staging(torch.int32, device)) for _ in range(2)]
        self._turn = 0

    def build(self, batch: Batch, chosen_at: Mapping[Sequence, int]) -> StepInputs:
        """The tensors of a batch with at least one row.

        `chosen_at`: where the step before has chosen the tokens that the host does not know yet, in its results.
        """
        self._turn = 1 - self._turn
        int64, int32 = self._stagings[self._turn]
        num_tokens = batch.num_tokens
        sizes = [num_tokens]  # positions, then (cu_seqlens, context_lens, page table) of each phase
        phases = batch.phases
        widths = {phase: self._table_width(batch, phase) for phase in phases}
        for phase in phases:
            num_rows = len(batch.rows_of(phase))
            sizes += [num_rows + 1, num_rows, num_rows * widths[phase]]
        starts = [0, *accumulate(batch.query_lens)]
        pending = pending_rows(batch)
        host64, device64 = int64.sections([num_tokens, num_tokens, len(batch.sampled_rows), 2 * len(pending)])
        host32, device32 = int32.sections(sizes)
        self._fill_tokens(batch, starts, host64[0], host32[0], host64[1])
        host64[3][:] = [starts[row] for row in pending] + [chosen_at[batch.sequences[row]] for row in pending]
        host64[2][:] = [starts[row + 1] - 1 for row in batch.sampled_rows]
        parts = []
        for index, phase in enumerate(phases):
            section = slice(1 + 3 * index, 4 + 3 * index)
            _fill_part(batch, phase, starts, host32[section], widths[phase])
            parts.append(_part(batch, phase, starts, device32[section], widths[phase]))
        int64.upload()
        int32.upload()
        unknown = device64[3].view(2, len(pending))
        return StepInputs(device64[0], device32[0], device64[1], device64[2], unknown, parts)

    def _table_width(self, batch: Batch, phase: Phase) -> int:
        """Entries of a row of the phase's page table; 0 in prefill, which reads no pages."""
        if phase is Phase.PREFILL:
            return 0
        longest = max(len(batch.page_tables[row]) for row in batch.rows_of(phase))
        return -(-longest // _ALIGNMENT) * _ALIGNMENT

    def _fill_tokens(
        self,
        batch: Batch,
        starts: list[int],
        token_ids: "NDArray[np.int64]",
        positions: "NDArray[np.int64]",
        slots: "NDArray[np.int64]",
    ) -> None:
        size = self._page_size
        decode = batch.rows_of(Phase.DECODE)
        for row in range(decode.start):
            context_len = batch.context_lens[row]
            first = context_len - batch.query_lens[row]
            rows = slice(starts[row], starts[row + 1])
            places = np.arange(first, context_len)
            token_ids[rows] = batch.sequences[row].span(first, context_len)
            positions[rows] = places
            table = np.array(batch.page_tables[row], dtype=np.int64)
            slots[rows] = table[places // size] * size + places % size
        if decode:
            rows = slice(starts[decode.start], None)
            last = np.array(batch.context_lens[decode.start :]) - 1
            token_ids[rows] = [batch.sequences[row].tokens[batch.context_lens[row] - 1] for row in decode]
            positions[rows] = last
            slots[rows] = np.array([batch.page_tables[row][-1] for row in decode]) * size + last % size


def pending_rows(batch: Batch) -> list[int]:
    """The decode rows whose token the host does not know yet."""
    return [
        row
        for row in batch.rows_of(Phase.DECODE)
        if batch.sequences[row].tokens[batch.context_lens[row] - 1] == PENDING
    ]


def _fill_part(
    batch: Batch, phase: Phase, starts: list[int], host: list["NDArray[np.int64]"], table_width: int
) -> None:
    """Write cu_seqlens, context_lens and the page table of one phase."""
    rows = batch.rows_of(phase)
    cu_seqlens, context_lens, page_table = host
    cu_seqlens[:] = np.array(starts[rows.start : rows.stop + 1]) - starts[rows.start]
    context_lens[:] = batch.context_lens[rows.start : rows.stop]
    if table_width:
        tables = page_table.reshape(len(rows), table_width)
        for index, row in enumerate(rows):
            table = batch.page_tables[row]
            tables[index, : len(table)] = table


def _part(batch: Batch, phase: Phase, starts: list[int], device: list[Tensor], table_width: int) -> PhasePart:
    rows = batch.rows_of(phase)
    cu_seqlens, context_lens, page_table = device
    is_prefill = phase is Phase.PREFILL
    return PhasePart(
        phase=phase,
        tokens=slice(starts[rows.start], starts[rows.stop]),
        batch=AttentionBatch(
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=max(_of(rows, batch.query_lens)),
            max_context=max(_of(rows, batch.context_lens)),
            cu_seqlens_k=cu_seqlens if is_prefill else None,
            page_table=None if is_prefill else page_table.view(len(rows), table_width),
            context_lens=None if is_prefill else context_lens,
        ),
        num_sequences=len(rows),
        num_tokens=starts[rows.stop] - starts[rows.start],
    )


def _of(rows: range, values: tuple[int, ...]) -> Iterator[int]:
    return iter(values[rows.start : rows.stop])
