"""Sampling of each row's token from its logits, kept on the device; log probabilities of tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate, chain
from typing import TypeVar

import torch
from torch import Tensor

from kernels.sampling.log_sum import log_sum_exp
from kernels.sampling.penalties import RowPenalties
from kernels.sampling.sampling import RowSampling, SampleResult
from server.engine.scheduling.sequence import Batch
from server.engine.scheduling.sequence import Sequence as EngineSequence
from server.protocol.messages import TokenScores

# Values of logits at a time: 128 MiB in fp32, 261 rows of a vocabulary of 128k. A whole prompt's would be 16 GB at 32k.
_MAX_LOGITS = 2**25

_MOST_KEYS = 2**24  # of 8 bytes, by which likeliest tokens are ordered at a time

# In place of a token's id: the model's logits hold no finite number, or the request's limits leave no token.
NOT_FINITE, EXHAUSTED = -1, -2

T = TypeVar("T")


class SampledTokens:
    """Tokens that the latest step chose, by result row. Two steps may be on their way to the host at once.

    latest   [num_rows] int64 on the device: valid ids, also where the logits gave no ground to choose
    drafted  [2 * num_rows] int64 there: what a draft head has drafted since the latest step
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.latest = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._both = torch.zeros(3 * num_rows, dtype=torch.int64, device=device)  # one copy takes both to the host
        # The same as the latest, NOT_FINITE or EXHAUSTED where there is none.
        self._checked, self.drafted = self._both[:num_rows], self._both[num_rows:]
        self._hosts = [torch.zeros(3 * num_rows, dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)]
        self._hosts_of_checked = [host[:num_rows] for host in self._hosts]
        self._views = [host.numpy() for host in self._hosts]
        self._arrivals = [torch.cuda.Event() for _ in range(2)] if is_cuda else None  # type: ignore[no-untyped-call]
        self._turn = 0

    def store(self, chosen: SampleResult) -> None:
        """Write the first rows; a CUDA graph can hold it."""
        num_rows = chosen.token_ids.shape[0]
        self.latest[:num_rows].copy_(chosen.token_ids)
        checked = chosen.token_ids.masked_fill(~chosen.is_finite, NOT_FINITE)
        if chosen.is_exhausted is not None:
            checked.masked_fill_(chosen.is_exhausted, EXHAUSTED)
        self._checked[:num_rows].copy_(checked)

    def copy_to_host(self, num_rows: int, drafted_at: Sequence[int] = ()) -> Callable[[], list[int]]:
        """Start the copy of the first rows, and of the drafted tokens at some places, which come behind them.

        The function returned waits for it, and so for the whole step. Call it before the second `copy_to_host` after
        this one, which uses its memory again.
        """
        turn, num_all = 1 - self._turn, self.latest.numel()
        self._turn = turn
        if drafted_at:
            self._hosts[turn].copy_(self._both, non_blocking=True)
        elif num_rows:  # all are copied: to cut out some rows takes longer
            self._hosts_of_checked[turn].copy_(self._checked, non_blocking=True)
        token_ids = self._views[turn]
        arrival = None if self._arrivals is None else self._arrivals[turn]
        if arrival is not None:
            arrival.record()

        def read() -> list[int]:
            if arrival is not None:
                arrival.synchronize()
            found: list[int] = token_ids[:num_rows].tolist()
            if drafted_at:
                found += token_ids[num_all:][list(drafted_at)].tolist()
            return found

        return read


def is_plain_greedy(seq: EngineSequence) -> bool:
    """Return whether the next token is simply the likeliest one."""
    return seq.is_greedy and (not seq.sampling.min_tokens or seq.num_generated >= seq.sampling.min_tokens)


