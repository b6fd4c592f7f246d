"""Computes batches on the device: tensors in, decoder, sampler; the host reads token ids when it wants to."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kernels.sampling.sampling import SamplingTensors, greedy, sample, sampling_tensors
from server.engine.attention.dispatch import Dispatcher, NoPathError
from server.engine.attention.launch_errors import is_device_lost
from server.engine.attention.step_attention import Served, StepAttention
from server.engine.execution.graphs import GraphStep, StepGraphs
from server.engine.execution.inputs import InputBuilder, StepInputs
from server.engine.execution.prompt_logprobs import score_rows, wants_scores
from server.engine.execution.sampling import is_plain_greedy, row_sampling
from server.engine.execution.staging import staged
from server.engine.execution.step_tokens import StepTokens
from server.engine.proof.shadow_check import ShadowCheck, Tap
from server.engine.scheduling.runner_api import BatchError, StepResult
from server.engine.scheduling.sequence import Batch, Sequence
from server.engine.scheduling.step_parts import Mark, Part, unmarked
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.step import Step
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
        told = self.read()
        self.mark(Part.REPORT)
        self.on_read()
        chosen = told if len(told) == len(self.rows) else [told[row] for row in self.rows]
        token_ids: list[int | None] = [*chosen]
        if min(chosen, default=0) < 0:
            token_ids = [None if token_id < 0 else token_id for token_id in chosen]
        return StepResult(
            token_ids, self.served.dispatches, self.served.uses, quarantined=self.quarantined, scores=self.scores
        )


class ModelRunner:
    """Owns the device's side of the engine. Only the stepping thread may call it."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        dispatcher: Dispatcher,
        tokens: StepTokens,
        graphs: StepGraphs | None = None,
    ) -> None:
        """`tokens` for every row that a step may sample. Without `graphs` every step is launched kernel by kernel."""
        self.dispatcher = dispatcher
        self.graphs = graphs
        self.shadow: ShadowCheck | None = None  # set by whoever judges its samples
        self.mark: Mark = unmarked  # set by a bench
        self._decoder = decoder
        self._kv = kv
        self._device = tokens.latest.device
        self._tokens = tokens
        self._inputs = InputBuilder(kv.page_size, self._device)
        self._attention: StepAttention | None = None  # of the latest step
        self._unread: list[StepAttention] = []  # of the steps whose results nobody has read
        self._plain: tuple[Sequence, ...] = ()  # rows that were looked at last and were plain
        self._chosen: tuple[tuple[Sequence, ...], tuple[int, ...], tuple[int, ...]] = ((), (), ())
        self._chosen_at: dict[Sequence, int] = {}  # where the latest step chose each sequence's token

    @property
    def num_pages(self) -> int:
        return self._kv.num_pages

    @property
    def attention(self) -> StepAttention | None:
        """Of the latest step."""
        return self._attention

    def recorded_kernels(self, batch: Batch) -> Counter[str] | None:
        """What the graph of this batch holds, by the driver's word; None where it is not a graph that computes it."""
        return None if self.graphs is None else self.graphs.kernels(batch)

    def suspects(self) -> list[tuple[str, str]]:
        """The (path, shape) pairs of the steps that may not be done, or else of the latest one."""
        latest = [] if self._attention is None else [self._attention]
        return list(dict.fromkeys(pair for step in self._unread or latest for pair in step.suspects()))

    def launch(self, batch: Batch) -> Launched:
        """Start a batch; its complete rows are sampled. At most one launched batch may be unread.

        Tokens that are PENDING are those that the launch before this one chooses. Raises BatchError, when nothing of
        the batch is on its way any more. After other errors only an attestation goes on, where the device is not lost.
        """
        self.dispatcher.begin(batch)
        num_unread = len(self._unread)
        try:
            return self._launch(batch)
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
                del self._unread[num_unread:]
            raise

    def _launch(self, batch: Batch) -> Launched:
        is_scored = not self._is_plain(batch) and wants_scores(batch)
        hidden = None
        started_at = time.monotonic()
        tap = None if self.shadow is None or self.dispatcher.is_watched else self.shadow.begin(batch)
        # A graph gives no hidden states.
        step = None if self.graphs is None or is_scored else self.graphs.find(batch)
        if self.graphs is not None and step is not None and tap is None:
            rows = self._replay(self.graphs, step)
        else:
            rows, hidden = self._launch_eagerly(batch, tap)
        self.mark(Part.LAUNCH)
        self._note_chosen(batch, rows)
        launched = self._launched(rows, None if tap is None or step is None else started_at)
        return launched if hidden is None or not is_scored else self._scored(batch, launched, hidden)

    def run(self, batch: Batch) -> StepResult:
        """Launch a batch and wait for it."""
        return self.launch(batch).result()

    def _launched(self, rows: tuple[int, ...], checked_at: float | None) -> Launched:
        """`checked_at`: when the launch of a step began that only a check kept from being a graph."""
        attention = self._attention
        assert attention is not None

        def on_read() -> None:
            self._forget(attention)
            if checked_at is not None and self.shadow is not None:
                self.shadow.spend(time.monotonic() - checked_at)

        read = self._tokens.ship(max(rows, default=-1) + 1)
        quarantined = self.dispatcher.take_quarantined()
        return Launched(read, rows, attention.told(), quarantined, on_read, self.mark)

    @torch.inference_mode()
    def _scored(self, batch: Batch, launched: Launched, hidden: Tensor) -> Launched:
        """With the scores of the batch's prompts, for which this waits: they are asked for by tests and canaries."""
        sampled = [-1 if token_id is None else token_id for token_id in launched.result().token_ids]
        return replace(launched, scores=score_rows(self._decoder.logits, hidden, batch, sampled))

    @torch.inference_mode()
    def _launch_eagerly(self, batch: Batch, tap: Tap | None) -> tuple[tuple[int, ...], Tensor]:
        """Where the tokens of the sampled rows will be, and the hidden states of all tokens."""
        self.mark(Part.FILL)
        inputs = self._inputs.build(batch, self._chosen_at)
        self.mark(Part.LAUNCH)
        if inputs.pending.shape[1]:
            tokens, places = inputs.pending
            inputs.token_ids.index_copy_(0, tokens, self._tokens.latest.index_select(0, places))
        sampling = None if self._is_plain(batch) or not batch.sampled_rows else self._sampling(batch)
        hidden = self._forward(inputs, tap)
        if batch.sampled_rows:
            self.mark(Part.SAMPLE)
            logits = self._decoder.logits(hidden.index_select(0, inputs.sampled))
            self._tokens.keep(greedy(logits) if sampling is None else sample(logits, sampling))
        return tuple(range(len(batch.sampled_rows))), hidden

    def _replay(self, graphs: StepGraphs, step: GraphStep) -> tuple[int, ...]:
        """As `_launch_eagerly`, for a step that is a graph. Greedy rows are chosen inside of it."""
        batch = step.batch
        self._begin(step.attention)
        is_greedy = self._is_plain(batch) or all(is_plain_greedy(batch.sequences[row]) for row in batch.sampled_rows)
        if is_greedy:
            graphs.replay(step, self._chosen_at, self.mark)
            return step.rows
        return self._replay_and_sample(graphs, step)

    @torch.inference_mode()
    def _replay_and_sample(self, graphs: StepGraphs, step: GraphStep) -> tuple[int, ...]:
        sampling = self._sampling(step.batch)
        logits = graphs.replay(step, self._chosen_at, self.mark)
        self.mark(Part.SAMPLE)
        # The graph's other rows are padding, or ends of chunks whose last token has no successor yet.
        self._tokens.keep(sample(_rows_of(logits, step.rows), sampling))
        return tuple(range(len(step.rows)))

    def _sampling(self, batch: Batch) -> SamplingTensors:
        rows = [row_sampling(batch.sequences[row], batch.context_lens[row]) for row in batch.sampled_rows]
        # Made on the host and sent from pinned memory: a copy from elsewhere waits for every launch before it.
        return staged(sampling_tensors(rows, self._decoder.config.vocab_size, torch.device("cpu")), self._device)

    def _is_plain(self, batch: Batch) -> bool:
        """Whether nothing is asked of any row but its likeliest token. Sequences that are plain stay so."""
        if batch.sequences is not self._plain:
            if any(seq.sampling.scored is not None or not is_plain_greedy(seq) for seq in batch.sequences):
                return False
            self._plain = batch.sequences
        return True

    def _note_chosen(self, batch: Batch, rows: tuple[int, ...]) -> None:
        """Keep where this step chooses each sequence's token: mostly where the one before did."""
        chosen = (batch.sequences, batch.sampled_rows, rows)
        if chosen[0] is not self._chosen[0] or chosen != self._chosen:
            self._chosen = chosen
            self._chosen_at = {batch.sequences[row]: at for row, at in zip(batch.sampled_rows, rows, strict=True)}

    def _forward(self, inputs: StepInputs, tap: Tap | None) -> Tensor:
        """Hidden states [T, hidden] of all tokens."""
        attention = StepAttention(self.dispatcher, inputs.parts, self._kv.k, self._kv.v, tap=tap)
        self._begin(attention)
        self.mark(Part.FORWARD)
        return self._decoder.forward(Step(inputs.token_ids, inputs.positions, inputs.slots, self._kv, attention))

    def _begin(self, attention: StepAttention) -> None:
        self._attention = attention
        self._unread.append(attention)

    def _forget(self, attention: StepAttention) -> None:
        if attention in self._unread:  # once for each step: equal ones share it
            self._unread.remove(attention)

    def _batch_error(self, rows: range, message: str, *, oom_stage: str | None = None) -> BatchError:
        if self._device.type == "cuda":  # for what the step had launched before it failed
            torch.cuda.synchronize(self._device)
        self._unread = []
        quarantined = self.dispatcher.take_quarantined()
        return BatchError("internal_error", message, rows, quarantined, oom_stage=oom_stage)


def _rows_of(logits: Tensor, rows: tuple[int, ...]) -> Tensor:
    if rows == tuple(range(len(rows))):
        return logits[: len(rows)]
    return logits.index_select(0, staged(torch.tensor(rows), logits.device))
