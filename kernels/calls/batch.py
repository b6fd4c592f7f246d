"""The inputs of an attention kernel besides its tensors: a batch's layout and a layer's flags."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The layout of queries, keys and values of a batch. All tensors int32, contiguous, on the device.

    cu_seqlens_q  [seqs + 1]          sequence i's queries are rows [cu[i], cu[i + 1]) of q; cu[0] = 0
    cu_seqlens_k  [seqs + 1] or None  the same for packed k and v; None where k and v are pages
    page_table    [seqs, max_pages] or None   page numbers; entries past a sequence's last page are never read
    context_lens  [seqs] or None      keys of each sequence, the new tokens included (already in their pages)
    max_seqlen_q, max_context         host bounds, at least the largest length of the batch
    plans         what kernels made of this batch for all layers; None: each call makes its own. With plans no tensor of
                  the batch changes, calls come one after another on one stream, and a CUDA graph has plans of its own

    Queries are a context's last tokens: row r of sequence i stands at position context - (cu[i + 1] - r).
    A sequence may have no query and no key; a query that sees no key gives 0.
    """

    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_context: int
    cu_seqlens_k: Tensor | None = None
    page_table: Tensor | None = None
    context_lens: Tensor | None = None
    plans: dict[Hashable, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def num_seqs(self) -> int:
        return self.cu_seqlens_q.numel() - 1

    @property
    def is_paged(self) -> bool:
        return self.page_table is not None

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the value of `key`, made once by `make`; without plans make it anew. The key names its inputs."""
        if self.plans is None:
            return make()
        found: Made | None = self.plans.get(key)
        if found is None:
            found = self.plans[key] = make()
        return found


@dataclass(frozen=True, slots=True)
class AttentionFlags:
    """The layer's part of the shape, with its values.

    scale    factor of q @ k, before the softcap
    causal   a query sees keys at its own position and before
    window   a query sees the `window` latest keys, itself included (with causal only)
    softcap  scores become softcap * tanh(score / softcap)
    sinks    [heads] fp32 on the device: a logit a head that joins the denominator and has no value
    spans    [query rows, 2] int32 on the device: positions [lo, hi) a query sees beside the causal ones (lo = hi: none)
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    spans: Tensor | None = None
