"""Keys of the CUDA graphs that a step can be: sizes that its parts are padded to, lengths that bound them."""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cache
from itertools import product

from kernels.vocabulary.buckets import Bucket, bucket_of, buckets_up_to
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Phase
from qualification.model.config import ModelConfig, num_parameters
from server.engine.operators.dispatch_key import bucket_index
from server.engine.scheduling.sequence import Batch

# Above this many rows a decode step keeps the GPU busy for longer than the host needs to launch it.
_MAX_ROWS = 512
# A prompt's step launched kernel by kernel takes the host 11.6 ms for 32 layers; of a long one the GPU computes 6e14
# flop a second (one H200, Llama-3.1-8B shape). Where the GPU needs longer than the host, a graph still spares it the
# pauses between kernels: 0.8 of the 21 ms that 1024 tokens take. Above that padding costs more.
_HOST_S_A_LAYER = 0.36e-3
_FLOPS = 6e14
_MIN_TOKENS, _MAX_TOKENS = 1024, 4096
_NUM_PROMPTS = 16


@dataclass(frozen=True, slots=True)
class PartKey:
    """The rows of one phase: `size` tokens, padding included, of contexts that end in `longest` or before.

    row_tokens  the most tokens of a row of the phase `verify`
    """

    phase: Phase
    size: int
    longest: Bucket
    row_tokens: int = 1

    @property
    def label(self) -> str:
        """Write the key for the log."""
        size = str(self.size) if self.row_tokens == 1 else f"{self.size // self.row_tokens}x{self.row_tokens}"
        return f"{self.phase.value} {size} {self.longest.label}"


