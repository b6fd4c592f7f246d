"""Times of a whole model's forward passes, beside the evidence of the kernels alone.

A kernel that is twice as fast makes a model faster by attention's share of its time only. These rows say what that
share is, and what the whole model gains over the fallback, for prefill and for decode apart.
"""

from dataclasses import dataclass
from enum import Enum

from kernels.vocabulary.shape import Phase


class Attention(Enum):
    """The attention that ran in the model."""

    PLAN = "plan"  # what the matrix chooses
    FALLBACK = "fallback"  # the fastest path of the fallback tier that can compute the shape


@dataclass(frozen=True, slots=True)
class ModelTiming:
    """One forward pass of the whole model, sampling included."""

    phase: Phase
    tokens: int  # of the prompt in prefill, of every sequence's context in decode
    sequences: int
    attention: Attention
    paths: tuple[str, ...]
    p50_ms: float
    spread: float  # half the 95% confidence interval of the median, as a share of it
    n: int
    attention_ms: float | None  # the part of p50_ms that attention kernels take, as the profiler saw it


@dataclass(frozen=True, slots=True)
class FullModel:
    """All timings of one model on the machine of the file that holds them."""

    name: str
    at: str  # ISO 8601, UTC
    layers: int
    timings: tuple[ModelTiming, ...]
    command: str | None = None
    commit: str | None = None

    def fallback_ms(self, timing: ModelTiming) -> float | None:
        """Return the time of the same forward pass by the fallback; None where that was not timed."""
        wanted = (timing.phase, timing.tokens, timing.sequences, Attention.FALLBACK)
        return next(
            (it.p50_ms for it in self.timings if (it.phase, it.tokens, it.sequences, it.attention) == wanted), None
        )
