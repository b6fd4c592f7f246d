"""Timer of attention: one layer of one step in 64, between two events on the device.

The layer is the middle one, so that waiting for its end before a later step is launched leaves the device half a step
of work. In a CUDA graph the events are nodes of the graph: every replay records them, and one in 64 is read.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kernels.calls.batch import AttentionFlags
from kernels.vocabulary.shape import AttentionShape, Phase
from kernels.vocabulary.value_shape import any_flops, any_hbm_bytes
from server.engine.operators.dispatch_key import Heads, LayerKind
from server.engine.scheduling.sequence import Batch
from server.protocol.messages import AttentionSample

SAMPLED_STEPS = 64  # of each phase, one is measured


class Event(Protocol):
    """A moment of the device; torch.cuda.Event, or the host's clock."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this one to `end`."""


class HostEvent:
    """Event of a CPU, on which a call has ended when it returns."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "HostEvent") -> float:
        return (end.at - self.at) * 1e3


class Device(Protocol):
    """Operations that the timer needs of a device."""

    def event(self, is_captured: bool) -> Event:
        """`is_captured`: it is to be a node of the graph that is being captured."""

    def is_capturing(self) -> bool: ...
    def reset_peak(self) -> int | None:
        """Return the bytes that are allocated now; None where they are not counted."""

    def peak(self) -> int:
        """The most bytes that were allocated since `reset_peak`."""


class CpuDevice:
    def event(self, is_captured: bool) -> Event:  # noqa: ARG002 -- nothing is ever captured
        return HostEvent()

    def is_capturing(self) -> bool:
        return False

    def reset_peak(self) -> int | None:
        return None

    def peak(self) -> int:
        return 0


class CudaDevice:
    def event(self, is_captured: bool) -> Event:
        found: Event = torch.cuda.Event(enable_timing=True, external=is_captured)  # type: ignore[no-untyped-call]
        return found

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def reset_peak(self) -> int | None:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


@dataclass(frozen=True, slots=True)
class _Marks:
    start: Event
    end: Event


@dataclass(frozen=True, slots=True)
class _Captured:
    """Events of a graph. The batch is kept, so that its identity stays its own."""

    marks: _Marks
    batch: object


@dataclass(frozen=True, slots=True)
class _Pending:
    """A measured layer whose events may not be done."""

    marks: _Marks
    shape: AttentionShape
    num_layers: int  # of the same kind
    lengths: tuple[tuple[int, int], ...]  # queries and keys of each sequence


class AttentionTimer:
    """Only the stepping thread may call it."""

    def __init__(
        self,
        flags: Sequence[AttentionFlags],
        device: Device,
        *,
        heads: Sequence[Heads] | None = None,
        chunks: Sequence[int | None] | None = None,
        every: int = SAMPLED_STEPS,
    ) -> None:
        """`flags`: one a layer that attends; `heads` and `chunks` of positions likewise, None where all are alike.

        Of each kind of layers the middle one is measured, and stands for the others.
        """
        self._chunks = (None,) * len(flags) if chunks is None else chunks
        layers: dict[tuple[int | None, Heads | None, int | None], list[int]] = {}
        for layer, each in enumerate(flags):
            kind = (each.window, None if heads is None else heads[layer], self._chunks[layer])
            layers.setdefault(kind, []).append(layer)
        self._kinds = {found[len(found) // 2]: kind for kind, found in layers.items()}
        self._num_alike = {found[len(found) // 2]: len(found) for found in layers.values()}
        self._device = device
        self.every = every
        self._is_started = False
        self._num_steps: Counter[Phase] = Counter()
        self._sampled: dict[Phase, tuple[tuple[int, int], ...]] = {}
        self._captured: dict[tuple[int, int], _Captured] = {}  # by the identity of the graph's batch, and the layer
        self._pending: list[_Pending] = []
        self._samples: list[AttentionSample] = []
        self._memory: tuple[Phase, int] | None = None  # of the sampled step: its first phase, bytes before it
        self._peaks: dict[str, int] = {}

    def start(self) -> None:
        """Measure steps from now on; the batches before belonged to no request."""
        self._is_started = True

    def begin(self, batch: Batch) -> None:
        """A step is about to be launched. Waits for the measured layer of an earlier one, if there is any."""
        if not self._is_started:
            return
        self.finish()
        for phase in batch.phases:
            if self._num_steps[phase] % self.every == 0:
                rows = batch.rows_of(phase)
                pairs = zip(batch.query_lens, batch.context_lens, strict=True)
                self._sampled[phase] = tuple(pairs)[rows.start : rows.stop]
            self._num_steps[phase] += 1
        num_bytes = self._device.reset_peak() if self._sampled else None
        self._memory = None if num_bytes is None else (next(iter(self._sampled)), num_bytes)

    def finish(self) -> None:
        """Read what was measured of an earlier step, for which this waits: what runs next is no part of it."""
        if self._sampled:
            self._read()
        self._sampled, self._memory = {}, None

    def take(self) -> tuple[list[AttentionSample], dict[str, int]]:
        """Return the samples read since the last call, and by phase the peak of memory that a step took for itself."""
        found = self._samples, self._peaks
        self._samples, self._peaks = [], {}
        return found

    def measures(self, phase: Phase, layer: int) -> bool:
        """Return whether a call of this layer has to go through `around`."""
        return layer in self._num_alike and (phase in self._sampled or self._device.is_capturing())

    def around(self, work: Callable[[], None], shape: AttentionShape, layer: int, batch: object) -> None:
        """Do the work of a layer between two events. `batch`: of the kernels; a graph's stays the same for its life."""
        is_captured = self._device.is_capturing()
        marks = _Marks(self._device.event(is_captured), self._device.event(is_captured))
        marks.start.record()
        work()
        marks.end.record()
        if is_captured:
            self._captured[id(batch), layer] = _Captured(marks, batch)
        else:
            self._await(marks, shape, layer)

    def replayed(self, shape: AttentionShape, batch: object, kind: tuple[LayerKind, int | None]) -> None:
        """A graph was replayed, one of whose parts has this batch; `shape` is what served the layers of this kind."""
        if shape.phase not in self._sampled:
            return
        (window, heads), chunk = kind
        for layer, (own_window, own_heads, own_chunk) in self._kinds.items():
            captured = self._captured.get((id(batch), layer))
            if captured is None or own_heads not in (None, heads):
                continue
            if (own_window, own_chunk) == (window, chunk):
                self._await(captured.marks, shape, layer)
                self._memory = None  # a graph's memory is its own, before and after

    def _await(self, marks: _Marks, shape: AttentionShape, layer: int) -> None:
        chunk, lengths = self._chunks[layer], self._sampled[shape.phase]
        if chunk is not None:
            lengths = tuple([(queries, (keys - 1) % chunk + 1) for queries, keys in lengths])
        self._pending.append(_Pending(marks, shape, self._num_alike[layer], lengths))

    def _read(self) -> None:
        if self._memory is not None:
            phase, before = self._memory
            self._peaks[phase.value] = max(self._peaks.get(phase.value, 0), self._device.peak() - before)
        for it in self._pending:
            it.marks.end.synchronize()
            kernel_s = it.marks.start.elapsed_time(it.marks.end) / 1e3
            costs = [(any_flops(it.shape, *pair), any_hbm_bytes(it.shape, *pair)[0]) for pair in it.lengths]
            self._samples.append(
                AttentionSample(
                    phase=it.shape.phase.value,
                    bucket=it.shape.context_bucket.label,
                    kernel_s=it.num_layers * kernel_s,
                    flops=it.num_layers * sum(cost[0] for cost in costs),
                    hbm_bytes=it.num_layers * sum(cost[1] for cost in costs),
                )
            )
        self._pending = []
