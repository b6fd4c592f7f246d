"""Penalties on tokens that a sequence already holds. Only rows that use one pay for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fused.backend import jit, runs_on_triton, tl

_BLOCK = 4096
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

    rows              [P] int64, rows of the logits
    repetition, presence, frequency   [P, 1] fp32
    prompt_rows, prompt_ids   [N] int64: which of the P rows, and which token
    output_rows, output_ids   the same for generated tokens
    """

    rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    prompt_rows: Tensor
    prompt_ids: Tensor
    output_rows: Tensor
    output_ids: Tensor


def penalty_tensors(penalties: dict[int, RowPenalties], device: torch.device) -> PenaltyTensors:
    """Row of the logits -> its penalties, as tensors."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    def history(parts: list[Sequence[int]]) -> tuple[Tensor, Tensor]:
        rows = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
        ids = torch.tensor([token for part in parts for token in part], dtype=torch.int64)
        return rows.to(device), ids.to(device)

    values = list(penalties.values())
    prompt_rows, prompt_ids = history([row.prompt_ids for row in values])
    output_rows, output_ids = history([row.output_ids for row in values])
    return PenaltyTensors(
        rows=torch.tensor(list(penalties), dtype=torch.int64, device=device),
        repetition=column([row.repetition for row in values]),
        presence=column([row.presence for row in values]),
        frequency=column([row.frequency for row in values]),
        prompt_rows=prompt_rows,
        prompt_ids=prompt_ids,
        output_rows=output_rows,
        output_ids=output_ids,
    )


def apply_penalties(logits: Tensor, penalties: PenaltyTensors) -> None:
    """Penalise logits [R, V] fp32 in place.

    Repetition as in transformers' RepetitionPenaltyLogitsProcessor (Keskar et al. 2019), then presence and frequency
    as in OpenAI's API reference.
    """
    marks = _marks(logits, penalties)
    if not runs_on_triton(logits):
        apply_marks_torch(logits, penalties, marks)
        return
    num_rows, vocab = marks.shape
    _apply_marks_kernel[(num_rows, -(-vocab // _BLOCK))](
        logits, marks, penalties.rows, penalties.repetition, penalties.presence, penalties.frequency,
        logits.stride(0), vocab, _IN_PROMPT, _BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def apply_marks_torch(logits: Tensor, penalties: PenaltyTensors, marks: Tensor) -> None:
    penalised = logits.index_select(0, penalties.rows)
    output_counts = marks & (_IN_PROMPT - 1)
    repeated = torch.where(penalised > 0, penalised / penalties.repetition, penalised * penalties.repetition)
    penalised = torch.where(marks != 0, repeated, penalised)
    penalised -= penalties.frequency * output_counts
    penalised -= penalties.presence * (output_counts > 0)
    logits.index_copy_(0, penalties.rows, penalised)


def _marks(logits: Tensor, penalties: PenaltyTensors) -> Tensor:
    """[P, V] int32: _IN_PROMPT for tokens of a row's prompt, plus how often each is in its output."""
    vocab = logits.shape[1]
    marks = logits.new_zeros(penalties.rows.numel(), vocab, dtype=torch.int32)
    flat = marks.view(-1)
    flat.scatter_(0, penalties.prompt_rows * vocab + penalties.prompt_ids, _IN_PROMPT)
    ones = torch.ones((), dtype=torch.int32, device=logits.device).expand(penalties.output_ids.shape)
    flat.scatter_add_(0, penalties.output_rows * vocab + penalties.output_ids, ones)
    return marks


# The alignment of these changes with the batch; a kernel for each would compile after ready.
@jit(do_not_specialize_on_alignment=["rows_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr"])
def _apply_marks_kernel(
    logits_ptr, marks_ptr, rows_ptr, repetition_ptr, presence_ptr, frequency_ptr, stride_row, vocab,
    IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a penalised row and block of tokens. Only the logits of marked tokens are read and written."""
    penalised = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    marks = tl.load(marks_ptr + penalised.to(tl.int64) * vocab + cols, mask=cols < vocab, other=0)
    if tl.max(marks, axis=0) > 0:  # few blocks hold a token of the history
        at = logits_ptr + tl.load(rows_ptr + penalised).to(tl.int64) * stride_row + cols
        logits = tl.load(at, mask=marks != 0, other=0.0)
        repetition = tl.load(repetition_ptr + penalised)
        count = (marks & (IN_PROMPT - 1)).to(tl.float32)
        logits = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
        logits -= tl.load(frequency_ptr + penalised) * count
        logits -= tl.where(count > 0, tl.load(presence_ptr + penalised), 0.0)
        tl.store(at, logits, mask=marks != 0)
