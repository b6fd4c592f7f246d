"""The next token of each row of logits: greedy and sampled rows in one batch, all on the device, no host sync."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fused.backend import runs_on_triton
from kernels.sampling.draw import RowLimits, draw_tokens, greedy_tokens
from kernels.sampling.gumbel import gumbel_noise
from kernels.sampling.penalties import PenaltyTensors, RowPenalties, apply_penalties, penalty_tensors


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Parameters of choosing one row's token. The caller has checked every value."""

    temperature: float = 1.0  # 0 is greedy: the other limits then change nothing
    top_k: int | None = None  # only the k likeliest tokens
    top_p: float = 1.0  # of those, the fewest that reach this much of their probability; above 0
    min_p: float = 0.0  # only tokens at least this likely relative to the likeliest one
    seed: int = 0  # any int64
    position: int = 0  # where the token will stand in its sequence
    penalties: RowPenalties | None = None
    banned_ids: Sequence[int] = ()  # never chosen: end tokens, while the output is shorter than min_tokens
    bias: Sequence[tuple[int, float]] = ()  # token ids, each once, and what is added to their logits
    allowed_ids: Sequence[int] = ()  # no other token is chosen; empty: any


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """A batch of RowSampling on the device, R rows; None where no row needs it.

    temperature            [R, 1] fp32, 0 is greedy
    top_k                  [R, 1] int64, at least 1
    top_p, log_min_p       [R, 1] fp32
    seeds, positions       [R] int64
    banned_rows, banned_ids   [N] int64, pairs whose logits become -inf
    biased_rows, biased_ids, biases   [N] int64, int64 and fp32: pairs, each once, and what is added to their logits
    limited_rows              [P] int64, rows in which all logits but those of P lists of tokens become -inf
    allowed_places, allowed_ids   [N] int64, these tokens: which of the P rows, and which id
    allowed                [R, words] int32, bit i % 32 of word i // 32 is 0 for a token i whose logit becomes -inf
    max_top_k              host: the ranks that decide top-k and top-p; None where no sampled row has either
    is_greedy, is_filtered host: whether all rows are greedy; whether any sampled row has top-k, top-p or min-p
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    seeds: Tensor
    positions: Tensor
    max_top_k: int | None
    is_greedy: bool
    is_filtered: bool
    penalties: PenaltyTensors | None = None
    banned_rows: Tensor | None = None
    banned_ids: Tensor | None = None
    allowed: Tensor | None = None
    biased_rows: Tensor | None = None
    biased_ids: Tensor | None = None
    biases: Tensor | None = None
    limited_rows: Tensor | None = None
    allowed_places: Tensor | None = None
    allowed_ids: Tensor | None = None

    @property
    def is_edited(self) -> bool:
        """Return whether logits are changed before a token is chosen."""
        edits = (self.penalties, self.banned_rows, self.biased_rows, self.limited_rows, self.allowed)
        return any(edit is not None for edit in edits)


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The tokens of a batch, and where the logits gave no ground to choose them.

    token_ids     [R] int64, always a valid id
    is_finite     [R] bool, False where no logit that may be chosen is finite, or the model gave NaN or +inf
    is_exhausted  [R] bool, where the model's logits are finite and bans, allowed tokens and masks leave none of them;
                  None where logits are not edited. Not finite, and not the model's fault
    """

    token_ids: Tensor
    is_finite: Tensor
    is_exhausted: Tensor | None = None


