"""The time left, of work that is done piece by piece."""

from qualification.common.progress import TimeLeft


def test_time_left_follows_the_pieces_done_and_not_what_precedes_them() -> None:
    times = iter([0.0, 30.0, 30.0, 40.0, 50.0, 60.0])
    left = TimeLeft(lambda: next(times))
    said = [left(done, 4) for done in (0, 1, 2, 4)]  # 30 s are of what comes before the first
    assert said == ["estimating", "about 30 s left", "about 20 s left", "about 0 s left"]
