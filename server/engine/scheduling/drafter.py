"""The interface between the engine and what drafts tokens: guesses that one step verifies, several of a sequence."""

from collections.abc import Callable
from dataclasses import dataclass, field

from server.engine.scheduling.sequence import Sequence
from server.protocol.messages import DraftCounts

# Gives the tokens that may come next in a sequence, at most so many, all of the vocabulary; none where it has no guess.
# Called on the stepping thread for each decoding sequence and step, when all tokens of the sequence are known.
Drafter = Callable[[Sequence, int], list[int]]


@dataclass(slots=True)
class DraftTally:
    """Counts of drafted tokens by their place in a draft, since they were taken."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count a draft that was verified; its first `num_accepted` tokens hold."""
        for places, count in ((self.drafted, num_drafted), (self.accepted, num_accepted)):
            places.extend([0] * (num_drafted - len(places)))
            for place in range(count):
                places[place] += 1

    def take(self) -> DraftCounts | None:
        """Return and forget the counts; None where nothing was drafted."""
        if not self.drafted:
            return None
        found = DraftCounts(self.drafted, self.accepted)
        self.drafted, self.accepted = [], []
        return found
