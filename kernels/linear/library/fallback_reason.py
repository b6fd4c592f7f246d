"""Reasons for which products of many rows are left to PyTorch's algorithms."""

from enum import Enum


class MatmulFallback(Enum):
    """Why PyTorch's algorithms multiply instead. Closed: the values are metric labels."""

    # All products, once a start.
    LIBRARY_MISSING = "library_missing"  # there is no cuBLASLt to load
    LIBRARY_REFUSED = "library_refused"  # it did not start, or did not launch what it had proposed
    OUT_OF_MEMORY = "out_of_memory"  # beside the weights there was no room to measure
    MEASURE_FAILED = "measure_failed"  # for any other reason, which the log has
    # Those of one shape of weights and one number of rows, once each.
    DISAGREES = "disagrees"  # what is faster computes something else
    ROWS_REFUSED = "rows_refused"  # the library has no algorithm for so many, or the chosen one does not take them
    UNSUITABLE_INPUT = "unsuitable_input"  # of another dtype, with gaps, or not aligned
    LAUNCH_FAILED = "launch_failed"  # in service: the library refused what it had accepted
