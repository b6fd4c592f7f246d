"""Does cost grow smoothly? A curve through times over a size, and the cells that lie off it. Imports no torch."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

CLIFF = 1.5  # times the curve
_POWERS = (0, 1, 2, 4)  # of the size, in the square of the cost


def slope(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return the slope of log y on log x, by least squares; None from fewer than two sizes."""
    if len(xs) < 2:
        return None
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def curve(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """The smooth cost sqrt(a + b x + c x^2 + d x^4), none of them negative, that fits positive `ys` best, at each x.

    That is a fixed cost, one of the root (a machine that fills), one in proportion and one of the square, joined as
    gently as the corners of rooflines are.
    Least squares of the squares' relative errors: a cell far above the curve pulls by no more than its own weight.
    """
    squares = np.square(np.asarray(ys, dtype=np.float64))
    columns = np.stack([np.power(np.asarray(xs, dtype=np.float64), power) for power in _POWERS], axis=1)
    relative = columns / squares[:, None]
    best, least = np.full(len(xs), np.sqrt(squares.mean())), math.inf
    for size in range(1, len(_POWERS) + 1):
        for chosen in combinations(range(len(_POWERS)), min(size, len(xs))):
            found = np.linalg.lstsq(relative[:, chosen], np.ones(len(xs)), rcond=None)[0]
            error = float(np.square(relative[:, chosen] @ found - 1).sum())
            if (found >= 0).all() and error < least:
                best, least = np.sqrt(columns[:, chosen] @ found), error
    return [float(value) for value in best]


def off_curve(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """Return each y over the curve through all of them: above CLIFF is a cliff. 1 where too few cells make a curve."""
    if len(xs) <= len(_POWERS):
        return [1.0] * len(xs)
    return [y / fitted for y, fitted in zip(ys, curve(xs, ys), strict=True)]
