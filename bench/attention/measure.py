"""Measure one call besides its time: kernel names, temporary memory, error."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from bench.attention.peers import Call, Prepared
from kernels.reference.compare import Errors, Reference
from kernels.reference.compare import errors_of as errors_from
from qualification.measure.costs import profile


def kernels_seen(call: Call, device: torch.device) -> tuple[str, ...]:
    """Names as the profiler sees them: GPU kernels, the longest-running first; on a CPU the operators that compute."""
    if device.type != "cuda":
        return tuple(profile.calls_seen([call], device).calls[0])
    with profiler(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        _synchronize(device)
    kernels = [event for event in seen.key_averages() if event.device_type == DeviceType.CUDA]
    return tuple(event.key for event in sorted(kernels, key=lambda event: -event.self_device_time_total))


def temporary_bytes(prepared: Prepared, device: torch.device) -> int | None:
    """Return the peak of what one call allocates beyond its output; None on a CPU."""
    outputs: list[Tensor] = []
    peak = profile.temporary_bytes(lambda: outputs.append(prepared.call()), device)
    if peak is None or prepared.is_preallocated:
        return peak
    return max(0, peak - outputs[0].numel() * outputs[0].element_size())


def errors_of(prepared: Prepared, call: Call, reference: Reference, rows: Tensor) -> Errors:
    """The error of a call whose output was NaN before it, on the rows of the reference; every row must be finite.

    A new output most likely takes the memory of the poisoned one that was freed just before.
    """
    output = call()
    output.fill_(math.nan)
    del output
    out = prepared.packed(call())
    num_nonfinite = int((~torch.isfinite(out)).sum())
    return replace(errors_from(out[rows], reference), num_nonfinite=num_nonfinite)


@dataclass(frozen=True, slots=True)
class Replay:
    """A captured call. It holds what the call reads: a graph keeps no tensor alive, and the capture of the next
    contender gives every freed segment back to the driver, so that a replay would read memory that is gone.
    """

    graph: torch.cuda.CUDAGraph
    output: Tensor
    prepared: Prepared

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.output


def graphed(prepared: Prepared, device: torch.device) -> Call:
    """The call captured in a CUDA graph: replaying it costs one launch, as in a server's decode step."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            prepared.call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = prepared.call()
    return Replay(graph, output, prepared)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