def sampling_tensors(rows: Sequence[RowSampling], vocab_size: int, device: torch.device) -> SamplingTensors:
    """The device's form of a batch of rows, made on the host."""

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    sampled = [row for row in rows if row.temperature > 0]
    top_k = [vocab_size if row.top_k is None else min(row.top_k, vocab_size) for row in rows]
    ranked = [
        k for row, k in zip(rows, top_k, strict=True) if row.temperature > 0 and (k < vocab_size or row.top_p < 1)
    ]
    penalties = {index: row.penalties for index, row in enumerate(rows) if row.penalties is not None}
    bans = [(index, token) for index, row in enumerate(rows) for token in row.banned_ids]
    biases = [(index, token, bias) for index, row in enumerate(rows) for token, bias in row.bias]
    limited = [(index, row.allowed_ids) for index, row in enumerate(rows) if row.allowed_ids]
    allowed = [(place, token) for place, (_, ids) in enumerate(limited) for token in ids]
    reals = [
        [row.temperature for row in rows],
        [row.top_p for row in rows],
        [math.log(row.min_p) if row.min_p > 0 else -math.inf for row in rows],
    ]
    # One copy to the device for all reals and one for all integers: each of them may wait.
    temperature, top_p, log_min_p = torch.tensor(reals, dtype=torch.float32, device=device)[:, :, None]
    top_ks, seeds, positions = torch.tensor(
        [top_k, [row.seed for row in rows], [row.position for row in rows]], dtype=torch.int64, device=device
    )
    return SamplingTensors(
        temperature=temperature,
        top_k=top_ks[:, None],
        top_p=top_p,
        log_min_p=log_min_p,
        seeds=seeds,
        positions=positions,
        max_top_k=max(ranked, default=None),
        is_greedy=not sampled,
        is_filtered=bool(ranked) or any(row.min_p > 0 for row in sampled),
        penalties=penalty_tensors(penalties, device) if penalties else None,
        banned_rows=integers([row for row, _ in bans]) if bans else None,
        banned_ids=integers([token for _, token in bans]) if bans else None,
        biased_rows=integers([row for row, _, _ in biases]) if biases else None,
        biased_ids=integers([token for _, token, _ in biases]) if biases else None,
        biases=torch.tensor([it[2] for it in biases], dtype=torch.float32, device=device) if biases else None,
        limited_rows=integers([row for row, _ in limited]) if limited else None,
        allowed_places=integers([place for place, _ in allowed]) if limited else None,
        allowed_ids=integers([token for _, token in allowed]) if limited else None,
    )


@torch.inference_mode()
def greedy(logits: Tensor) -> SampleResult:
    """The likeliest token of each row of logits [R, V], the first of equals; any float dtype, last dim contiguous."""
    if runs_on_triton(logits):
        return SampleResult(*greedy_tokens(logits))
    if logits.device.type == "cpu" and logits.dtype is torch.float32:
        # numpy finds 8 of 4,096 in 2 us, torch in 30; a NaN is the largest for both (one core, AVX-512)
        token_ids = torch.from_numpy(logits.numpy().argmax(-1))
        best = logits.gather(1, token_ids[:, None])[:, 0]
    else:
        best, token_ids = logits.max(dim=-1)
    return SampleResult(token_ids, best.isfinite())


@torch.inference_mode()
def sample(logits: Tensor, tensors: SamplingTensors) -> SampleResult:
    """Choose a token for each row of logits [R, V] fp32, which serve as scratch memory.

    Order: biases, penalties, bans, allowed tokens and masks, temperature, top-k, top-p, min-p (as transformers orders
    them). A row's token depends on its own logits, seed and position only. A row that held NaN or +inf, or no finite
    number, before it was edited is not finite, and neither is one whose every finite number is banned: the latter is
    exhausted.
    """
    was_finite = _edit(logits, tensors)
    if tensors.is_greedy:
        return _both_finite(greedy(logits), was_finite)
    if not runs_on_triton(logits):
        return _both_finite(draw_torch(logits, tensors), was_finite)
    limits = RowLimits(
        tensors.temperature,
        tensors.top_k,
        tensors.top_p,
        tensors.log_min_p,
        tensors.seeds,
        tensors.positions,
        tensors.max_top_k is not None,
    )
    return _both_finite(SampleResult(*draw_tokens(logits, limits)), was_finite)


@torch.inference_mode()
def sample_torch(logits: Tensor, tensors: SamplingTensors) -> SampleResult:
    """The specification of `sample`. They may differ where two scores with noise are equal but for a rounding."""
    was_finite = _edit(logits, tensors)
    return _both_finite(draw_torch(logits, tensors), was_finite)


