"""Wrong convolutions that must be refused: each computes in fp32 row by row, with one fault of a real kernel."""

from enum import Enum
from itertools import count

import torch
from torch import Tensor

from kernels.convolution.calls import ConvolutionState, ConvolutionWeights, RunConvolution
from kernels.convolution.shape import ConvolutionShape
from kernels.convolution.sizes import ConvolutionSizes
from kernels.recurrence.calls import RecurrenceRows
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype, Phase


class ConvolutionFault(Enum):
    """A fault of a wrong kernel; the comment says how a real kernel comes by it."""

    NONE = "none"  # the checker must pass this one: refusing everything proves nothing either
    RESULTS_KEPT = "the state keeps the convolution's results, not its inputs"  # the wrong tensor is copied
    UNGATED_KEPT = "the state keeps inputs before their gate"  # the convolution of other models
    STATE_BEFORE = "the state is that before the row's last token"  # stored before the token is shifted in
    STATE_SHIFTED = "the ring begins one place late"  # a border off by one
    TARGET_READ = "the state is read from the target slot"  # a prefix hit without its state
    STALE_STATE = "a state that begins as zero begins as its slot is left"  # the flag of a first chunk is not read
    NEIGHBOUR_READ = "the convolution reads the rows before in the call"  # of another sequence
    SNAPSHOT_LATE = "a snapshot is the state behind the row's last token"  # copied when the call is done
    DRAFTS_READ = "a verified row keeps its last tokens as the latest"  # a state without positions
    INPUT_GATE_LEFT_OUT = "inputs are not gated"
    RESULT_GATE_LEFT_OUT = "results are not gated"
    GATES_SWAPPED = "the gates of inputs and of results are exchanged"  # another order of the projection's parts
    BIAS_LEFT_OUT = "no bias is added"
    TAPS_REVERSED = "the factors are in the other order"  # convolution for correlation
    WIDTH_SHORT = "the oldest tap is left out"  # `<` for `<=`
    LOW_PRECISION_SUM = "the sum is rounded to bf16 behind each tap"  # accumulated in 16 bits
    UNROUNDED_INPUTS = "a prompt's inputs are not rounded, those of a state are"  # other bits cut elsewhere
    UNSTABLE = "the order of sums differs from run to run"  # atomics
    STALE_OUTPUT = "the last token's result is not written"  # grid too small
    STRAY_WRITE = "one row past the results is written"  # store without a mask


def trial_shapes(dtype: Dtype) -> tuple[ConvolutionShape, ...]:
    """Convolutions on which every fault can show, as small as that allows."""
    sizes = ConvolutionSizes(12, 4, has_bias=True)
    return (
        ConvolutionShape.of(sizes, Phase.EXTEND, dtype, TokenRows.LE_128),
        ConvolutionShape.of(sizes, Phase.DECODE, dtype, TokenRows.LE_16),
        ConvolutionShape.of(sizes, Phase.VERIFY, dtype, TokenRows.LE_128),
    )


def can_show_in(fault: ConvolutionFault, shape: ConvolutionShape) -> bool:
    """True when a convolution with this fault computes the shape wrongly, and so much that its dtype shows it."""
    is_prompt, is_verified = shape.phase is Phase.EXTEND, shape.phase is Phase.VERIFY
    needs = {
        ConvolutionFault.SNAPSHOT_LATE: is_prompt,
        ConvolutionFault.DRAFTS_READ: is_verified,
        ConvolutionFault.UNROUNDED_INPUTS: (is_prompt or is_verified) and shape.dtype is not Dtype.FP32,
    }
    return needs.get(fault, True)


def wrong_convolution(fault: ConvolutionFault) -> RunConvolution:
    """A convolution with this fault. Not for service: it waits for the device."""
    calls = count()

    def run(
        projected: Tensor, weights: ConvolutionWeights, rows: RecurrenceRows, state: ConvolutionState, out: Tensor
    ) -> None:
        call = next(calls)
        out.zero_()
        names = ("starts", "stops", "firsts", "sources", "targets")
        columns = [getattr(rows, name).tolist() for name in names]
        writes = list(zip(rows.write_tokens.tolist(), rows.write_slots.tolist(), strict=True))
        for start, stop, first, source, target in zip(*columns, strict=True):
            if start == stop:
                continue
            row = _Row(fault, weights, state, first, target if fault is ConvolutionFault.TARGET_READ else source)
            before = projected[max(0, start - weights.taps.shape[1] + 1) : start]
            out[start:stop] = row.append(projected[start:stop], before).to(out.dtype)
            is_late = fault is ConvolutionFault.SNAPSHOT_LATE
            for token, slot in [it for it in writes if start <= it[0] < stop]:
                row.store(slot, first + (stop if is_late else token + 1) - start)
            row.store(target, first + stop - start, is_verified=rows.phase is Phase.VERIFY)
        if fault is ConvolutionFault.UNSTABLE:
            out *= 1 + call // 2 % 2 * 2 * torch.finfo(out.dtype).eps
        if fault is ConvolutionFault.STALE_OUTPUT:
            out[int(rows.stops.max()) - 2] = torch.nan
        if fault is ConvolutionFault.STRAY_WRITE:
            out.as_strided((out.stride(0),), (1,), out.storage_offset() + out.numel()).zero_()

    return run


