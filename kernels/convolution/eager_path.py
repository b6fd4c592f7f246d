"""`torch.convolution.cpu`: the convolution by PyTorch, row by row, its taps added from the oldest to the newest."""

import torch
from torch import Tensor

from kernels.convolution.calls import ConvolutionState, ConvolutionWeights
from kernels.recurrence.calls import RecurrenceRows


def run_convolution_eager(
    projected: Tensor, weights: ConvolutionWeights, rows: RecurrenceRows, state: ConvolutionState, out: Tensor
) -> None:
    """Fill `out`, and the states of the rows: see `RunConvolution`."""
    out.zero_()
    channels, width = weights.taps.shape
    ring = state.inputs.shape[1]
    gates, result_gates, values = projected.split(channels, dim=1)  # type: ignore[no-untyped-call]
    inputs = (gates.float() * values.float()).to(projected.dtype)
    writes = list(zip(rows.write_tokens.tolist(), rows.write_slots.tolist(), strict=True))
    names = ("starts", "stops", "firsts", "sources", "targets")
    for start, stop, first, source, target in zip(*(getattr(rows, it).tolist() for it in names), strict=True):
        if start == stop:
            continue
        begin = max(0, first - width + 1)
        kept = state.inputs[source, [position % ring for position in range(begin, first)]]
        known = torch.cat([kept, inputs[start:stop]])  # from position `begin` on
        read = torch.cat([known.new_zeros(width - 1 - (first - begin), channels), known]).float()
        mixed = torch.zeros(stop - start, channels, device=out.device)
        for tap in range(width):
            mixed = mixed + read[tap : tap + stop - start] * weights.taps[:, tap].float()
        if weights.bias is not None:
            mixed = mixed + weights.bias.float()
        out[start:stop] = (mixed * result_gates[start:stop].float()).to(out.dtype)
        own = [(first + token + 1 - start, slot) for token, slot in writes if start <= token < stop]
        for num_tokens, slot in [*own, (first + stop - start, target)]:
            latest = range(max(begin, num_tokens - ring), num_tokens)
            places = [position % ring for position in latest]
            state.inputs[slot, places] = known[latest.start - begin : latest.stop - begin]
