"""Why products of many rows are not multiplied by the algorithms that are fastest here, and how often."""

import logging
from collections import Counter

from kernels.linear.library.fallback_reason import MatmulFallback

logger = logging.getLogger(__name__)


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
