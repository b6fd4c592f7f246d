"""Computes batches: rank 0 writes them into step buffers, workers launch those, the host reads token ids later.

What a rank must not decide alone is decided here: which graph computes a step, and what follows when a step fails.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kernels.sampling.sampling import SamplingTensors, sampling_tensors
from server.engine.attention.dispatch import Dispatcher, NoPathError
from server.engine.attention.launch_errors import is_device_lost
from server.engine.attention.step_attention import Served, StepAttention
from server.engine.execution.graphs import GraphStep, StepGraphs
from server.engine.execution.sampling import is_plain_greedy, row_sampling, score_rows, wants_scores
from server.engine.execution.step_writer import StepWriter
from server.engine.execution.worker import LaunchFailed, Worker
from server.engine.proof.shadow_check import ShadowCheck, Tap
from server.engine.scheduling.runner_api import BatchError, StepResult
from server.engine.scheduling.sequence import Batch, Sequence
from server.engine.scheduling.step_parts import Mark, Part
from server.protocol.messages import TokenScores


@dataclass(frozen=True, slots=True)
class Launched:
    """A batch on its way through the device. `rows`: where its sampled rows' tokens are among those read."""

    read: Callable[[], list[int]]
    rows: tuple[int, ...]  # ascending, the last one of those read
    served: Served
    quarantined: list[tuple[str, str]]
    on_read: Callable[[], None]
    mark: Mark
    scores: dict[int, TokenScores] = field(default_factory=dict)

    def result(self) -> StepResult:
        """Wait for the step. Errors mean that the device is lost."""
        self.mark(Part.WAIT)
        sampled = self.read()
        self.mark(Part.REPORT)
        self.on_read()
        chosen = sampled if len(sampled) == len(self.rows) else [sampled[row] for row in self.rows]
        token_ids: list[int | None] = [*chosen]
        if min(chosen, default=0) < 0:
            token_ids = [None if token_id < 0 else token_id for token_id in chosen]
        return StepResult(
            token_ids, self.served.dispatches, self.served.uses, quarantined=self.quarantined, scores=self.scores
        )


