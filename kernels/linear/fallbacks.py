"""Why products of many rows are not multiplied by the algorithms that are fastest here, and how often."""

import logging
from collections import Counter
from enum import Enum

logger = logging.getLogger(__name__)


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


class MatmulFallbacks:
    """Fallbacks of matrix products that no counter has reported yet."""

    def __init__(self) -> None:
        self._counts: Counter[MatmulFallback] = Counter()

    def note(self, reason: MatmulFallback, what: str, detail: object) -> None:
        """`what` PyTorch multiplies, and what is known of the cause."""
        logger.warning("%s: multiplied by PyTorch's algorithms (%s): %s", what, reason.value, detail)
        self._counts[reason] += 1

    def take(self) -> dict[MatmulFallback, int]:
        """Return and forget the fallbacks noted since the last call."""
        if not self._counts:
            return {}
        counts, self._counts = dict(self._counts), Counter()
        return counts
