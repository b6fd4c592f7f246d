"""Positions of three parts: of a prompt's tokens, and of those that are generated behind them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from server.protocol.messages import EmbeddedSpan

Positions = NDArray[np.int32]  # [3, tokens]


def positions_of(spans: Sequence[EmbeddedSpan], num_tokens: int) -> tuple[Positions, int]:
    """Return the positions of a prompt's tokens, and how much those of generated ones differ from their places.

    spans  in order, apart and within the prompt, each with as many offsets as it needs, or none
    """
    found = np.empty((3, num_tokens), np.int32)
    start = position = 0
    for span in spans:
        found[:, start : span.start] = np.arange(position, position + span.start - start)
        position += span.start - start
        found[:, span.start : span.stop] = offsets_of(span) + position
        position += span.num_tokens if span.num_positions is None else span.num_positions
        start = span.stop
    found[:, start:] = np.arange(position, position + num_tokens - start)
    return found, position - start


def offsets_of(span: EmbeddedSpan) -> Positions:
    """Return the positions of a span's tokens, counted from that of its start."""
    if not span.offsets:
        return np.broadcast_to(np.arange(span.num_tokens, dtype=np.int32), (3, span.num_tokens))
    return np.frombuffer(span.offsets, "<i4").reshape(3, span.num_tokens)