def row_sampling(seq: EngineSequence, position: int) -> RowSampling:
    """Return how the token at `position` of the sequence is chosen, behind all before it, drafted ones included."""
    wanted = seq.sampling
    penalties = None
    if wanted.needs_history:
        penalties = RowPenalties(
            prompt_ids=seq.tokens[: seq.num_prompt],
            output_ids=seq.tokens[seq.num_prompt : position],
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
        banned_ids=tuple(_banned(seq, position)) if wanted.min_tokens or wanted.bad_words else (),
        bias=wanted.logit_bias,
        allowed_ids=wanted.allowed_token_ids,
    )


def _banned(seq: EngineSequence, position: int) -> set[int]:
    """Return the tokens that may not stand at `position`: those that end too early, or complete a bad word."""
    wanted, num_generated = seq.sampling, position - seq.num_prompt
    # A grammar's mask has its own, for it may allow nothing but the end.
    banned = set(seq.stop_ids) if num_generated < wanted.min_tokens and seq.matcher is None else set()
    for *beginning, last in wanted.bad_words:
        if len(beginning) <= num_generated and seq.tokens[position - len(beginning) : position] == beginning:
            banned.add(last)
    return banned


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


def wants_hidden(batch: Batch) -> bool:
    """Return whether a row computes tokens of a prompt whose hidden states are used by more than sampling."""
    return any(seq.wants_hidden and not seq.num_generated for seq in batch.sequences)


@torch.inference_mode()
def start_pooling(
    normed_of: Callable[[Tensor], Tensor], logits_of: Callable[[Tensor], Tensor], hidden: Tensor, batch: Batch
) -> Callable[[], dict[int, bytes]]:
    """Start the copy to the host of what the rows that are pooled ask for. Call the result when the step is done.

    hidden  [T, hidden], all tokens of the batch in the order of its rows
    """
    wanted = {row: batch.sequences[row].sampling.pooling for row in batch.sampled_rows}
    rows = [row for row, pooling in wanted.items() if pooling is not None and not batch.sequences[row].num_generated]
    labels = [batch.sequences[row].sampling.pooling.label_ids for row in rows]  # type: ignore[union-attr]
    if not rows:
        return dict
    ends = list(accumulate(batch.query_lens))
    picked = hidden.index_select(0, staged(torch.tensor([ends[row] - 1 for row in rows]), hidden.device))
    states = None if all(labels) else normed_of(picked).float()
    logits = logits_of(picked) if any(labels) else None
    found = []
    for at, ids in enumerate(labels):
        values = logits if ids else states
        assert values is not None
        found.append(values[at].index_select(0, staged(torch.tensor(ids), hidden.device)) if ids else values[at])
    joined = torch.cat(found)
    host = torch.empty(joined.shape, dtype=torch.float32, pin_memory=hidden.device.type == "cuda")
    host.copy_(joined, non_blocking=True)
    starts = [0, *accumulate(it.shape[0] for it in found)]

    def read() -> dict[int, bytes]:
        return {row: host[starts[at] : starts[at + 1]].numpy().tobytes() for at, row in enumerate(rows)}

    return read


def wants_prompt_scores(batch: Batch) -> bool:
    """Return whether a row computes tokens of a prompt that is to be scored; then every hidden state is needed."""
    return any(seq.sampling.prompt_logprobs is not None and not seq.num_generated for seq in batch.sequences)


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The rows of a step's results whose tokens are scored, ascending, and beside how many likeliest tokens."""

    rows: tuple[int, ...]
    num_top: int


def scored_rows(sequences: Sequence[EngineSequence]) -> ScoredRows | None:
    """Return which of the sequences that a step samples are scored; None where none is."""
    scored = enumerate([it.num_scored_beside for it in sequences])
    wanted = {row: num_top for row, num_top in scored if num_top is not None}
    return ScoredRows(tuple(wanted), max(wanted.values())) if wanted else None


