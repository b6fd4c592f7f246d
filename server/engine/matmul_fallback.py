"""Why products of many rows are not multiplied by the algorithms that are fastest here."""

from enum import Enum


class MatmulFallback(Enum):
    """Why PyTorch's algorithms multiply instead. Closed: the values are metric labels."""

    LIBRARY_MISSING = "library_missing"  # there is no cuBLASLt to load
    LIBRARY_REFUSED = "library_refused"  # it did not start, or did not launch what it had proposed
    OUT_OF_MEMORY = "out_of_memory"  # beside the weights there was no room to measure
    MEASURE_FAILED = "measure_failed"  # for any other reason, which the log has