@dataclass(frozen=True, slots=True)
class GraphKey:
    """One graph: prompts (all fresh, or all behind a context), then decode rows; None where there are none.

    The decode rows of a step that verifies drafted tokens are of the phase `verify`, and are a graph without prompts.
    """

    prompts: PartKey | None
    decode: PartKey | None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.prompts, self.decode)))

    def __hash__(self) -> int:
        return self._hash  # asked for four times a step; to hash two enums takes 3 us (one busy core, Python 3.11)

    @property
    def parts(self) -> tuple[PartKey, ...]:
        return tuple(part for part in (self.prompts, self.decode) if part is not None)

    @property
    def has_loose_bounds(self) -> bool:
        """Return whether its bounds may be in other buckets than the lengths of a batch that it computes."""
        return self.prompts is not None and (self.decode is not None or self.prompts.phase is Phase.EXTEND)

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        return sum(part.size for part in self.parts)

    @property
    def label(self) -> str:
        """Write the key for the log."""
        return " + ".join(part.label for part in self.parts)


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes that parts of a step are padded to, ascending.

    Steps of one kind of rows are bounded by the bucket that their longest context is in. Others have fewer sizes and
    fewer bounds, for these multiply: the next one in `bounds`, which ends with the longest context's, stands for the
    buckets below it.
    """

    bounds: tuple[Bucket, ...]
    rows: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    mixed_rows: tuple[int, ...] = ()
    mixed_tokens: tuple[int, ...] = ()
    num_prompts: int = _NUM_PROMPTS  # that a step's graph takes
    max_tokens: int | None = None  # of a graph, padding included; None for any number
    row_tokens: tuple[int, ...] = ()  # of rows that verify drafted tokens; without any these are launched eagerly

    def hold(self, num_tokens: int) -> bool:
        """Return whether a graph may have so many tokens, padding included."""
        return self.max_tokens is None or num_tokens <= self.max_tokens

    @property
    def max_sampled(self) -> int:
        """The most rows whose logits a graph computes."""
        sampled = self.rows[-1] + (self.num_prompts if self.tokens else 0)
        return max(sampled, self.rows[-1] * max(self.row_tokens, default=1))


def graph_sizes(config: ModelConfig, *, max_num_seqs: int, max_num_batched_tokens: int, max_context: int) -> GraphSizes:
    """The sizes of a model's graphs under these limits.

    No graph has rows, padding included, beyond the last bucket that the plan decides products and sums for.
    """
    rows = row_sizes(max_num_seqs)
    tokens = token_sizes(min(most_graphed_tokens(config), max_num_batched_tokens))
    contexts = buckets_up_to(max_context)
    return GraphSizes(
        tuple(context for context in contexts if context in (Bucket.LE_2K, contexts[-1])),
        rows,
        tokens,
        mixed_rows=tuple(size for size in rows if size in {8, 32, 128, rows[-1]}),
        mixed_tokens=tuple(size for size in tokens if size in {64, 128, 256, 512, 1024}),
        num_prompts=min(max_num_seqs, _NUM_PROMPTS),
        max_tokens=LinearRows.of(max_num_batched_tokens).hi,  # the other operators' buckets are as large or larger
    )


def row_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8, of a quarter of the power of two below from 64 on: padding adds at most a quarter.

    The last one is `max_num_seqs` itself, where it is not too large for graphs.
    """
    last = min(max_num_seqs, _MAX_ROWS)
    sizes, size = [], 1
    while size < last:
        sizes.append(size)
        size += size if size < 8 else max(8, (1 << size.bit_length() - 1) // 4)
    return (*sizes, last)


def token_sizes(most: int) -> tuple[int, ...]:
    """Steps of 64, of an eighth of the power of two below from 1024 on; the last one is `most` itself."""
    sizes, size = [], min(64, most)
    while size < most:
        sizes.append(size)
        size += max(64, (1 << size.bit_length() - 1) // 8)
    return (*sizes, most)


def most_graphed_tokens(config: ModelConfig) -> int:
    """Prompt tokens of the largest graph: 1024, or where the GPU needs longer for a step than the host to launch it."""
    num_multiplied = num_parameters(config, num_tokens=1) - config.embedding_size * (2 - config.tie_embeddings)
    num_tokens = _HOST_S_A_LAYER * config.num_layers * _FLOPS / (2 * num_multiplied)
    return min(max(round(num_tokens / 128) * 128, _MIN_TOKENS), _MAX_TOKENS)


def graph_keys(sizes: GraphSizes) -> list[GraphKey]:
    """Every graph there is to be, the largest first: smaller ones fit into its memory."""
    contexts = tuple(bucket for bucket in Bucket if bucket.lo <= sizes.bounds[-1].lo)
    keys = [_decode_key(size, bucket_index(longest.lo + 1)) for size, longest in product(sizes.rows, contexts)]
    keys += [
        _verify_key(size, row_tokens, bucket_index(longest.lo + 1))
        for size, row_tokens, longest in product(sizes.rows, sizes.row_tokens, contexts)
        if sizes.hold(size * row_tokens)
    ]
    keys += [
        GraphKey(PartKey(Phase.PREFILL, size, longest), None)
        for size, less in zip(sizes.tokens, (0, *sizes.tokens), strict=False)
        for longest in contexts
        if longest.lo < size and (longest.hi is None or longest.hi * sizes.num_prompts > less)
    ]
    keys += [GraphKey(PartKey(Phase.EXTEND, *part), None) for part in product(sizes.mixed_tokens, contexts)]
    for size, rows, bound in product(sizes.mixed_tokens, sizes.mixed_rows, sizes.bounds):
        if not sizes.hold(size + rows):
            continue
        fresh = PartKey(Phase.PREFILL, size, _bucket_of_all(size, sizes))
        chunk = PartKey(Phase.EXTEND, size, bound)
        keys += [GraphKey(part, PartKey(Phase.DECODE, rows, bound)) for part in (fresh, chunk)]
    return sorted(keys, key=lambda key: (key.num_tokens, [part.longest.lo for part in key.parts]), reverse=True)


def key_of(batch: Batch, sizes: GraphSizes) -> GraphKey | None:
    """The graph of a batch; None for one with two kinds of prompts, or with more of something than any graph.

    None too for prompts beside rows that verify drafted tokens, where a token has an embedding of its own, for graphs
    read those of token ids alone, and where one sees tokens behind it.
    """
    num_prompts = batch.num_prefill + batch.num_extend
    num_rows = batch.num_rows - num_prompts
    if batch.has_embedded or num_prompts > sizes.num_prompts or (batch.num_prefill and batch.num_extend):
        return None
    if not num_prompts:
        size = _padded(sizes.rows, num_rows)
        if batch.verifies:
            return _key_of_drafted(batch, sizes, size)
        return None if size is None else _decode_key(size, bucket_index(max(batch.context_lens)))
    if batch.sees_ahead(Phase.PREFILL) or batch.sees_ahead(Phase.EXTEND):
        return None
    num_tokens = sum(batch.query_lens[:num_prompts])
    if num_rows:
        if batch.verifies:
            return None
        return _mixed_key(batch, sizes, num_tokens, num_rows)
    phase = Phase.PREFILL if batch.num_prefill else Phase.EXTEND
    size = _padded(sizes.tokens if batch.num_prefill else sizes.mixed_tokens, num_tokens)
    longest = bucket_of(max(batch.context_lens))
    return None if size is None else GraphKey(PartKey(phase, size, longest), None)


@cache
def _decode_key(size: int, longest: int) -> GraphKey:
    """Return the key of decode rows alone, always the same object; `longest` is the index of a bucket."""
    return GraphKey(None, PartKey(Phase.DECODE, size, list(Bucket)[longest]))


@cache
def _verify_key(num_rows: int, row_tokens: int, longest: int) -> GraphKey:
    """Return the key of rows of up to `row_tokens` tokens alone, always the same object."""
    return GraphKey(None, PartKey(Phase.VERIFY, num_rows * row_tokens, list(Bucket)[longest], row_tokens))


def _key_of_drafted(batch: Batch, sizes: GraphSizes, num_rows: int | None) -> GraphKey | None:
    """The graph of a batch of rows that verify drafted tokens, padded to `num_rows`."""
    row_tokens = _padded(sizes.row_tokens, max(batch.query_lens))
    if num_rows is None or row_tokens is None or not sizes.hold(num_rows * row_tokens):
        return None
    return _verify_key(num_rows, row_tokens, bucket_index(max(batch.context_lens)))


def _mixed_key(batch: Batch, sizes: GraphSizes, num_tokens: int, num_rows: int) -> GraphKey | None:
    """The graph of a batch of prompts and decode rows."""
    bounded = batch.context_lens[batch.num_prefill :]
    bound = next((it for it in sizes.bounds if it.hi is None or max(bounded) <= it.hi), None)
    size = _padded(sizes.mixed_tokens, num_tokens)
    rows = _padded(sizes.mixed_rows, num_rows)
    if bound is None or size is None or rows is None or not sizes.hold(size + rows):
        return None
    if batch.num_prefill:
        prompts = PartKey(Phase.PREFILL, size, _bucket_of_all(size, sizes))
    else:
        prompts = PartKey(Phase.EXTEND, size, bound)
    return GraphKey(prompts, PartKey(Phase.DECODE, rows, bound))


def _padded(sizes: tuple[int, ...], size: int) -> int | None:
    index = bisect_left(sizes, size)
    return None if index == len(sizes) else sizes[index]


def _bucket_of_all(size: int, sizes: GraphSizes) -> Bucket:
    """The bucket of the longest prompt that as many tokens can be."""
    return min(bucket_of(size), sizes.bounds[-1], key=lambda bucket: bucket.lo)