class ModelRunner:
    """Drives the worker with batches. Only the stepping thread may call it."""

    def __init__(self, worker: Worker, graphs: StepGraphs | None = None) -> None:
        """Without `graphs` every step is launched kernel by kernel."""
        self.worker = worker
        self.graphs = graphs
        self.shadow: ShadowCheck | None = None  # set by the process that judges its samples
        self._writer = StepWriter(
            page_size=worker.kv.page_size, num_pages=worker.kv.num_pages, is_pinned=worker.device.type == "cuda"
        )
        if graphs is not None:
            self._writer.declare(graphs.layouts)
        self._plain: tuple[Sequence, ...] = ()  # rows that were looked at last and were plain
        self._chosen: tuple[tuple[Sequence, ...], tuple[int, ...], tuple[int, ...]] = ((), (), ())
        self._chosen_at: dict[Sequence, int] = {}  # where the latest step chose each sequence's token

    @property
    def num_pages(self) -> int:
        return self.worker.kv.num_pages

    @property
    def dispatcher(self) -> Dispatcher:
        return self.worker.dispatcher

    @property
    def attention(self) -> StepAttention | None:
        """The attention of the latest step."""
        return self.worker.attention

    def recorded_kernels(self, batch: Batch) -> Counter[str] | None:
        """Return the kernels of this batch's graph by the driver's record; None where no graph computes it."""
        return None if self.graphs is None else self.graphs.kernels(batch)

    def suspects(self) -> list[tuple[str, str]]:
        """Return the (path, shape) pairs of the steps that may not be done, or else of the latest one."""
        return self.worker.suspects()

    def launch(self, batch: Batch) -> Launched:
        """Start a batch; its complete rows are sampled. At most one launched batch may be unread.

        Tokens that are PENDING are those that the launch before this one chooses. Raises BatchError, when nothing of
        the batch is on its way any more. After other errors only an attestation goes on, where the device is not lost.
        """
        self.worker.dispatcher.begin(batch)
        num_unread = self.worker.num_unread
        try:
            while True:
                try:
                    return self._launch(batch)
                except LaunchFailed as failed:  # on one of several ranks: none has finished the step
                    self.worker.synchronize()
                    self.worker.drop_unread(num_unread)
                    self.worker.dispatcher.replace(failed.choice, failed.error)
        except NoPathError as error:
            raise self._batch_error(batch.rows_of(error.phase), str(error)) from error
        except torch.OutOfMemoryError as error:
            num_prompts = batch.num_prefill + batch.num_extend
            rows_to_end = range(num_prompts or batch.num_rows)  # prompts need more memory than single tokens
            message = f"out of memory in a step of {batch.num_tokens} tokens"
            stage = "prefill" if num_prompts else "decode"
            raise self._batch_error(rows_to_end, message, oom_stage=stage) from error
        except Exception as error:
            if not is_device_lost(error):  # whose suspects are the steps that are not done
                self.worker.drop_unread(num_unread)
            raise

    def run(self, batch: Batch) -> StepResult:
        """Launch a batch and wait for it."""
        return self.launch(batch).result()

    def _launch(self, batch: Batch) -> Launched:
        is_scored = not self._is_plain(batch) and wants_scores(batch)
        hidden = None
        started_at = time.monotonic()
        tap = None if self.shadow is None or self.worker.dispatcher.is_watched else self.shadow.begin(batch)
        # A graph gives no hidden states.
        step = None if self.graphs is None or is_scored else self.graphs.find(batch)
        if step is not None and tap is None:
            rows = self._replay(step)
        else:
            rows, hidden = self._launch_eagerly(batch, tap)
        self.worker.mark(Part.LAUNCH)
        self._note_chosen(batch, rows)
        launched = self._launched(rows, None if tap is None or step is None else started_at)
        return launched if hidden is None or not is_scored else self._scored(batch, launched, hidden)

    def _launched(self, rows: tuple[int, ...], checked_at: float | None) -> Launched:
        """`checked_at`: when the launch of a step began that only a check kept from being a graph."""
        attention = self.worker.attention
        assert attention is not None

        def on_read() -> None:
            self.worker.finish(attention)
            if checked_at is not None and self.shadow is not None:
                self.shadow.spend(time.monotonic() - checked_at)

        read = self.worker.tokens.copy_to_host(max(rows, default=-1) + 1)
        quarantined = self.worker.dispatcher.take_quarantined()
        return Launched(read, rows, attention.report(), quarantined, on_read, self.worker.mark)

    @torch.inference_mode()
    def _scored(self, batch: Batch, launched: Launched, hidden: Tensor) -> Launched:
        """Add the scores of the batch's prompts, for which this waits: they are asked for by tests and canaries."""
        sampled = [-1 if token_id is None else token_id for token_id in launched.result().token_ids]
        return replace(launched, scores=score_rows(self.worker.decoder.logits, hidden, batch, sampled))

    def _launch_eagerly(self, batch: Batch, tap: Tap | None) -> tuple[tuple[int, ...], Tensor]:
        """Return where the tokens of the sampled rows will be, and the hidden states of all tokens."""
        self.worker.mark(Part.FILL)
        buffer = self._writer.write(batch, self._chosen_at)
        sampling = None if self._is_plain(batch) or not batch.sampled_rows else self._sampling(batch)
        return tuple(range(len(batch.sampled_rows))), self.worker.launch(buffer, sampling, tap)

    def _replay(self, step: GraphStep) -> tuple[int, ...]:
        """Return where the tokens of the sampled rows will be."""
        batch = step.batch
        is_greedy = self._is_plain(batch) or all(is_plain_greedy(batch.sequences[row]) for row in batch.sampled_rows)
        sampling = None if is_greedy else self._sampling(batch)
        self.worker.mark(Part.FILL)
        buffer = self._writer.write(batch, self._chosen_at, step.key)
        # The graph's other rows are padding, or ends of chunks whose last token has no successor yet.
        self.worker.replay(buffer, step.attention, step.rows, sampling)
        return step.rows if sampling is None else tuple(range(len(step.rows)))

    def _sampling(self, batch: Batch) -> SamplingTensors:
        """Return on the CPU how the tokens of the sampled rows are chosen."""
        rows = [row_sampling(batch.sequences[row], batch.context_lens[row]) for row in batch.sampled_rows]
        return sampling_tensors(rows, self.worker.decoder.config.vocab_size, torch.device("cpu"))

    def _is_plain(self, batch: Batch) -> bool:
        """Return whether every row only wants its likeliest token. Sequences that are plain stay so."""
        if batch.sequences is not self._plain:
            if any(seq.sampling.scored is not None or not is_plain_greedy(seq) for seq in batch.sequences):
                return False
            self._plain = batch.sequences
        return True

    def _note_chosen(self, batch: Batch, rows: tuple[int, ...]) -> None:
        """Note where this step chooses each sequence's token: mostly where the one before did."""
        chosen = (batch.sequences, batch.sampled_rows, rows)
        if chosen[0] is not self._chosen[0] or chosen != self._chosen:
            self._chosen = chosen
            self._chosen_at = {batch.sequences[row]: at for row, at in zip(batch.sampled_rows, rows, strict=True)}

    def _batch_error(self, rows: range, message: str, *, oom_stage: str | None = None) -> BatchError:
        self.worker.synchronize()  # for what the step had launched before it failed
        self.worker.drop_unread()
        quarantined = self.worker.dispatcher.take_quarantined()
        return BatchError("internal_error", message, rows, quarantined, oom_stage=oom_stage)
