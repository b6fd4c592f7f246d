"""The inputs of attention to keys that an indexer chooses, besides those of all attention.

Behind its `RunAttention` keys, a row of k holds the indexer's key of the same token, so that pages hold both.
"""

from dataclasses import dataclass, field, replace

from torch import Tensor

from kernels.calls.batch import AttentionFlags


@dataclass(frozen=True, slots=True)
class Index:
    """The indexer's inputs that choose the keys of each query, or the keys that an earlier layer has chosen.

    The score of key j for query t is the sum over heads h of weights[t, h] * max(0, queries[t, h] . key j). A query
    attends to the `chosen.shape[1]` keys of the highest scores among those at its own position and before, to all of
    them where there are no more; of keys with equal scores the earlier ones are chosen.

    chosen   [T, count] int32: positions in the sequence, ascending, -1 behind the last. Written where `queries` are
             given, else read
    queries  [T, heads, dim] in the dtype of the keys, last dim contiguous; None: the choice is an earlier layer's
    weights  [T, heads] fp32, contiguous; None likewise
    """

    chosen: Tensor
    queries: Tensor | None = None
    weights: Tensor | None = None

    @property
    def count(self) -> int:
        """Return the most keys that a query attends to."""
        return self.chosen.shape[1]

    def rows(self, rows: slice) -> "Index":
        """Return the same of some rows, as views."""
        queries, weights = (None if it is None else it[rows] for it in (self.queries, self.weights))
        return Index(self.chosen[rows], queries, weights)

    def as_given(self) -> "Index":
        """Return the choice without what made it."""
        return replace(self, queries=None, weights=None)


@dataclass(frozen=True, slots=True)
class IndexedFlags(AttentionFlags):
    """The flags of a layer whose queries attend to chosen keys alone."""

    index: Index = field(kw_only=True)


def with_index(flags: AttentionFlags, index: Index) -> IndexedFlags:
    """Return the flags of a layer with what chooses its keys."""
    return IndexedFlags(flags.scale, flags.causal, flags.window, flags.softcap, flags.sinks, flags.spans, index=index)
