"""Steps of a draft head: writes what the head computes behind a step, has the worker compute it, reads its drafts."""

import logging
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, groupby, product

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.sampling import RowSampling, SamplingTensors, sampling_tensors
from kernels.vocabulary.buckets import Bucket, bucket_of, buckets_up_to
from kernels.vocabulary.shape import Phase
from server.engine.execution.capture import Capture
from server.engine.execution.graph_keys import GraphKey, PartKey, row_sizes
from server.engine.execution.runner import ModelRunner
from server.engine.execution.step_buffer import HostViews, PartLayout, StepBuffer, StepLayout, StepMemory, graph_layout
from server.engine.execution.worker import Worker
from server.engine.operators.decisions import NoPathError
from server.engine.operators.observation import Observation
from server.engine.scheduling.head_drafter import DraftedRow, HeadRow
from server.engine.scheduling.sequence import Batch, Sequence

logger = logging.getLogger(__name__)

_TABLE_STEP = 16  # entries: as of an eager step's page table


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens of one sequence, as they are written. `source`: see `Worker.follow`."""

    phase: Phase
    sequence: Sequence
    first: int
    ids: list[int]
    source: int
    table: "array[int]"

    @property
    def stop(self) -> int:
        return self.first + len(self.ids)


class HeadSteps:
    """The head of a runner's worker, as a `HeadDrafter` uses it. Only the stepping thread may call it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._sizes: tuple[int, ...] = ()  # rows of graphs
        self._layouts: dict[GraphKey, StepLayout] = {}
        self._revision = -1  # of the decisions that the graphs were captured with
        self._memories: list[StepMemory] = []  # one for each pass of a step, which the device may still have to copy
        self._num_passes = 0
        self.num_replays = 0
        self._latest: tuple[StepBuffer, bool] | None = None

    def follow(self, batch: Batch, rows: SequenceOf[HeadRow]) -> bool:
        """Compute rows behind the latest step, which was `batch`; draft behind those that ask for it."""
        self._num_passes = 0
        drafting = [index for index, it in enumerate(rows) if it.is_drafted_for]
        return self._compute(self._behind(batch, rows), drafting, is_first=True)

    def observe(self, batch: Batch, rows: SequenceOf[HeadRow]) -> tuple[Tensor, Observation]:
        """Compute rows behind the latest step; return the head's hidden states, and what its layer handed out.

        Waits for the device, as the next call writes to the same memory.
        """
        self._num_passes = 0
        worker = self._runner.worker
        observation = worker.head_observation()
        buffer = self._write(self._behind(batch, rows), [])
        hidden = worker.follow(buffer, is_first=True, observation=observation)
        worker.synchronize()
        return hidden, observation

    def _behind(self, batch: Batch, rows: SequenceOf[HeadRow]) -> list[_Row]:
        starts = self._runner.token_places(batch)
        written = []
        for it in rows:
            phase = Phase.VERIFY if it.first else Phase.PREFILL
            written.append(_Row(phase, it.sequence, it.first, it.next_ids, starts[it.row] + it.num_before, it.table))
        most = 1 + self._runner.max_drafted_tokens
        return [it if it.phase is Phase.PREFILL or len(it.ids) <= most else _chunk(it) for it in written]

    def go_on(self, rows: SequenceOf[DraftedRow]) -> bool:
        """Compute tokens that were drafted last, and draft one behind each."""
        written = [_Row(Phase.DECODE, it.sequence, it.position, [0], it.place, it.table) for it in rows]
        return self._compute(written, range(len(written)), is_first=False)

    def take(self) -> list[list[int]]:
        """Return the drafted tokens of each pass since `follow`; waits for them: all memory may be written to again."""
        self._num_passes = 0
        return self._runner.worker.take_drafted()

    @property
    def latest(self) -> tuple[StepBuffer, bool]:
        """Return the inputs of the latest pass, and whether it was the first behind a step."""
        assert self._latest is not None, "a pass was computed before"
        return self._latest

    def _compute(self, rows: list[_Row], drafting: SequenceOf[int], *, is_first: bool) -> bool:
        buffer = self._write(rows, drafting)
        self._latest = buffer, is_first
        sampling = self._sampling([rows[index] for index in drafting])
        try:
            self._runner.worker.follow(buffer, sampling, is_first=is_first)
        except (NoPathError, torch.OutOfMemoryError) as error:
            logger.error("the draft head cannot be computed, and drafts nothing from now on: %s", error)
            return False
        self._num_passes += 1
        self.num_replays += buffer.key is not None
        return True

    def _sampling(self, rows: list[_Row]) -> SamplingTensors | None:
        """Return on the CPU how tokens are drafted: with the noise of their places, so that right ones are likely.

        Penalties, bans and grammars are left to the step that verifies.
        """
        if all(it.sequence.sampling.temperature == 0 for it in rows):
            return None
        wanted = [
            RowSampling(
                temperature=it.sequence.sampling.temperature,
                top_k=it.sequence.sampling.top_k,
                top_p=it.sequence.sampling.top_p,
                min_p=it.sequence.sampling.min_p,
                seed=it.sequence.seed,
                position=it.stop + 1,
                bias=it.sequence.sampling.logit_bias,
                allowed_ids=it.sequence.sampling.allowed_token_ids,
            )
            for it in rows
        ]
        return sampling_tensors(wanted, self._runner.worker.decoder.config.vocab_size, torch.device("cpu"))

    def capture(self, capture: Capture, max_rows: int, max_context: int) -> None:
        """Record graphs of steps of few rows, all of which draft, for contexts of at most `max_context` tokens."""
        worker, row_tokens = self._runner.worker, 1 + self._runner.max_drafted_tokens
        self._sizes = row_sizes(max_rows)
        kinds = ((Phase.VERIFY, row_tokens), (Phase.DECODE, 1))
        keys = [
            _key(phase, size, width, bucket)
            for (phase, width), size, bucket in product(kinds, self._sizes, buckets_up_to(max_context))
        ]
        layouts = {key: _layout(key, worker, max_context) for key in keys}
        worker.declare_head(layouts)
        captured = [
            key for key in keys if worker.capture_head(key, capture, is_first=key.parts[0].phase is Phase.VERIFY)
        ]
        self._layouts = {key: layouts[key] for key in captured}
        self._revision = worker.dispatcher.revision

    def _find(self, rows: list[_Row], drafting: SequenceOf[int]) -> GraphKey | None:
        """Return the graph of a step; None where none computes it as it is decided now."""
        phase = rows[0].phase
        if phase is not rows[-1].phase or len(drafting) < len(rows) or phase not in (Phase.VERIFY, Phase.DECODE):
            return None
        if self._revision != self._runner.worker.dispatcher.revision:
            return None
        size = next((it for it in self._sizes if it >= len(rows)), len(rows))
        width = 1 if phase is Phase.DECODE else 1 + self._runner.max_drafted_tokens
        key = _key(phase, size, width, bucket_of(max(it.stop for it in rows)))
        return key if key in self._layouts else None

    def _write(self, rows: list[_Row], drafting: SequenceOf[int]) -> StepBuffer:
        worker, key = self._runner.worker, self._find(rows, drafting)
        if key is None:
            parts = tuple(_part(phase, [*own]) for phase, own in groupby(rows, lambda it: it.phase))
            layout = StepLayout(parts, len(drafting), worker.head_arrays)
        else:
            layout = self._layouts[key]
        if self._num_passes == len(self._memories):
            self._memories.append(self._memory(0))
        if layout.num_bytes > self._memories[self._num_passes].data.numel():
            self._memories[self._num_passes] = self._memory(2 * layout.num_bytes)
        memory = self._memories[self._num_passes]
        host, size = memory.host_views(layout), worker.kv.page_size
        ends = list(accumulate(len(it.ids) for it in rows))
        for row, stop in zip(rows, ends, strict=True):
            own = slice(stop - len(row.ids), stop)
            places = np.arange(row.first, row.stop)
            host["token_ids"][own] = row.ids
            host["positions"][..., own] = row.sequence.positions_of(places)
            host["slots"][own] = np.array(row.table, np.int64)[places // size] * size + places % size
            host["sources"][own] = np.arange(row.source, row.source + len(row.ids))
        for it in worker.head_arrays:
            host[it.name][..., ends[-1] :] = 0
        host["slots"][ends[-1] :] = worker.kv.num_pages * size  # of the page that no sequence owns
        if drafting:
            host["sampled"][: len(drafting)] = [ends[index] - 1 for index in drafting]
            host["sampled"][len(drafting) :] = 0
        first = 0
        for part in layout.parts:
            num_rows = len(rows) if key is not None else part.num_rows
            _write_part(host, part, rows[first : first + num_rows])
            first += num_rows
        return StepBuffer(key, layout, memory.data[: layout.num_bytes], has_pending=False)

    def _memory(self, num_bytes: int) -> StepMemory:
        is_pinned = self._runner.worker.device.type == "cuda"
        return StepMemory(num_bytes, torch.device("cpu"), is_pinned=is_pinned)


def _chunk(row: _Row) -> _Row:
    return _Row(Phase.EXTEND, row.sequence, row.first, row.ids, row.source, row.table)


def _part(phase: Phase, rows: list[_Row]) -> PartLayout:
    lengths, widest = [len(it.ids) for it in rows], max(len(it.table) for it in rows)
    width = 0 if phase is Phase.PREFILL else -(-widest // _TABLE_STEP) * _TABLE_STEP
    return PartLayout(phase, len(rows), sum(lengths), width, max(lengths), max(it.stop for it in rows))


def _key(phase: Phase, num_rows: int, row_tokens: int, longest: Bucket) -> GraphKey:
    return GraphKey(None, PartKey(phase, num_rows * row_tokens, longest, row_tokens))


def _layout(key: GraphKey, worker: Worker, max_context: int) -> StepLayout:
    """Return the layout of a graph's step, each row of which drafts a token."""
    [part] = graph_layout(key, num_prompts=0, page_size=worker.kv.page_size, max_context=max_context).parts
    return StepLayout((part,), part.num_rows, worker.head_arrays)


def _write_part(host: HostViews, part: PartLayout, rows: list[_Row]) -> None:
    name = part.phase.value
    if part.phase is not Phase.DECODE:
        ends = list(accumulate(len(it.ids) for it in rows))
        host[f"{name} cu_seqlens"][: len(rows) + 1] = [0, *ends]
        host[f"{name} cu_seqlens"][len(rows) + 1 :] = ends[-1]
    if part.phase is Phase.PREFILL:
        return
    host[f"{name} context_lens"][: len(rows)] = [it.stop for it in rows]
    host[f"{name} context_lens"][len(rows) :] = 0
    table = host[f"{name} page_table"]
    for index, row in enumerate(rows):
        table[index, : len(row.table)] = row.table
