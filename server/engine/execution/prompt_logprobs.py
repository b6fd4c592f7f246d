"""Log probabilities of a prompt's own tokens, each given those before it: what a canary compares numerics by."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from server.engine.scheduling.sequence import Batch
from server.protocol.messages import TokenScores

# Values of logits at a time: 128 MiB in fp32, 261 rows of a vocabulary of 128k. A whole prompt's would be 16 GB at 32k.
_MAX_LOGITS = 2**25


def wants_scores(batch: Batch) -> bool:
    """Whether a row computes tokens of a prompt that is to be scored; then every hidden state is needed."""
    return any(seq.sampling.scored is not None and not seq.num_generated for seq in batch.sequences)


def score_rows(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    batch: Batch,
    sampled: Sequence[int],
    *,
    max_logits: int = _MAX_LOGITS,
) -> dict[int, TokenScores]:
    """By row: the scores of the successor of every token that the batch computed of a prompt to be scored.

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
    start, num_rows = 0, 1  # one row tells how wide the vocabulary is
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
