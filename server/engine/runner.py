"""Computes a batch on the device: tensors in, decoder, sampler, one read of token ids."""

import torch
from torch import Tensor

from kernels.fused.penalties import RowPenalties
from kernels.fused.sampling import RowSampling, sample, sampling_tensors
from kernels.shape import Phase
from server.engine.core import BatchError, StepResult
from server.engine.dispatch import Dispatcher, NoPathError, StepAttention
from server.engine.inputs import InputBuilder, StepInputs
from server.engine.sequence import Batch, Sequence
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache


class ModelRunner:
    """Owns the device's side of the engine. Only the stepping thread may call it."""

    def __init__(self, decoder: Decoder, kv: KVCache, dispatcher: Dispatcher, device: torch.device) -> None:
        self.dispatcher = dispatcher
        self._decoder = decoder
        self._kv = kv
        self._device = device
        self._inputs = InputBuilder(kv.page_size, device)
        self._attention: StepAttention | None = None

    @property
    def num_pages(self) -> int:
        return self._kv.k[0].shape[0]

    def suspects(self) -> list[tuple[str, str]]:
        """The (path, shape) pairs of the latest step."""
        return [] if self._attention is None else self._attention.suspects()

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Compute a batch and sample its complete rows. Raises BatchError; other errors mean the device is lost."""
        inputs = self._inputs.build(batch)
        rows = [_row_sampling(batch.sequences[row], batch.context_lens[row]) for row in batch.sampled_rows]
        # Made before the forward pass, for these small copies wait for everything that was launched before them.
        sampling = sampling_tensors(rows, self._decoder.config.vocab_size, self._device) if rows else None
        try:
            hidden = self._forward(inputs)
            if sampling is None:
                self._wait()
                return self._result([])
            sampled = sample(self._decoder.logits(hidden[inputs.sampled]), sampling)
            token_ids = torch.where(sampled.is_finite, sampled.token_ids, -1).tolist()
        except NoPathError as error:
            raise self._batch_error(batch.rows_of(error.phase), str(error)) from error
        except torch.OutOfMemoryError as error:
            num_prompts = batch.num_prefill + batch.num_extend
            rows_to_end = range(num_prompts or batch.num_rows)  # prompts need more memory than single tokens
            raise self._batch_error(rows_to_end, f"out of memory in a step of {batch.num_tokens} tokens") from error
        return self._result([None if token_id < 0 else token_id for token_id in token_ids])

    def _forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [T, hidden] of all tokens."""
        self._attention = StepAttention(self.dispatcher, inputs.parts, self._kv.k, self._kv.v)
        return self._decoder.forward(inputs.token_ids, inputs.positions, inputs.slots, self._kv, self._attention)

    def _wait(self) -> None:
        """Nothing is read back, but the next step reuses the host memory that this one copies from."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _result(self, token_ids: list[int | None]) -> StepResult:
        assert self._attention is not None
        return StepResult(
            token_ids,
            dispatches=self._attention.counts(),
            uses={phase: self._attention.uses(phase) for phase in Phase},
            quarantined=self.dispatcher.take_quarantined(),
        )

    def _batch_error(self, rows: range, message: str) -> BatchError:
        return BatchError("internal_error", message, rows, self.dispatcher.take_quarantined())


def _row_sampling(seq: Sequence, position: int) -> RowSampling:
    """How the token at `position` of the sequence is chosen."""
    wanted = seq.sampling
    penalties = None
    if wanted.repetition_penalty != 1.0 or wanted.presence_penalty or wanted.frequency_penalty:
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
