"""Which CUDA graphs a step can be: the sizes its parts are padded to, and the lengths they are bounded by."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import product

from kernels.buckets import Bucket, bucket_of, buckets_up_to
from server.engine.sequence import Batch
from server.model.config import ModelConfig, num_parameters

# Above this many rows a decode step keeps the GPU busy for longer than the host needs to launch it.
_MAX_ROWS = 512
# A prompt's step launched kernel by kernel takes the host 11.6 ms for 32 layers; of a long one the GPU computes 6e14
# flop a second (one H200, Llama-3.1-8B shape). Where the GPU needs longer than the host, a graph gains nothing.
_HOST_S_A_LAYER = 0.36e-3
_FLOPS = 6e14
_MIN_TOKENS, _MAX_TOKENS = 512, 4096
_NUM_PROMPTS = 16


@dataclass(frozen=True, slots=True)
class PartKey:
    """The rows of one phase: `size` tokens, padding included; the longest context is in `longest`."""

    size: int
    longest: Bucket


@dataclass(frozen=True, slots=True)
class GraphKey:
    """One graph: fresh prompts, then decode rows; None where the step has no such rows."""

    prefill: PartKey | None
    decode: PartKey | None

    @property
    def parts(self) -> tuple[PartKey, ...]:
        return tuple(part for part in (self.prefill, self.decode) if part is not None)

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        return sum(part.size for part in self.parts)

    @property
    def label(self) -> str:
        """For the log."""
        prompts = "" if self.prefill is None else f"{self.prefill.size} prompt tokens {self.prefill.longest.label}"
        rows = "" if self.decode is None else f"{self.decode.size} decode rows {self.decode.longest.label}"
        return " + ".join(text for text in (prompts, rows) if text)


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """What parts are padded to, ascending. Steps with both kinds of rows have fewer sizes: they multiply."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    mixed_rows: tuple[int, ...] = ()
    mixed_tokens: tuple[int, ...] = ()
    num_prompts: int = _NUM_PROMPTS  # that a step's graph takes

    @property
    def max_sampled(self) -> int:
        """The most rows whose logits a graph computes."""
        return self.rows[-1] + (self.num_prompts if self.tokens else 0)


def graph_sizes(config: ModelConfig, *, max_num_seqs: int, max_num_batched_tokens: int) -> GraphSizes:
    """The sizes of a model's graphs under these limits."""
    rows = row_sizes(max_num_seqs)
    tokens = token_sizes(min(most_graphed_tokens(config), max_num_batched_tokens))
    return GraphSizes(
        rows,
        tokens,
        mixed_rows=tuple(size for size in rows if size in {8, 32, 128, rows[-1]}),
        mixed_tokens=tuple(size for size in tokens if size in {64, 128, 256, 512, 1024}),
        num_prompts=min(max_num_seqs, _NUM_PROMPTS),
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
    """Steps of 64, of a quarter of the power of two below from 512 on; the last one is `most` itself."""
    sizes, size = [], min(64, most)
    while size < most:
        sizes.append(size)
        size += max(64, (1 << size.bit_length() - 1) // 4)
    return (*sizes, most)


def most_graphed_tokens(config: ModelConfig) -> int:
    """Prompt tokens of the largest graph: about where the GPU's time for a step passes the host's for launching it."""
    num_multiplied = num_parameters(config) - config.vocab_size * config.hidden_size * (2 - config.tie_embeddings)
    num_tokens = _HOST_S_A_LAYER * config.num_layers * _FLOPS / (2 * num_multiplied)
    return min(max(round(num_tokens / 128) * 128, _MIN_TOKENS), _MAX_TOKENS)


def graph_keys(sizes: GraphSizes, max_context: int) -> list[GraphKey]:
    """Every graph of sequences of up to `max_context` tokens, the largest first: smaller ones fit into its memory."""
    contexts = buckets_up_to(max_context)
    prefills = _prefill_keys(sizes, sizes.tokens, contexts)
    keys = [GraphKey(part, None) for part in prefills]
    keys += [GraphKey(None, PartKey(size, context)) for size, context in product(sizes.rows, contexts)]
    # Beside decode rows stand one or two prompts: the longest of them is in the bucket of the total.
    mixed = _prefill_keys(sizes, sizes.mixed_tokens, contexts)
    beside = [part for part in mixed if part.longest in (bucket_of(part.size), contexts[-1])]
    keys += [
        GraphKey(part, PartKey(size, context)) for part, size, context in product(beside, sizes.mixed_rows, contexts)
    ]
    return sorted(keys, key=lambda key: (key.num_tokens, [part.longest.lo for part in key.parts]), reverse=True)


def key_of(batch: Batch, sizes: GraphSizes) -> GraphKey | None:
    """The graph of a batch; None for one with a chunk behind a context, or with more of something than any graph."""
    num_prompts, num_rows = batch.num_prefill, batch.num_rows - batch.num_prefill
    if batch.num_extend or num_prompts > sizes.num_prompts:
        return None
    if not num_prompts:
        decode = _part_key(sizes.rows, num_rows, max(batch.context_lens))
        return None if decode is None else GraphKey(None, decode)
    num_tokens = sum(batch.query_lens[:num_prompts])
    longest = max(batch.query_lens[:num_prompts])
    if not num_rows:
        prefill = _part_key(sizes.tokens, num_tokens, longest)
        return None if prefill is None else GraphKey(prefill, None)
    prefill = _part_key(sizes.mixed_tokens, num_tokens, longest)
    decode = _part_key(sizes.mixed_rows, num_rows, max(batch.context_lens[num_prompts:]))
    return None if prefill is None or decode is None else GraphKey(prefill, decode)


def _part_key(sizes: tuple[int, ...], size: int, longest: int) -> PartKey | None:
    index = bisect_left(sizes, size)
    return None if index == len(sizes) else PartKey(sizes[index], bucket_of(longest))


def _prefill_keys(sizes: GraphSizes, tokens: tuple[int, ...], contexts: tuple[Bucket, ...]) -> list[PartKey]:
    """Every (size, bucket) that `num_prompts` prompts can be padded to."""
    below = (0, *tokens)
    return [
        PartKey(size, longest)
        for size, less in zip(tokens, below, strict=False)
        for longest in contexts
        if longest.lo < size and (longest.hi is None or longest.hi * sizes.num_prompts > less)
    ]
