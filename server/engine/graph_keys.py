"""Which CUDA graphs a decode step can be: the sizes batches are padded to, and the contexts they are bounded by."""

from bisect import bisect_left
from dataclasses import dataclass

from kernels.buckets import Bucket, bucket_of, buckets_up_to
from kernels.shape import Phase
from server.engine.sequence import Batch

# Above this many rows a step keeps the GPU busy for longer than the host needs to launch it.
_MAX_SIZE = 512


@dataclass(frozen=True, slots=True)
class GraphKey:
    """One graph: `size` rows, padding included, whose longest context is in `context`."""

    size: int
    context: Bucket


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8, of a quarter of the power of two below from 64 on: padding adds at most a quarter.

    The last one is `max_num_seqs` itself, where it is not too large for graphs.
    """
    last = min(max_num_seqs, _MAX_SIZE)
    sizes, size = [], 1
    while size < last:
        sizes.append(size)
        size += size if size < 8 else max(8, (1 << size.bit_length() - 1) // 4)
    return (*sizes, last)


def graph_keys(sizes: tuple[int, ...], max_context: int) -> list[GraphKey]:
    """Every graph of sequences of up to `max_context` tokens, the largest first: smaller ones fit into its memory."""
    contexts = buckets_up_to(max_context)
    return [GraphKey(size, context) for size in reversed(sizes) for context in reversed(contexts)]


def key_of(batch: Batch, sizes: tuple[int, ...]) -> GraphKey | None:
    """The graph of a batch; None for one that holds more than decode rows, or more rows than any graph."""
    if batch.rows_of(Phase.DECODE).start or batch.num_rows > sizes[-1]:
        return None
    return GraphKey(sizes[bisect_left(sizes, batch.num_rows)], bucket_of(max(batch.context_lens)))
