"""`sdpa.cpu.latent.indexed`: the choice of keys and the attention to them, by PyTorch.

Where no query sees more keys than are chosen, it is attention to all of them. Elsewhere each chunk of query rows is
attended to under a mask of its chosen keys.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.indexed import Index, IndexedFlags
from kernels.calls.rows import keys_of, sequences_of
from kernels.latent.eager import run_latent_cpu

_MAX_PRODUCTS = 2**22  # of a chunk of query rows: the indexer's heads by its keys
_MAX_SCORES = 2**22  # a head, likewise


def run_indexed_cpu(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """`sdpa.cpu.latent.indexed`; arguments as of `RunAttention`, with `IndexedFlags`, whose choice is written."""
    assert isinstance(flags, IndexedFlags), "the shape has an indexer"
    index, size = flags.index, q.shape[-1]
    if index.queries is not None:
        _choose(k[..., size:], batch, index)
    if batch.max_context <= index.count:
        run_latent_cpu(q, k[..., :size], v, batch, flags, out)
    else:
        _attend(q, k[..., :size], batch, flags, out)


def _choose(index_keys: Tensor, batch: AttentionBatch, index: Index) -> None:
    """Write the choice of every query; index_keys [tokens, 1, dim] packed, or [num_pages, page_size, 1, dim]."""
    assert index.queries is not None, "an earlier layer's choice is given"
    assert index.weights is not None, "an earlier layer's choice is given"
    index.chosen.fill_(-1)
    for sequence in sequences_of(batch):
        if sequence.num_keys == 0:
            continue
        keys = keys_of(index_keys, batch, sequence)[:, 0].float()
        size = max(1, _MAX_PRODUCTS // (index.queries.shape[1] * sequence.num_keys))
        for start in range(sequence.start, sequence.end, size):
            stop = min(start + size, sequence.end)
            products = torch.relu_(index.queries[start:stop].float() @ keys.T)
            scores = torch.bmm(index.weights[start:stop, None], products)[:, 0]
            positions = torch.arange(sequence.position(start), sequence.position(stop))[:, None]
            scores.masked_fill_(torch.arange(sequence.num_keys) > positions, -torch.inf)
            chosen = chosen_by_scores(scores, positions, index.count)
            index.chosen[start:stop, : chosen.shape[1]] = chosen


def chosen_by_scores(scores: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return the choice [rows, count or fewer] int64, ascending, -1 behind the last.

    scores [rows, keys], -inf of keys behind a row's own; positions [rows, 1], of the rows in their sequence.
    """
    # A stable sort: of equal scores the earlier key comes first.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    past = scores.shape[1]  # stands for no key, behind all of them
    order = order.masked_fill(torch.arange(order.shape[1]) > positions, past).sort(dim=1).values
    return order.masked_fill(order == past, -1)


def _attend(q: Tensor, k: Tensor, batch: AttentionBatch, flags: IndexedFlags, out: Tensor) -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for sequence in sequences_of(batch):
            if sequence.num_keys == 0:
                out[sequence.start : sequence.end] = 0
                continue
            keys = keys_of(k, batch, sequence).transpose(0, 1)[None]
            size = max(1, min(_MAX_SCORES // sequence.num_keys, 256))
            for start in range(sequence.start, sequence.end, size):
                rows = slice(start, min(start + size, sequence.end))
                chosen = flags.index.chosen[rows].long()
                mask = torch.zeros(chosen.shape[0], sequence.num_keys + 1, dtype=torch.bool)
                mask.scatter_(1, chosen.masked_fill(chosen < 0, sequence.num_keys), True)
                mask = mask[:, : sequence.num_keys]
                queries = q[rows].transpose(0, 1)[None]
                found = scaled_dot_product_attention(
                    queries, keys, keys, attn_mask=mask, scale=flags.scale, enable_gqa=True
                )
                found = found[0].transpose(0, 1)[..., : out.shape[2]]
                out[rows] = found.masked_fill(~mask.any(dim=1)[:, None, None], 0)
