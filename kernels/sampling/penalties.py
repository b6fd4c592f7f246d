"""Penalties on tokens that a sequence already holds. Only rows that use one pay for it, and only for those tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from kernels.fused.backend import jit, runs_on_triton, tl

_BLOCK = 512  # tokens of the histories a program
_IN_PROMPT = 1 << 30  # of a token's mark; the bits below count it in the output


@dataclass(frozen=True, slots=True)
class RowPenalties:
    """The penalties of one row and the tokens they count."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    repetition: float = 1.0  # over prompt and output: a seen token's logit is divided by it (times it, if negative)
    presence: float = 0.0  # over the output: subtracted once from every token in it
    frequency: float = 0.0  # over the output: subtracted once for each time a token is in it


@dataclass(frozen=True, slots=True)
class PenaltyTensors:
    """The penalised rows of a batch and their histories, on the device. P rows, N tokens of history.

    rows        [P] int64, rows of the logits
    repetition, presence, frequency   [P, 1] fp32
    places      [N] int64: which of the P rows, the tokens of all prompts first
    token_ids   [N] int64
    num_prompt  host: how many of the N are of prompts
    """

    rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    places: Tensor
    token_ids: Tensor
    num_prompt: int


def penalty_tensors(penalties: dict[int, RowPenalties], device: torch.device) -> PenaltyTensors:
    """Row of the logits -> its penalties, as tensors."""
    values = list(penalties.values())
    reals = [[row.repetition for row in values], [row.presence for row in values], [row.frequency for row in values]]
    repetition, presence, frequency = torch.tensor(reals, dtype=torch.float32, device=device)[:, :, None]
    parts = [row.prompt_ids for row in values] + [row.output_ids for row in values]
    lengths = [len(part) for part in parts]
    # 100,000 tokens: 2 ms, as a list of them 14 (one core, Python 3.11)
    ids = np.fromiter(chain.from_iterable(parts), np.int64, sum(lengths))
    places = np.repeat(np.arange(len(parts)) % len(values), lengths)
    places, token_ids = torch.from_numpy(np.stack([places, ids])).to(device)
    return PenaltyTensors(
        rows=torch.tensor(list(penalties), dtype=torch.int64, device=device),
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        places=places,
        token_ids=token_ids,
        num_prompt=sum(lengths[: len(values)]),
    )


def apply_penalties(logits: Tensor, penalties: PenaltyTensors) -> None:
    """Penalise logits [R, V] fp32 in place.

    Repetition as in transformers' RepetitionPenaltyLogitsProcessor (Keskar et al. 2019), then presence and frequency
    as in OpenAI's API reference.
    """
    if not runs_on_triton(logits):
        apply_penalties_torch(logits, penalties)
        return
    num_tokens, vocab = penalties.token_ids.numel(), logits.shape[1]
    if num_tokens == 0:
        return
    # Of these marks only those of tokens in a history are ever written or read: to clear them all took longer than all
    # the rest (65 MB for 128 rows of 128k).
    marks = logits.new_empty(penalties.rows.numel(), vocab, dtype=torch.int32)
    grid = (-(-num_tokens // _BLOCK),)
    history = (penalties.places, penalties.token_ids, num_tokens)
    clear_kernel[grid](marks, *history, vocab, _BLOCK)
    mark_kernel[grid](marks, *history, penalties.num_prompt, vocab, _IN_PROMPT, _BLOCK)
    penalise_kernel[grid](
        logits, marks, penalties.rows, penalties.repetition, penalties.presence, penalties.frequency, *history,
        logits.stride(0), vocab, _IN_PROMPT, _BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


def apply_penalties_torch(logits: Tensor, penalties: PenaltyTensors) -> None:
    """The specification of `apply_penalties`."""
    vocab, num_prompt = logits.shape[1], penalties.num_prompt
    marks = logits.new_zeros(penalties.rows.numel(), vocab, dtype=torch.int32)
    at = penalties.places * vocab + penalties.token_ids
    marks.view(-1).scatter_(0, at[:num_prompt], _IN_PROMPT)
    marks.view(-1).scatter_add_(0, at[num_prompt:], marks.new_ones(()).expand(at[num_prompt:].shape))
    penalised = logits.index_select(0, penalties.rows)
    output_counts = marks & (_IN_PROMPT - 1)
    repeated = torch.where(penalised > 0, penalised / penalties.repetition, penalised * penalties.repetition)
    penalised = torch.where(marks != 0, repeated, penalised)
    penalised -= penalties.frequency * output_counts
    penalised -= penalties.presence * (output_counts > 0)
    logits.index_copy_(0, penalties.rows, penalised)


# The alignment of these and the number of tokens change with the batch; a kernel for each would compile after ready.
_HISTORY = ["places_ptr", "token_ids_ptr"]
_ROWS = ["rows_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr"]


@jit
def _tokens_of(places_ptr, token_ids_ptr, num_tokens, vocab, BLOCK: tl.constexpr):
    """The program's tokens of all histories: their numbers, which are in range, their rows, ids, and marks' offsets."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = index < num_tokens
    place = tl.load(places_ptr + index, mask=is_in, other=0)
    token_id = tl.load(token_ids_ptr + index, mask=is_in, other=0)
    return index, is_in, place, token_id, place * vocab + token_id


@jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=_HISTORY)
def clear_kernel(marks_ptr, places_ptr, token_ids_ptr, num_tokens, vocab, BLOCK: tl.constexpr):
    _, is_in, _, _, at = _tokens_of(places_ptr, token_ids_ptr, num_tokens, vocab, BLOCK)
    tl.store(marks_ptr + at, 0, mask=is_in)


@jit(do_not_specialize=["num_tokens", "num_prompt"], do_not_specialize_on_alignment=_HISTORY)
def mark_kernel(
    marks_ptr, places_ptr, token_ids_ptr, num_tokens, num_prompt, vocab, IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    index, is_in, _, _, at = _tokens_of(places_ptr, token_ids_ptr, num_tokens, vocab, BLOCK)
    tl.atomic_or(marks_ptr + at, IN_PROMPT, mask=is_in & (index < num_prompt), sem="relaxed")
    tl.atomic_add(marks_ptr + at, 1, mask=is_in & (index >= num_prompt), sem="relaxed")


@jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=[*_ROWS, *_HISTORY])
def penalise_kernel(
    logits_ptr, marks_ptr, rows_ptr, repetition_ptr, presence_ptr, frequency_ptr, places_ptr, token_ids_ptr,
    num_tokens, stride_row, vocab, IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Penalise each token of a history once: the first program that takes the mark of a token does it."""
    _, is_in, place, token_id, at = _tokens_of(places_ptr, token_ids_ptr, num_tokens, vocab, BLOCK)
    marks = tl.atomic_xchg(marks_ptr + at, tl.zeros([BLOCK], tl.int32), mask=is_in, sem="relaxed")
    is_mine = is_in & (marks != 0)
    at = logits_ptr + tl.load(rows_ptr + place, mask=is_mine, other=0) * stride_row + token_id
    logits = tl.load(at, mask=is_mine, other=0.0)
    repetition = tl.load(repetition_ptr + place, mask=is_mine, other=1.0)
    count = (marks & (IN_PROMPT - 1)).to(tl.float32)
    logits = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    logits -= tl.load(frequency_ptr + place, mask=is_mine, other=0.0) * count
    logits -= tl.where(count > 0, tl.load(presence_ptr + place, mask=is_mine, other=0.0), 0.0)
    tl.store(at, logits, mask=is_mine)
