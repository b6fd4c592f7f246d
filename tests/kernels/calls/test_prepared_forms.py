"""The range of bounds that one choice of launches is good for."""

import pytest

from kernels.calls.prepared import steady_range


def bracket(bound: int) -> int:
    return (bound > 10) + (bound > 500)


@pytest.mark.parametrize(
    ("at", "expected"), [(0, (0, 10)), (10, (0, 10)), (11, (11, 500)), (499, (11, 500)), (501, (501, 900))]
)
def test_the_range_ends_where_the_choice_changes(at: int, expected: tuple[int, int]) -> None:
    assert steady_range(at, 900, bracket) == expected


def test_a_choice_that_never_changes_has_the_whole_range() -> None:
    assert steady_range(7, 900, lambda _: None) == (0, 900)
