"""Computes a batch on the device: tensors in, decoder, sampler, one read of token ids."""

import torch
from torch import Tensor

from kernels.fused.penalties import RowPenalties
from kernels.fused.sampling import RowSampling, SampleResult, SamplingTensors, sample, sampling_tensors
from kernels.shape import Phase
from server.engine.core import BatchError, StepResult
from server.engine.dispatch import Dispatcher, NoPathError, StepAttention
from server.engine.graphs import DecodeGraphs, DecodeStep
from server.engine.inputs import InputBuilder, StepInputs
from server.engine.messages import SamplingParams, TokenScores
from server.engine.scores import score_rows, wants_scores
from server.engine.sequence import Batch, Sequence
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache


class ModelRunner:
    """Owns the device's side of the engine. Only the stepping thread may call it."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        dispatcher: Dispatcher,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """Without `graphs` every step is launched kernel by kernel."""
        self.dispatcher = dispatcher
        self._decoder = decoder
        self._kv = kv
        self._device = device
        self._inputs = InputBuilder(kv.page_size, device)
        self.graphs = graphs
        self._attention: StepAttention | None = None

    @property
    def num_pages(self) -> int:
        return self._kv.num_pages

    @property
    def attention(self) -> StepAttention | None:
        """Of the latest step."""
        return self._attention

    def suspects(self) -> list[tuple[str, str]]:
        """The (path, shape) pairs of the latest step."""
        return [] if self._attention is None else self._attention.suspects()

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Compute a batch and sample its complete rows. Raises BatchError; other errors mean the device is lost."""
        self.dispatcher.begin(batch)
        try:
            scores: dict[int, TokenScores] = {}
            is_scored = wants_scores(batch)  # a graph gives no hidden states
            step = None if self.graphs is None or is_scored else self.graphs.find(batch)
            if self.graphs is not None and step is not None:
                token_ids = self._replay(self.graphs, step)
            else:
                token_ids, hidden = self._run_eagerly(batch)
                if is_scored:
                    scores = score_rows(self._decoder.logits, hidden, batch, token_ids)
        except NoPathError as error:
            raise self._batch_error(batch.rows_of(error.phase), str(error)) from error
        except torch.OutOfMemoryError as error:
            num_prompts = batch.num_prefill + batch.num_extend
            rows_to_end = range(num_prompts or batch.num_rows)  # prompts need more memory than single tokens
            message = f"out of memory in a step of {batch.num_tokens} tokens"
            stage = "prefill" if num_prompts else "decode"
            raise self._batch_error(rows_to_end, message, oom_stage=stage) from error
        return self._result([None if token_id < 0 else token_id for token_id in token_ids], scores)

    def _run_eagerly(self, batch: Batch) -> tuple[list[int], Tensor]:
        """The token of each sampled row, -1 where its logits held no finite number; hidden states of all tokens."""
        inputs = self._inputs.build(batch)
        # Made before the forward pass, for these small copies wait for everything that was launched before them.
        sampling = self._sampling(batch) if batch.sampled_rows else None
        hidden = self._forward(inputs)
        if sampling is None:
            self._wait()
            return [], hidden
        return _read(sample(self._decoder.logits(hidden[inputs.sampled]), sampling)), hidden

    def _replay(self, graphs: DecodeGraphs, step: DecodeStep) -> list[int]:
        """The tokens of a step that is a graph. Greedy rows are chosen inside of it."""
        batch = step.batch
        self._attention = step.attention
        if all(_is_plain_greedy(batch.sequences[row]) for row in batch.sampled_rows):
            graphs.replay(step)
            likeliest = graphs.read_greedy(batch.num_rows)
            return [likeliest[row] for row in batch.sampled_rows]
        sampling = self._sampling(batch)
        logits = graphs.replay(step)
        if len(batch.sampled_rows) < batch.num_rows:  # the last token of a chunk of a prompt has no successor yet
            logits = logits[list(batch.sampled_rows)]
        return _read(sample(logits, sampling))

    def _sampling(self, batch: Batch) -> SamplingTensors:
        rows = [_row_sampling(batch.sequences[row], batch.context_lens[row]) for row in batch.sampled_rows]
        return sampling_tensors(rows, self._decoder.config.vocab_size, self._device)

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [T, hidden] of all tokens."""
        self._attention = StepAttention(self.dispatcher, inputs.parts, self._kv.k, self._kv.v)
        return self._decoder.forward(inputs.token_ids, inputs.positions, inputs.slots, self._kv, self._attention)

    def _wait(self) -> None:
        """Where nothing is read back: the next step reuses the host memory that this one copies from."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _result(self, token_ids: list[int | None], scores: dict[int, TokenScores]) -> StepResult:
        assert self._attention is not None
        return StepResult(
            token_ids,
            dispatches=self._attention.counts(),
            uses={phase: self._attention.uses(phase) for phase in Phase},
            quarantined=self.dispatcher.take_quarantined(),
            scores=scores,
        )

    def _batch_error(self, rows: range, message: str, *, oom_stage: str | None = None) -> BatchError:
        self._wait()  # for what the step had launched before it failed
        quarantined = self.dispatcher.take_quarantined()
        return BatchError("internal_error", message, rows, quarantined, oom_stage=oom_stage)


def _read(sampled: SampleResult) -> list[int]:
    """Wait for the tokens; -1 for a row that is not finite."""
    token_ids: list[int] = sampled.token_ids.masked_fill(~sampled.is_finite, -1).tolist()
    return token_ids


def _is_plain_greedy(seq: Sequence) -> bool:
    """Whether the next token is simply the likeliest one."""
    wanted = seq.sampling
    return wanted.temperature == 0 and seq.num_generated >= wanted.min_tokens and not _has_penalties(wanted)


def _has_penalties(wanted: SamplingParams) -> bool:
    return wanted.repetition_penalty != 1.0 or bool(wanted.presence_penalty or wanted.frequency_penalty)


def _row_sampling(seq: Sequence, position: int) -> RowSampling:
    """How the token at `position` of the sequence is chosen."""
    wanted = seq.sampling
    penalties = None
    if _has_penalties(wanted):
        penalties = RowPenalties(
            prompt_ids=seq.tokens[: seq.num_prompt],
            output_ids=seq.tokens[seq.num_prompt :],
            repetition=wanted.repetition_penalty,
            presence=wanted.presence_penalty,
            frequency=wanted.frequency_penalty,
        )
    return RowSampling(
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        min_p=wanted.min_p,
        seed=seq.seed,
        position=position,
        penalties=penalties,
        banned_ids=tuple(seq.stop_ids) if seq.num_generated < wanted.min_tokens else (),
    )
