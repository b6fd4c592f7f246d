"""Ranks of a qualification beside rank 0: their processes, and the calls that they make with it."""
