"""Lengths of a batch as small numbers that a dictionary finds fast."""

from bisect import bisect_left
from itertools import product
from typing import NamedTuple

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.shape import AttentionShape, Mask, Phase
from kernels.vocabulary.value_shape import Values, values_of
from qualification.model.config import AttentionConfig


class Heads(NamedTuple):
    """The heads of a layer's attention. A tuple, hashed for each decision: a dataclass takes three times as long.

    query, kv        how many
    dim              numbers of each
    skips_fp8_cache  whether a cache of 8 bits holds their keys and values in the model's dtype
    sees_spans       whether tokens of an image see each other both ways
    values           where they have another size than the keys
    """

    query: int
    kv: int
    dim: int
    skips_fp8_cache: bool = False
    sees_spans: bool = False
    values: Values | None = None

    @classmethod
    def of(cls, it: AttentionConfig) -> "Heads":
        return cls(it.num_heads, it.num_kv_heads, it.head_dim, it.skips_fp8_cache, it.sees_spans, it.values)


LayerKind = tuple[int | None, Heads]  # the window and the heads of a layer: those of one kind have the same shapes
# Kind of layers, buckets of the longest query and of the longest context, and the mask. Numbers, for an Enum hashes
# its name in Python: a decision took 2.8 us with three of them, and takes 0.5 us without (one busy core, Python 3.11).
LengthKey = tuple[LayerKind, int, int, int]

_MASKS = {mask: index for index, mask in enumerate(Mask)}
CAUSAL = _MASKS[Mask.CAUSAL]
FULL = _MASKS[Mask.FULL]  # of towers
SPANS = _MASKS[Mask.SPANS]  # of prompts with images whose tokens see each other both ways
_EDGES = tuple(bucket.hi for bucket in Bucket if bucket.hi is not None)


def bucket_index(num_tokens: int) -> int:
    """Return the bucket of a length, counted from 0."""
    return bisect_left(_EDGES, num_tokens)


def keys_of_shape(shape: AttentionShape, *, has_fp8_cache: bool) -> tuple[LengthKey, ...]:
    """The keys under which `bucket_index` finds the shape among those of its phase: one for each kind of its layers.

    has_fp8_cache  whether a layer of the model has keys of 8 bits; those of a prompt alone are never
    """
    order = list(Bucket)
    queries = 0 if shape.phase is Phase.DECODE else order.index(shape.query_bucket)
    skips = (False, True) if shape.phase is Phase.PREFILL else (has_fp8_cache and shape.kv_dtype is not FP8,)
    spans = (True,) if shape.mask is Mask.SPANS else (False, True)  # such layers have a causal shape, too
    dims = shape.num_heads, shape.num_kv_heads, shape.head_dim
    heads = [Heads(*dims, *it, values_of(shape)) for it in product(skips, spans)]
    context = order.index(shape.context_bucket)
    return tuple([((shape.window, own), queries, context, _MASKS[shape.mask]) for own in heads])
