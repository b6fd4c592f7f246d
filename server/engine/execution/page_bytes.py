"""Digests of the bytes of pages, kept on the device: whatever writes to a page later changes its digest."""

from collections.abc import Sequence

import torch
from torch import Tensor

from server.engine.execution.sampling import staged
from server.model.kv_cache import KVCache

_GOLDEN = 0x9E3779B9 - 2**32


class DevicePageBytes:
    """The digests of a cache's pages: sums of their words, each times an odd number, over all layers.

    One word that changes always changes its digest, others with a probability of 1 - 2^-32.
    """

    def __init__(self, kv: KVCache) -> None:
        self._words = [_words(tensor) for tensor in kv.tensors]
        device = self._words[0].device
        longest = max(words.shape[1] for words in self._words)
        self._weights = torch.arange(longest, dtype=torch.int32, device=device).mul_(_GOLDEN).bitwise_or_(1)
        self._digests = torch.zeros(kv.num_pages + 1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def seal(self, pages: Sequence[int]) -> None:
        """Keep the digests of what these pages hold when all that was launched is done."""
        index = self._index(pages)
        self._digests.index_copy_(0, index, self._of(index))

    @torch.inference_mode()
    def differing(self, pages: Sequence[int]) -> list[int]:
        """Return those of the pages whose bytes are not those that were sealed. Waits for the device."""
        index = self._index(pages)
        is_equal = (self._digests.index_select(0, index) == self._of(index)).tolist()
        return [page for page, is_same in zip(pages, is_equal, strict=True) if not is_same]

    def _index(self, pages: Sequence[int]) -> Tensor:
        return staged(torch.tensor(pages, dtype=torch.int64), self._digests.device)

    def _of(self, index: Tensor) -> Tensor:
        total = torch.zeros_like(index)
        for words in self._words:
            products = words.index_select(0, index).to(torch.int32).mul_(self._weights[: words.shape[1]])
            total.mul_(31).add_(products.sum(dim=1, dtype=torch.int64))
        return total


def _words(tensor: Tensor) -> Tensor:
    """Return a page's bytes as a row [pages, words] of int32, or of bytes where they are no whole number of words."""
    rows = tensor.view(tensor.shape[0], -1)
    num_bytes = rows.shape[1] * rows.element_size()
    return rows.view(torch.int32 if num_bytes % 4 == 0 else torch.uint8)
