"""Writes the slots of a batch's recurrent states into step buffers: nothing of a model without recurrent layers."""

from itertools import accumulate

import numpy as np

from kernels.recurrence.sizes import CHUNK
from kernels.vocabulary.shape import Phase
from server.engine.execution.step_buffer import HostViews, StepLayout
from server.engine.scheduling.sequence import Batch


def write_states(host: HostViews, layout: StepLayout, batch: Batch, num_slots: int) -> None:
    """Write the rows of a batch, and padding. A batch without slots begins with states of zero, and keeps none."""
    zero_slot, padding_slot = num_slots, num_slots + 1
    starts, stops, targets = host["state starts"], host["state stops"], host["state targets"]
    sources, firsts = host["state sources"], host["state firsts"]
    firsts[:] = 0
    sources[:], targets[:] = zero_slot, padding_slot
    ends, first = [0, *accumulate(batch.query_lens)], 0
    row_of: list[int] = []  # of the layout, of each row of the batch
    for part in layout.parts:
        rows = batch.rows_of(part.phase)
        own, padding = slice(first, first + len(rows)), slice(first + len(rows), first + part.num_rows)
        if part.phase is Phase.DECODE:  # one token a row, padding included, at the end of the step
            tokens = np.arange(layout.num_tokens - part.num_rows, layout.num_tokens)
            starts[first : first + part.num_rows], stops[first : first + part.num_rows] = tokens, tokens + 1
        else:
            starts[own], stops[own] = ends[rows.start : rows.stop], ends[rows.start + 1 : rows.stop + 1]
            starts[padding] = stops[padding] = 0
        ends_of_rows = batch.context_lens[rows.start : rows.stop]
        firsts[own] = np.subtract(ends_of_rows, batch.query_lens[rows.start : rows.stop])
        if batch.states is not None:
            sources[own] = batch.states.sources[rows.start : rows.stop]
            targets[own] = batch.states.targets[rows.start : rows.stop]
        row_of += range(own.start, own.stop)
        first += part.num_rows
    folded = host["state folded"]
    folded[:] = firsts - firsts % CHUNK
    for row, seq in zip(row_of, batch.sequences, strict=True):
        if seq.folded is not None:
            folded[row] = seq.folded
    if layout.num_state_writes:
        tokens, slots = host["state write_tokens"], host["state write_slots"]
        tokens[:], slots[:] = 0, padding_slot
        for index, write in enumerate(() if batch.states is None else batch.states.writes):
            num_behind = batch.context_lens[write.row] - write.num_tokens
            tokens[index], slots[index] = stops[row_of[write.row]] - 1 - num_behind, write.slot
