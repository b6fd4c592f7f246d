"""Tokens of an answer beside the choice and the logits at their places, computed alone: what a replay compares."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from server.engine.scheduling.scheduler import Borrowed
from server.protocol.served_answer import ServedAnswer

OWNER = "replay"  # of the pages; no request has such an id


@dataclass(frozen=True, slots=True)
class ForcedRow:
    """One token of an answer beside what is chosen and computed at its place, alone.

    logprob      of the token
    served       its log probability as it was served; None where it was not recorded
    limit        how far they may be apart; 0: not at all
    is_choosable whether the token is chosen there, or would be with a logit higher by twice the limit, or may be by the
                 definition of sampling with logits off by the limit
    is_defined   whether token and log probability may be those of the definition of sampling; None: it was not asked
    """

    logprob: float
    served: float | None
    limit: float
    is_choosable: bool
    is_defined: bool | None = None

    @property
    def factor(self) -> float:
        """Return how far the log probabilities are apart as a share of the limit."""
        if self.served is None or np.float32(self.logprob) == np.float32(self.served):
            return 0.0
        apart = abs(self.logprob - self.served)
        return apart / self.limit if self.limit and math.isfinite(apart) else math.inf

    @property
    def is_near(self) -> bool:
        return self.factor <= 1


class Forced(Protocol):
    """Computes answers again; see server/engine/execution/forced_answers.py.

    is_exact    whether bits must be equal
    most_apart  the share of an answer's tokens whose log probabilities may be beyond the limits all the same
    """

    @property
    def is_exact(self) -> bool: ...
    @property
    def most_apart(self) -> float: ...
    def rows(
        self, answer: ServedAnswer, borrowed: Borrowed, *, more: float = 0.0, divisor: int = 1
    ) -> Iterator[list[ForcedRow]]: ...
