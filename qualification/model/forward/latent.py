"""Products of latent attention that are of each head alone: what makes keys and values of a latent, taken apart."""

from collections.abc import Callable

import torch
from torch import Tensor

from qualification.model.forward.bounded import Bounded, Precision, chunks_of, product
from qualification.model.latent import LatentSizes


def absorbed(plain: Bounded, kv_up: Tensor, sizes: LatentSizes, precision: Precision) -> Bounded:
    """Return what queries are multiplied with latents by, [T, heads, latent], of their plain numbers [T, heads, plain].

    kv_up  [heads * (plain + value), latent]: a head's key is its plain rows times a latent, so that a query's product
           with the key is the query's product with these rows, times the latent
    """
    return _of_each_head(plain, lambda head: _head(kv_up, sizes, head)[: sizes.plain].T, precision)


def expanded(out: Bounded, kv_up: Tensor, sizes: LatentSizes, precision: Precision) -> Bounded:
    """Return the heads' results [T, heads, value], of their sums of latents [T, heads, latent]."""
    return _of_each_head(out, lambda head: _head(kv_up, sizes, head)[sizes.plain :], precision)


def beside(first: Bounded, second: Bounded) -> Bounded:
    """Return numbers of the last dim, one after the other."""
    names = ("truth", "most", "deviation")
    return Bounded(*(torch.cat([getattr(it, name) for it in (first, second)], dim=-1) for name in names))


def _head(kv_up: Tensor, sizes: LatentSizes, head: int) -> Tensor:
    size = sizes.plain + sizes.value
    return kv_up[head * size : (head + 1) * size]


def _of_each_head(x: Bounded, weight: Callable[[int], Tensor], precision: Precision) -> Bounded:
    """Return x [T, heads, n] times each head's weight [m, n], rounded: [T, heads, m]."""
    parts = [
        product(x.changed(lambda it, head=head: it[:, head]), chunks_of(weight(head)), None, precision)  # type: ignore[misc]
        for head in range(x.truth.shape[1])
    ]
    names = ("truth", "most", "deviation")
    found = Bounded(*(torch.stack([getattr(it, name) for it in parts], dim=1) for name in names))
    return precision.rounded(found)
