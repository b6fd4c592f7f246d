"""A stop string is found wherever the pieces of the text end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.stop import StopMatcher

LETTERS = st.text("ab", max_size=20)


def feed(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join([matcher.push(piece) for piece in pieces])
    return shown + matcher.finish(), matcher.matched


@given(st.text("ab", min_size=1, max_size=4), st.lists(LETTERS, max_size=12))
def test_the_text_ends_where_find_says(stop: str, pieces: list[str]) -> None:
    whole = "".join(pieces)
    shown, matched = feed((stop,), pieces)
    at = whole.find(stop)
    assert (shown, matched) == ((whole, None) if at < 0 else (whole[:at], stop))


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(LETTERS, max_size=12))
def test_several_stops_do_not_depend_on_how_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    assert feed(tuple(stops), pieces) == feed(tuple(stops), list("".join(pieces)))


def test_a_possible_beginning_is_held_back_until_it_is_known() -> None:
    matcher = StopMatcher(("END",))
    assert [matcher.push(piece) for piece in ("x E", "N", "X", "EN", "D tail", "more")] == ["x ", "", "ENX", "", "", ""]
    assert matcher.matched == "END"


def test_of_two_stops_that_end_together_the_longer_wins() -> None:
    assert feed(("b", "ab"), ["xab"]) == ("x", "ab")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        StopMatcher(("",))