@torch.inference_mode()
def score(logits: Tensor, token_ids: Tensor, num_top: int, *, is_reproducible: bool = False) -> Tensor:
    """Return the scores of a token of each row of the model's own logits [R, V] fp32, as [R, 2 + 2 num_top] fp64.

    Of each row: the token's log probability and its rank, the ids of the likeliest tokens, their log probabilities.
    One tensor, hence one copy to the host; fp64 holds ids and fp32 exactly. With `is_reproducible` the lower ids of
    equally likely tokens come first; without it which of them come at all may depend on the batch.
    """
    total = log_sum_exp(logits)
    own = logits.gather(1, token_ids[:, None])
    rank = (logits >= own).sum(dim=1, keepdim=True)
    if is_reproducible:
        top_ids = _first_ids(logits, num_top)
        top = logits.gather(1, top_ids)
    else:
        top, top_ids = logits.topk(num_top, dim=1)
    return torch.cat([part.double() for part in (own - total, rank, top_ids, top - total)], dim=1)


def _first_ids(logits: Tensor, num_top: int) -> Tensor:
    """Return the ids [R, num_top] of the largest logits [R, V] fp32, the largest first, the lower of equals first.

    Each logit becomes an integer that no other is equal to: its bits, in the order of numbers, above its id's.
    """
    ids = torch.arange(2**31 - 1, 2**31 - 1 - logits.shape[1], -1, device=logits.device)
    found = []
    for rows in torch.split(logits, max(1, _MOST_KEYS // logits.shape[1])):
        bits = rows.view(torch.int32)
        keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
        found.append(2**31 - 1 - (keys.bitwise_or_(ids).topk(num_top, dim=1).values & 0xFFFFFFFF))
    return torch.cat(found)


def scores_to_host(scores: Tensor) -> Callable[[], list[list[float]]]:
    """Start the copy of scores to the host. The function returned may be called when a later copy has arrived."""
    host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=scores.device.type == "cuda")
    host.copy_(scores, non_blocking=True)

    def read() -> list[list[float]]:
        found: list[list[float]] = host.tolist()
        return found

    return read


def token_scores(position: int, rows: Iterable[list[float]], num_top: int) -> TokenScores:
    """Return the scores of tokens from `position` on, made of rows of `score`, with `num_top` likeliest tokens each."""

    def cut(row: list[float]) -> list[float]:
        most = len(row) // 2 - 1
        return row if most == num_top else [*row[: 2 + num_top], *row[2 + most : 2 + most + num_top]]

    return TokenScores.of(position, num_top, map(cut, rows))


def score_prompts(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    batch: Batch,
    *,
    max_logits: int = _MAX_LOGITS,
    is_reproducible: bool = False,
) -> dict[int, TokenScores]:
    """Return by row the scores of the prompt's tokens that succeed those that the batch computes; waits for them.

    hidden   [T, hidden], all tokens of the batch in the order of its rows
    is_reproducible  as of `score`
    """
    starts = [0, *accumulate(batch.query_lens)]
    found = {}
    for row, seq in enumerate(batch.sequences):
        num_top = seq.sampling.prompt_logprobs
        if num_top is None or seq.num_generated:
            continue
        end = batch.context_lens[row]
        first = end - batch.query_lens[row] + 1
        successors = seq.tokens[first : end + 1]
        part = hidden[starts[row] : starts[row] + len(successors)]
        sliced = _sliced_scores(logits_of, part, successors, num_top, max_logits, is_reproducible=is_reproducible)
        rows = chain.from_iterable(sliced)
        found[row] = token_scores(first, rows, num_top)
    return found


@torch.inference_mode()
def _sliced_scores(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    token_ids: list[int],
    num_top: int,
    max_logits: int,
    *,
    is_reproducible: bool,
) -> Iterator[list[list[float]]]:
    targets = torch.tensor(token_ids, dtype=torch.int64, device=hidden.device)
    start, num_rows = 0, 1  # one row says how wide the vocabulary is
    while start < len(token_ids):
        rows = slice(start, start + num_rows)
        logits = logits_of(hidden[rows])
        num_rows = max(1, max_logits // logits.shape[1])
        yield score(logits, targets[rows], num_top, is_reproducible=is_reproducible).tolist()
        start = rows.stop
