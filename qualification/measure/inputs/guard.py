"""Rows around a tensor that show what is read or written beside it."""

import torch
from torch import Tensor

GUARD_ROWS = 64  # rows of NaN (of the mark, around the output) on either side
GUARD_MARK = 1234.0  # exact in every dtype


def guarded(rows: int, like: Tensor, fill: float, guard: float) -> tuple[Tensor, Tensor]:
    """([GUARD_ROWS + rows + GUARD_ROWS, ...] with `guard` around, its view of `rows` rows filled with `fill`)."""
    storage = torch.full((rows + 2 * GUARD_ROWS, *like.shape[1:]), guard, dtype=like.dtype, device=like.device)
    view = storage[GUARD_ROWS : GUARD_ROWS + rows]
    view.fill_(fill)
    return storage, view
