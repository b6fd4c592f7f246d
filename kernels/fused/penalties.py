"""Penalties on tokens that a sequence already holds. Only rows that use one pay for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    penalised = logits.index_select(0, penalties.rows)
    output_counts = _counts(penalised, penalties.output_rows, penalties.output_ids)
    is_seen = _counts(penalised, penalties.prompt_rows, penalties.prompt_ids).add_(output_counts) > 0
    repeated = torch.where(penalised > 0, penalised / penalties.repetition, penalised * penalties.repetition)
    penalised = torch.where(is_seen, repeated, penalised)
    penalised -= penalties.frequency * output_counts
    penalised -= penalties.presence * (output_counts > 0)
    logits.index_copy_(0, penalties.rows, penalised)


def _counts(like: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """How often each token is in each row's history: [P, V] fp32, exact (and so in any order) below 2^24."""
    num_tokens = like.shape[1]
    counts = torch.zeros_like(like).view(-1)
    ones = torch.ones((), dtype=like.dtype, device=like.device).expand(ids.shape)
    return counts.scatter_add_(0, rows * num_tokens + ids, ones).view_as(like)
