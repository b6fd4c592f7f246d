"""Drafts by look-up: what followed the newest tokens of a sequence where they stood before."""

import random

import pytest

from server.engine.scheduling.ngram_drafter import NgramDrafter
from server.engine.scheduling.sequence import Sequence
from server.protocol.messages import SamplingParams


def sequence(tokens: list[int], name: str = "a") -> Sequence:
    return Sequence(name, tokens, len(tokens), SamplingParams(max_tokens=9), seed=0, submitted_at=0.0)


def plainly(tokens: list[int], most: int, least: int, longest: int) -> list[int]:
    """Look for each length, the longest first, from the newest place on."""
    for length in range(longest, least - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:] and len(tokens) > length:
                found = list(tokens)
                for at in range(place, place + most):
                    found.append(found[at])
                return found[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "drafted"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the newest of two alike
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1]),  # the longest match, though it is older
        ([5, 5, 5], [5, 5, 5]),
        ([1, 2, 1, 2], [1, 2, 1]),
        ([1, 2, 3], []),
        ([1, 2], []),
        ([1], []),
    ],
)
def test_what_followed_the_newest_tokens_is_drafted(tokens: list[int], drafted: list[int]) -> None:
    assert NgramDrafter(least=2, longest=3, most_sequences=4)(sequence(tokens), 3) == drafted


def test_an_index_that_grows_finds_what_a_plain_search_does() -> None:
    """Several sequences in turn, more than there is room for, with tokens appended one by one and several at once."""
    rng, drafter = random.Random(3), NgramDrafter(least=2, longest=4, most_sequences=2)
    sequences = [sequence([rng.randrange(4) for _ in range(rng.randrange(1, 9))], str(index)) for index in range(3)]
    num_found = 0
    for _ in range(300):
        seq, most = rng.choice(sequences), rng.randrange(1, 5)
        seq.tokens += [rng.randrange(4) for _ in range(rng.randrange(3))]
        if len(seq.tokens) > 24:  # few places, or the search looks at the newest of them only
            del seq.tokens[:]
            seq.tokens += [rng.randrange(4) for _ in range(3)]
            seq.request_id += "'"
        found = drafter(seq, most)
        assert found == plainly(seq.tokens, most, 2, 4)
        num_found += bool(found)
    assert num_found > 100
