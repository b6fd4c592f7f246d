"""Types of flags that several commands share. Raise ArgumentTypeError, whose words argparse prints."""

import argparse
import math


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def positive(text: str) -> float:
    """Neither zero nor NaN nor infinite: nothing would ever be sent, or be too late."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value
