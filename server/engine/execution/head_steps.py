"""Steps of a draft head: writes what the head computes behind a step, has the worker compute it, reads its drafts."""

import logging
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, product

import numpy as np
import torch
from numpy.typing import NDArray
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
from server.engine.scheduling.head_drafter import FEW_ROWS, DraftedRow, HeadRow
from server.engine.scheduling.sequence import PENDING, Batch, Sequence

logger = logging.getLogger(__name__)

_TABLE_STEP = 16  # entries: as of an eager step's page table


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens of one sequence, as they are written. `source`: see `Worker.follow`; `num_drafting`: see HeadRow."""

    phase: Phase
    sequence: Sequence
    first: int
    ids: list[int]
    source: int
    table: "array[int]"
    num_drafting: int

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
        # One for each pass behind a step, which the device may still have to copy when the next one is followed.
        self._memories: tuple[list[StepMemory], list[StepMemory]] = ([], [])
        self._turn = 0
        self._num_passes = 0
        self._num_drafted = 0  # by those
        self.num_replays = 0
        self._latest: tuple[StepBuffer, bool] | None = None

    def follow(self, batch: Batch, rows: SequenceOf[HeadRow]) -> bool:
        """Compute rows behind the latest step, which was `batch`; draft behind those that ask for it."""
        self._begin()
        return self._compute(self._behind(batch, rows), is_first=True)

    def observe(self, batch: Batch, rows: SequenceOf[HeadRow]) -> tuple[Tensor, Observation]:
        """Compute rows behind the latest step; return the head's hidden states, and what its layer handed out.

        Waits for the device, as the next call writes to the same memory.
        """
        self._begin()
        worker = self._runner.worker
        observation = worker.head_observation()
        buffer = self._write(self._behind(batch, rows))
        hidden = worker.follow(buffer, is_first=True, observation=observation)
        worker.synchronize()
        return hidden, observation

    def _begin(self) -> None:
        self._turn = 1 - self._turn
        self._num_passes = self._num_drafted = 0

    def _behind(self, batch: Batch, rows: SequenceOf[HeadRow]) -> list[_Row]:
        starts = self._runner.token_places(batch)
        written = []
        for it in rows:
            phase = Phase.VERIFY if it.first else Phase.PREFILL
            source = starts[it.row] + it.num_before
            written.append(_Row(phase, it.sequence, it.first, it.next_ids, source, it.table, it.num_drafting))
        most = 1 + self._runner.max_drafted_tokens
        return [it if it.phase is Phase.PREFILL or len(it.ids) <= most else _chunk(it) for it in written]

    def go_on(self, rows: SequenceOf[DraftedRow]) -> bool:
        """Compute tokens that were drafted last, and draft one behind each."""
        written = [_Row(Phase.DECODE, it.sequence, it.position, [0], it.place, it.table, 1) for it in rows]
        return self._compute(written, is_first=False)

    def take(self, places: SequenceOf[int]) -> list[int]:
        """Return drafted tokens by their places among all since `follow`; waits for them."""
        return self._runner.worker.tokens.copy_to_host(0, places)()

    @property
    def latest(self) -> tuple[StepBuffer, bool]:
        """Return the inputs of the latest pass, and whether it was the first behind a step."""
        assert self._latest is not None, "a pass was computed before"
        return self._latest

    def _compute(self, rows: list[_Row], *, is_first: bool) -> bool:
        buffer = self._write(rows)
        self._latest = buffer, is_first
        sampling = self._sampling(rows)
        try:
            self._runner.worker.follow(buffer, sampling, is_first=is_first, place=self._num_drafted)
        except (NoPathError, torch.OutOfMemoryError) as error:
            logger.error("the draft head cannot be computed, and drafts nothing from now on: %s", error)
            return False
        self._num_passes += 1
        self._num_drafted += sum(it.num_drafting for it in rows)
        self.num_replays += buffer.key is not None
        return True

    def _sampling(self, rows: list[_Row]) -> SamplingTensors | None:
        """Return on the CPU how tokens are drafted: with the noise of their places, so that right ones are likely.

        Penalties, bans and grammars are left to the step that verifies.
        """
        if all(it.sequence.sampling.temperature == 0 for it in rows if it.num_drafting):
            return None
        wanted = [
            RowSampling(
                temperature=it.sequence.sampling.temperature,
                top_k=it.sequence.sampling.top_k,
                top_p=it.sequence.sampling.top_p,
                min_p=it.sequence.sampling.min_p,
                seed=it.sequence.seed,
                position=place + 2,  # of its entry, made of two tokens
                bias=it.sequence.sampling.logit_bias,
                allowed_ids=it.sequence.sampling.allowed_token_ids,
            )
            for it in rows
            for place in range(it.stop - it.num_drafting, it.stop)
        ]
        return sampling_tensors(wanted, self._runner.worker.decoder.config.vocab_size, torch.device("cpu"))

    def capture(self, capture: Capture, max_rows: int, max_context: int) -> None:
        """Record graphs of steps of few tokens a row, all of which draft, for contexts of at most `max_context`."""
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

    def _find(self, rows: list[_Row]) -> GraphKey | None:
        """Return the graph of a step; None where none computes it as it is decided now."""
        phase = rows[0].phase
        if phase is not rows[-1].phase or phase not in (Phase.VERIFY, Phase.DECODE):
            return None
        if any(it.num_drafting != (len(it.ids) if len(rows) <= FEW_ROWS else 1) for it in rows):
            return None
        if self._revision != self._runner.worker.dispatcher.revision:
            return None
        size = next((it for it in self._sizes if it >= len(rows)), len(rows))
        width = 1 if phase is Phase.DECODE else 1 + self._runner.max_drafted_tokens
        key = _key(phase, size, width, bucket_of(max(it.stop for it in rows)))
        return key if key in self._layouts else None

    def _write(self, rows: list[_Row]) -> StepBuffer:
        worker, key = self._runner.worker, self._find(rows)
        ends = list(accumulate(len(it.ids) for it in rows))
        drafting = [token for it, end in zip(rows, ends, strict=True) for token in range(end - it.num_drafting, end)]
        if key is None:
            parts = tuple(_part(phase, [*own]) for phase, own in groupby(rows, lambda it: it.phase))
            layout = StepLayout(parts, len(drafting), worker.head_arrays)
        else:
            layout = self._layouts[key]
        memories = self._memories[self._turn]
        if self._num_passes == len(memories):
            memories.append(self._memory(0))
        if layout.num_bytes > memories[self._num_passes].data.numel():
            memories[self._num_passes] = self._memory(2 * layout.num_bytes)
        memory = memories[self._num_passes]
        host, size = memory.host_views(layout), worker.kv.page_size
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
            host["sampled"][: len(drafting)] = drafting
            host["sampled"][len(drafting) :] = 0
        has_pending = _write_pending(host, layout.num_open)
        first = 0
        for part in layout.parts:
            num_rows = len(rows) if key is not None else part.num_rows
            _write_part(host, part, rows[first : first + num_rows])
            first += num_rows
        return StepBuffer(key, layout, memory.data[: layout.num_bytes], has_pending=has_pending)

    def _memory(self, num_bytes: int) -> StepMemory:
        is_pinned = self._runner.worker.device.type == "cuda"
        return StepMemory(num_bytes, torch.device("cpu"), is_pinned=is_pinned)


def _chunk(row: _Row) -> _Row:
    return replace(row, phase=Phase.EXTEND)


def _part(phase: Phase, rows: list[_Row]) -> PartLayout:
    lengths, widest = [len(it.ids) for it in rows], max(len(it.table) for it in rows)
    width = 0 if phase is Phase.PREFILL else -(-widest // _TABLE_STEP) * _TABLE_STEP
    return PartLayout(phase, len(rows), sum(lengths), width, max(lengths), max(it.stop for it in rows))


def _key(phase: Phase, num_rows: int, row_tokens: int, longest: Bucket) -> GraphKey:
    return GraphKey(None, PartKey(phase, num_rows * row_tokens, longest, row_tokens))


def _layout(key: GraphKey, worker: Worker, max_context: int) -> StepLayout:
    """Return the layout of a graph's step, which drafts behind each token of few rows, behind the last one of more."""
    [part] = graph_layout(key, num_prompts=0, page_size=worker.kv.page_size, max_context=max_context).parts
    num_drafting = part.num_tokens if part.num_rows <= FEW_ROWS else part.num_rows
    return StepLayout((part,), num_drafting, worker.head_arrays)


def _write_pending(host: HostViews, num_open: int) -> bool:
    """Write which of the last tokens the step behind has chosen, each behind its source; return whether any."""
    if not num_open:
        return False
    is_pending: NDArray[np.bool_] = host["token_ids"][-num_open:] == PENDING
    host["is_pending"][:] = is_pending
    host["chosen_at"][:] = host["sources"][-num_open:] * is_pending
    return bool(is_pending.any())


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
