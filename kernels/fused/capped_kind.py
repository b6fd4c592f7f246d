"""Step 3.5's activation with a bound, as data: torch-free, so that a model's configuration can hold it.

It is apart from `activation_kind.py`, which every kernel with an activation reads: those compute what they computed.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CappedSilu:
    """min(silu(gate), limit) * up, of up within +-limit. Source: Step 3.5's published modeling file (swiglu_limits)."""

    limit: float
