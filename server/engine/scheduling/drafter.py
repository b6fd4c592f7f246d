"""The interface between the engine and what drafts tokens: guesses that one step verifies, several of a sequence."""

from collections.abc import Callable

from server.engine.scheduling.sequence import Sequence

# Gives the tokens that may come next in a sequence, at most so many, all of the vocabulary; none where it has no guess.
# Called on the stepping thread for each decoding sequence and step, when all tokens of the sequence are known.
Drafter = Callable[[Sequence, int], list[int]]
