"""The attention shape: everything that selects a kernel, and what that shape costs by the IO model."""

from dataclasses import dataclass
from enum import Enum

from kernels.vocabulary.buckets import Bucket


class Phase(Enum):
    PREFILL = "prefill"  # a fresh prompt: keys and values are packed beside the queries, no cached context
    EXTEND = "extend"  # a chunk of a prompt over paged context (its own tokens are already in their pages)
    DECODE = "decode"  # one query token a sequence over paged context
    VERIFY = "verify"  # a few query tokens a sequence over paged context: its newest one and drafted ones behind it


# The phases of a server that drafts no tokens, of every report, and of every list of what may be measured.
PLANNED_PHASES = (Phase.PREFILL, Phase.EXTEND, Phase.DECODE)


class Dtype(Enum):
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def num_bytes(self) -> int:
        """Return the size of one element."""
        return _NUM_BYTES[self]


_NUM_BYTES = {Dtype.FP32: 4, Dtype.FP16: 2, Dtype.BF16: 2}  # a new dtype must be added: there is no default


class Mask(Enum):
    CAUSAL = "causal"
    SPANS = "spans"  # causal, but tokens inside one span (an image) see each other both ways
    FULL = "full"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The key of the matrix and of every decision. A batch is keyed by its longest member."""

    phase: Phase
    dtype: Dtype
    kv_dtype: Dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_bucket: Bucket  # of the longest query of the batch; LE_128 in decode and verify
    context_bucket: Bucket  # of the longest context, new tokens included; equals query_bucket in prefill
    page_size: int | None = None  # tokens; None where keys and values are packed (prefill)
    window: int | None = None  # a query sees the `window` latest keys, itself included
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: bool = False  # one learned logit a head joins the softmax's denominator
    mask: Mask = Mask.CAUSAL

    def __str__(self) -> str:
        """One line for logs, plans and reports; unique for every shape."""
        parts = [
            self.phase.value,
            self.dtype.value if self.dtype is self.kv_dtype else f"{self.dtype.value}/kv-{self.kv_dtype.value}",
            f"h{self.num_heads}:{self.num_kv_heads}",
            f"d{self.head_dim}",
            f"q-{self.query_bucket.label}",
            f"c-{self.context_bucket.label}",
            self.mask.value,
        ]
        if self.page_size is not None:
            parts.append(f"page{self.page_size}")
        if self.window is not None:
            parts.append(f"window{self.window}")
        if self.softcap is not None:
            parts.append(f"softcap{self.softcap:g}")
        if self.sinks:
            parts.append("sinks")
        return " ".join(parts)


def num_visible_pairs(num_queries: int, num_keys: int, window: int | None) -> int:
    """(query, key) pairs a causal mask leaves, queries being the last `num_queries` of `num_keys` positions."""
    first = num_keys - num_queries + 1  # keys the first query sees
    if window is None or window >= num_keys:
        return num_queries * (first + num_keys) // 2
    num_growing = max(0, min(num_queries, window - first))  # queries that still see every key before them
    return num_growing * (first + first + num_growing - 1) // 2 + (num_queries - num_growing) * window


def flops(shape: AttentionShape, num_queries: int, num_keys: int) -> int:
    """Floating-point operations of one sequence: two matmuls over the visible pairs (causal counts half the square)."""
    pairs = (
        num_queries * num_keys if shape.mask is Mask.FULL else num_visible_pairs(num_queries, num_keys, shape.window)
    )
    return 4 * pairs * shape.head_dim * shape.num_heads


def hbm_bytes_tiled(shape: AttentionShape, num_queries: int, num_keys: int) -> int:
    """HBM bytes of tiled attention when keys and values are read once: q, k, v in, out out. Source: Dao et al. 2022."""
    visible = num_keys if shape.window is None else min(num_keys, shape.window + num_queries - 1)
    queries = 2 * num_queries * shape.num_heads * shape.head_dim * shape.dtype.num_bytes
    return queries + 2 * visible * shape.num_kv_heads * shape.head_dim * shape.kv_dtype.num_bytes


def hbm_bytes_standard(shape: AttentionShape, num_queries: int, num_keys: int) -> int:
    """HBM bytes of standard attention: the tiled ones, plus scores and probabilities written and read once each."""
    scores = num_queries * num_keys * shape.num_heads * shape.dtype.num_bytes
    return hbm_bytes_tiled(shape, num_queries, num_keys) + 4 * scores
