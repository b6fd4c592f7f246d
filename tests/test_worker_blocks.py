"""Long tests are far from each other."""

from support.worker_blocks import spread


def test_long_tests_stand_at_equal_distances() -> None:
    assert spread(list(range(9)), [6, 7, 8]) == [6, 0, 1, 7, 2, 3, 8, 4, 5]


def test_without_long_tests_the_order_stays() -> None:
    assert spread([3, 1, 2], []) == [3, 1, 2]
