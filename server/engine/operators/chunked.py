"""Attention of layers that see one chunk of positions: of each row no more of its context than its last chunk.

No row of a step has queries in two chunks (`SchedulerLimits.chunk`), so that causal attention over the pages of that
chunk is what such a layer computes, by the paths of any other layer.
"""

from dataclasses import replace

import torch

from kernels.calls.batch import AttentionBatch


def bounded(batch: AttentionBatch, chunk: int) -> AttentionBatch:
    """Return the batch with the bounds of `within`, by which a path is chosen. Prompts without a context have one
    chunk.
    """
    if not batch.is_paged or batch.max_context <= chunk:
        return batch
    return replace(batch, max_seqlen_q=min(batch.max_seqlen_q, chunk), max_context=chunk)


def within(batch: AttentionBatch, chunk: int, page_size: int) -> AttentionBatch:
    """Return the batch over pages whose contexts begin where the last chunk of each does.

    chunk      positions, a multiple of `page_size`
    Waits for nothing: the lengths are on the device alone.
    """
    if batch.page_table is None or batch.context_lens is None or batch.max_context <= chunk:
        return batch
    table, pages_of_chunk = batch.page_table, chunk // page_size
    first = (batch.context_lens - 1).clamp_(min=0).div_(chunk, rounding_mode="floor")  # padding has no context
    width = min(table.shape[1], pages_of_chunk)
    columns = torch.arange(width, device=table.device) + (first * pages_of_chunk)[:, None]
    return replace(
        bounded(batch, chunk),
        page_table=table.gather(1, columns.clamp_(max=table.shape[1] - 1)),
        context_lens=batch.context_lens - first * chunk,
    )
