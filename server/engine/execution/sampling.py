"""From logits to tokens: how each row's token is chosen, where it stays on the device; prompts' log probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from kernels.sampling.penalties import RowPenalties
from kernels.sampling.sampling import RowSampling, SampleResult
from server.engine.scheduling.sequence import Batch
from server.engine.scheduling.sequence import Sequence as EngineSequence
from server.protocol.messages import TokenScores

# Values of logits at a time: 128 MiB in fp32, 261 rows of a vocabulary of 128k. A whole prompt's would be 16 GB at 32k.
_MAX_LOGITS = 2**25

T = TypeVar("T")


class SampledTokens:
    """What the latest step chose, by result row. Two steps may be on their way to the host at once.

    latest  [num_rows] int64 on the device: valid ids, also where the logits gave no ground to choose
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.latest = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._checked = torch.zeros_like(self.latest)  # the same, -1 where the logits held no finite number
        self._hosts = [torch.zeros(num_rows, dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)]
        self._views = [host.numpy() for host in self._hosts]
        self._arrivals = [torch.cuda.Event() for _ in range(2)] if is_cuda else None  # type: ignore[no-untyped-call]
        self._turn = 0

    def store(self, chosen: SampleResult) -> None:
        """Write the first rows; a CUDA graph can hold it."""
        num_rows = chosen.token_ids.shape[0]
        self.latest[:num_rows].copy_(chosen.token_ids)
        self._checked[:num_rows].copy_(chosen.token_ids.masked_fill(~chosen.is_finite, -1))

    def copy_to_host(self, num_rows: int) -> Callable[[], list[int]]:
        """Start the copy of the first rows. The function returned waits for it, and so for the whole step.

        Call it before the second `copy_to_host` after this one, which uses its memory again.
        """
        turn = self._turn = 1 - self._turn
        if num_rows:
            self._hosts[turn].copy_(self._checked, non_blocking=True)  # all: to cut out some rows takes longer
        token_ids = self._views[turn]
        arrival = None if self._arrivals is None else self._arrivals[turn]
        if arrival is not None:
            arrival.record()

        def read() -> list[int]:
            if arrival is not None:
                arrival.synchronize()
            found: list[int] = token_ids[:num_rows].tolist()
            return found

        return read


def is_plain_greedy(seq: EngineSequence) -> bool:
    """Return whether the next token is simply the likeliest one."""
    return seq.is_greedy and (not seq.sampling.min_tokens or seq.num_generated >= seq.sampling.min_tokens)


def row_sampling(seq: EngineSequence, position: int) -> RowSampling:
    """Return how the token at `position` of the sequence is chosen."""
    wanted = seq.sampling
    penalties = None
    if wanted.needs_history:
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


def staged(value: T, device: torch.device) -> T:
    """Copy a tensor, or every tensor in a dataclass, from the CPU to the device without waiting for the device.

    On CUDA by way of pinned memory: torch copies from other memory only when all launches before it are done, and
    frees pinned memory only when the copy is.
    """
    if device.type == "cpu":
        return value
    if isinstance(value, Tensor):
        return value.pin_memory().to(device, non_blocking=True)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: staged(getattr(value, field.name), device) for field in fields(value)}
        return replace(value, **found)
    return value


def wants_scores(batch: Batch) -> bool:
    """Return whether a row computes tokens of a prompt that is to be scored; then every hidden state is needed."""
    return any(seq.sampling.scored is not None and not seq.num_generated for seq in batch.sequences)


def score_rows(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    batch: Batch,
    sampled: Sequence[int],
    *,
    max_logits: int = _MAX_LOGITS,
) -> dict[int, TokenScores]:
    """Return by row the scores of the successor of every token that the batch computed of a prompt to be scored.

    hidden   [T, hidden], all tokens of the batch in the order of its rows
    sampled  the token of each of the batch's sampled rows, which succeeds the prompt; negative: it has none
    """
    starts = [0, *accumulate(batch.query_lens)]
    chosen = dict(zip(batch.sampled_rows, sampled, strict=True))
    found = {}
    for row, seq in enumerate(batch.sequences):
        num_top = seq.sampling.scored
        if num_top is None or seq.num_generated or chosen.get(row, 0) < 0:
            continue
        end = batch.context_lens[row]
        first = end - batch.query_lens[row]
        successors = [*seq.tokens[first + 1 : end + 1], *([chosen[row]] if row in chosen else [])]
        part = hidden[starts[row] : starts[row + 1]]
        logprobs, top_ids, top_logprobs = _scores(logits_of, part, successors, num_top, max_logits)
        found[row] = TokenScores(first + 1, logprobs, top_ids, top_logprobs)
    return found


@torch.inference_mode()
def _scores(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, successors: list[int], num_top: int, max_logits: int
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    targets = torch.tensor(successors, device=hidden.device)[:, None]
    logprobs: list[float] = []
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []
    start, num_rows = 0, 1  # one row says how wide the vocabulary is
    while start < len(successors):
        rows = slice(start, start + num_rows)
        logits = logits_of(hidden[rows])
        num_rows = max(1, max_logits // logits.shape[1])
        total = logits.logsumexp(dim=1, keepdim=True)
        logprobs += (logits.gather(1, targets[rows]) - total).squeeze(1).tolist()
        top = logits.topk(num_top, dim=1)
        top_ids += top.indices.tolist()
        top_logprobs += (top.values - total).tolist()
        start = rows.stop
    return logprobs, top_ids, top_logprobs
