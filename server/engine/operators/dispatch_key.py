"""Lengths of a batch as small numbers that a dictionary finds fast."""

from bisect import bisect_left

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import AttentionShape, Mask, Phase

# Window, which buckets the longest query and the longest context are in, and the mask. Numbers, for an Enum hashes its
# name in Python: a decision took 2.8 us with three of them, and takes 0.5 us without (one busy core, Python 3.11).
LengthKey = tuple[int | None, int, int, int]

_MASKS = {mask: index for index, mask in enumerate(Mask)}
CAUSAL = _MASKS[Mask.CAUSAL]  # the mask of every step today
_EDGES = tuple(bucket.hi for bucket in Bucket if bucket.hi is not None)


def bucket_index(num_tokens: int) -> int:
    """Return the bucket of a length, counted from 0."""
    return bisect_left(_EDGES, num_tokens)


def key_of_shape(shape: AttentionShape) -> LengthKey:
    """The key under which `bucket_index` finds the shape among those of its phase."""
    order = list(Bucket)
    queries = 0 if shape.phase is Phase.DECODE else order.index(shape.query_bucket)
    return (shape.window, queries, order.index(shape.context_bucket), _MASKS[shape.mask])