def _edit(logits: Tensor, tensors: SamplingTensors) -> Tensor | None:
    """Apply biases, penalties, bans, then masks, in place.

    Return which rows [R] the model gave as finite; None where nothing is edited.
    """
    if not tensors.is_edited:
        return None
    was_finite = logits.amax(dim=-1).isfinite()
    if tensors.biased_rows is not None and tensors.biased_ids is not None and tensors.biases is not None:
        logits.index_put_((tensors.biased_rows, tensors.biased_ids), tensors.biases, accumulate=True)
    if tensors.penalties is not None:
        apply_penalties(logits, tensors.penalties)
        logits.clamp_(max=torch.finfo(logits.dtype).max)  # a small repetition penalty can make a logit overflow
    if tensors.banned_rows is not None and tensors.banned_ids is not None:
        logits.index_put_((tensors.banned_rows, tensors.banned_ids), logits.new_full((), -math.inf))
    if tensors.limited_rows is not None and tensors.allowed_places is not None and tensors.allowed_ids is not None:
        rows, places, ids = tensors.limited_rows, tensors.allowed_places, tensors.allowed_ids
        kept = logits.new_full((rows.numel(), logits.shape[1]), -math.inf)
        kept.index_put_((places, ids), logits[rows[places], ids])
        logits.index_copy_(0, rows, kept)
    if tensors.allowed is not None:
        apply_mask(logits, tensors.allowed)
    return was_finite


def apply_mask(logits: Tensor, allowed: Tensor) -> None:
    """Set the logits [R, V] whose bits are 0 to -inf, in place; tokens behind the mask's end count as 0.

    allowed  [R, words] int32, little-endian as every machine here; takes two bytes of memory a logit
    """
    num_tokens = min(logits.shape[1], 32 * allowed.shape[1])
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_banned = (allowed.view(torch.uint8)[:, :, None] >> bits).bitwise_and_(1).logical_not_().view(torch.bool)
    logits[:, :num_tokens].masked_fill_(is_banned.view(len(allowed), -1)[:, :num_tokens], -math.inf)
    logits[:, num_tokens:].fill_(-math.inf)


def _both_finite(chosen: SampleResult, was_finite: Tensor | None) -> SampleResult:
    """`chosen`, not finite either where the row was not finite before it was edited, else exhausted where it is not."""
    if was_finite is None:
        return chosen
    return SampleResult(chosen.token_ids, chosen.is_finite & was_finite, was_finite & ~chosen.is_finite)


def draw_torch(logits: Tensor, tensors: SamplingTensors) -> SampleResult:
    """A token for each row of the logits as they are."""
    best, greedy_ids = logits.max(dim=-1, keepdim=True)
    is_finite = best.isfinite().squeeze(1)
    is_greedy = tensors.temperature == 0
    scores = logits.sub_(best).mul_(torch.where(is_greedy, 1.0, tensors.temperature).reciprocal_())
    if tensors.is_filtered:
        keep_likely(scores, tensors)
    scores += gumbel_noise(tensors.seeds, tensors.positions, logits.shape[1])
    sampled_ids = scores.argmax(dim=-1, keepdim=True)
    return SampleResult(torch.where(is_greedy, greedy_ids, sampled_ids).squeeze(1), is_finite)


def keep_likely(scores: Tensor, tensors: SamplingTensors) -> None:
    """Set the scores outside of top-k, top-p and min-p to -inf, in place.

    scores [R, V] fp32, logits over temperature less their maximum, so that the best one of a row is 0.
    Tokens are ranked by score. The first k ranks stay; of those the shortest prefix whose probability (among the k)
    reaches p. Tokens that tie with the last one of the prefix stay too: no rule chooses among equal tokens.
    """
    threshold = tensors.log_min_p
    if tensors.max_top_k is not None:
        threshold = torch.maximum(threshold, _rank_threshold(scores, tensors, tensors.max_top_k))
    scores.masked_fill_(scores < threshold, -math.inf)


def _rank_threshold(scores: Tensor, tensors: SamplingTensors, max_top_k: int) -> Tensor:
    """The lowest score [R, 1] that top-k and top-p keep."""
    if max_top_k < scores.shape[1]:
        ranked = scores.topk(max_top_k, dim=-1).values
    else:
        ranked = scores.sort(dim=-1, descending=True).values
    is_top_k = torch.arange(max_top_k, device=scores.device) < tensors.top_k
    # fp64: the sum of 128k weights must not depend on the order in which a batch of this size is scanned
    weights = ranked.double().exp_().mul_(is_top_k)
    reached = weights.cumsum(dim=-1)
    needed = reached[:, -1:] * tensors.top_p
    is_kept = is_top_k & ((reached - weights < needed) | (tensors.top_p >= 1))
    last = is_kept.sum(dim=-1, keepdim=True).clamp_(min=1) - 1  # a row of NaN keeps nothing, and has no rank -1
    # A row with more than the ranks looked at has neither limit (else max_top_k would cover it): it keeps everything.
    return ranked.gather(1, last).masked_fill_(tensors.top_k > max_top_k, -math.inf)