class _Row:
    """One sequence: the inputs of its tokens, fp32, by position, and what a state keeps of each."""

    def __init__(
        self, fault: ConvolutionFault, weights: ConvolutionWeights, state: ConvolutionState, first: int, source: int
    ) -> None:
        self._fault, self._weights, self._state, self._first = fault, weights, state, first
        self._width, self._shift = weights.taps.shape[1], int(fault is ConvolutionFault.STATE_SHIFTED)
        earliest = first - self._width + 1
        if fault is not ConvolutionFault.STALE_STATE:
            earliest = max(0, earliest)
        ring = state.inputs.shape[1]
        self._read = {it: state.inputs[source, it % ring].float() for it in range(earliest, first)}
        if fault is ConvolutionFault.STALE_STATE:
            self._read = {it: kept + (it < 0) for it, kept in self._read.items()}
        self._kept = dict(self._read)

    def append(self, projected: Tensor, before: Tensor) -> Tensor:
        """Compute tokens, and return their results; `before`: the rows before them in the call."""
        fault, dtype = self._fault, projected.dtype
        gates, result_gates, values = projected.float().chunk(3, dim=1)
        if fault is ConvolutionFault.GATES_SWAPPED:
            gates, result_gates = result_gates, gates
        inputs = values if fault is ConvolutionFault.INPUT_GATE_LEFT_OUT else gates * values
        if fault is not ConvolutionFault.UNROUNDED_INPUTS:
            inputs = inputs.to(dtype).float()
        for token, own in enumerate(inputs):
            self._read[self._first + token] = own
            self._kept[self._first + token] = values[token] if fault is ConvolutionFault.UNGATED_KEPT else own
        if fault is ConvolutionFault.NEIGHBOUR_READ:
            of_others = before.float().chunk(3, dim=1)
            for place, own in enumerate((of_others[0] * of_others[2]).flip(0), 1):
                self._read[self._first - place] = own
        outs = []
        for position in range(self._first, self._first + len(inputs)):
            mixed = self._mixed(position)
            if fault is ConvolutionFault.RESULTS_KEPT:
                self._kept[position] = mixed
            outs.append(mixed)
        found = torch.stack(outs)
        return found if fault is ConvolutionFault.RESULT_GATE_LEFT_OUT else found * result_gates

    def _mixed(self, position: int) -> Tensor:
        fault, taps, bias = self._fault, self._weights.taps.float(), self._weights.bias
        taps = taps.flip(1) if fault is ConvolutionFault.TAPS_REVERSED else taps
        mixed = torch.zeros_like(taps[:, 0])
        for tap in range(int(fault is ConvolutionFault.WIDTH_SHORT), self._width):
            own = self._read.get(position - self._width + 1 + tap)
            mixed = mixed if own is None else mixed + own * taps[:, tap]
            if fault is ConvolutionFault.LOW_PRECISION_SUM:
                mixed = mixed.bfloat16().float()
        return mixed if bias is None or fault is ConvolutionFault.BIAS_LEFT_OUT else mixed + bias.float()

    def store(self, slot: int, num_tokens: int, *, is_verified: bool = False) -> None:
        """Write the state behind so many tokens to a slot."""
        ring, fault = self._state.inputs.shape[1], self._fault
        last = num_tokens - 1 if fault is ConvolutionFault.STATE_BEFORE else num_tokens
        for position in range(max(0, last - ring), last):
            read = position
            if fault is ConvolutionFault.DRAFTS_READ and is_verified:
                read = min(position + 1, last - 1)
            if read in self._kept:
                place = (position + self._shift) % ring
                self._state.inputs[slot, place] = self._kept[read].to(self._state.inputs.dtype)
