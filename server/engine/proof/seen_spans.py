"""Spans of images: those that the places in a prompt give, and whether a step has told paths others.

A wrong array is the fault of the server that has written it, and of no kernel that reads it.
"""

import torch
from torch import Tensor

Places = tuple[tuple[int, int], ...]  # [start, stop) of a prompt's images


def seen_of(images: Places, first: int, num_rows: int, window: int | None) -> Tensor:
    """Return the positions [lo, hi) that each row sees of its own image, [rows, 2] int32; 0, 0 where it is in none.

    first  position of the first row in its sequence
    Made of the prompt, and not of the step's arrays, which a wrong writer would have wrong too.
    """
    found = torch.zeros(num_rows, 2, dtype=torch.int32)
    for start, stop in images:
        places = torch.arange(max(start, first), max(start, first, min(stop, first + num_rows)))
        found[places - first, 0] = start if window is None else (places - window + 1).clamp(min=start).int()
        found[places - first, 1] = stop
    return found


def why_other_spans(step: Tensor | None, images: Places, first: int, num_rows: int, window: int | None) -> str | None:
    """Return which token a step's array lets see something else than its prompt does; None where there is none.

    step    [rows, 2] int32, as in AttentionFlags; None: no token sees one behind it
    window  of the layer: what a token sees before it in any case may be in its span, or not
    Waits for the device.
    """
    given = torch.zeros(num_rows, 2, dtype=torch.int32) if step is None else step.cpu()
    own = seen_of(images, first, num_rows, window)
    positions = torch.arange(first, first + num_rows)
    differs = (_all_seen(given, positions, window) != _all_seen(own, positions, window)).any(dim=1)
    if not differs.any():
        return None
    row = int(differs.int().argmax())
    (lo, hi), (own_lo, own_hi) = given[row].tolist(), own[row].tolist()
    return (
        f"the token at position {first + row} has the span [{lo}, {hi}) in the step, and [{own_lo}, {own_hi}) by its "
        "prompt's images"
    )


def _all_seen(spans: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Return [rows, 3]: first and last position, exclusive, that each row sees, and where its span begins beyond it."""
    lo, hi = spans.long().unbind(1)
    before = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
    has_span, behind = hi > lo, positions + 1
    first = torch.where(has_span, torch.minimum(lo, before), before)
    last = torch.where(has_span, torch.maximum(hi, behind), behind)
    return torch.stack((first, last, torch.where(has_span & (lo > behind), lo, 0)), dim=1)
