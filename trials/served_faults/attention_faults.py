"""Wrong attention, whatever path serves it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.rows import sequences_of
from kernels.vocabulary.path import RunAttention
from served_faults.plant import Fault, Kind, Model, Plant

OnOut = Callable[[Tensor, AttentionBatch], None]
OnBatch = Callable[[AttentionBatch], AttentionBatch]


def _behind(change: OnOut) -> Callable[[], Plant]:
    """Change what attention has computed, in place."""

    def wrong(run: RunAttention) -> RunAttention:
        def attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
            run(q, k, v, batch, flags, out)
            change(out, batch)

        return attend

    return lambda: Plant(attention=wrong)


def _before(
    queries: Callable[[Tensor], Tensor] = lambda it: it,
    batches: OnBatch = lambda it: it,
    layers: Callable[[AttentionFlags], AttentionFlags] = lambda it: it,
) -> Callable[[], Plant]:
    """Have attention read other queries, another batch or other flags."""

    def wrong(run: RunAttention) -> RunAttention:
        def attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
            run(queries(q), k, v, batches(batch), layers(flags), out)

        return attend

    return lambda: Plant(attention=wrong)


def _is_decode(batch: AttentionBatch) -> bool:
    return batch.is_paged and batch.max_seqlen_q == 1


def _last_rows(out: Tensor, batch: AttentionBatch) -> None:
    if not batch.is_paged:
        out[batch.cu_seqlens_q[1:].long() - 1] *= 1.001


def _neighbours_row(out: Tensor, batch: AttentionBatch) -> None:
    if _is_decode(batch) and out.shape[0] > 2:
        out[2] = out[1]


def _stale_page(batch: AttentionBatch) -> AttentionBatch:
    """Have each sequence read its last page's keys in the page before it."""
    if batch.page_table is None or batch.context_lens is None:
        return batch
    table = batch.page_table.clone()
    for row, last in enumerate(((batch.context_lens - 1) // 16).tolist()):
        table[row, last] = table[row, max(0, last - 1)]
    return replace(batch, page_table=table, plans=None)


def _contexts(change: Callable[[Tensor], Tensor]) -> OnBatch:
    def changed(batch: AttentionBatch) -> AttentionBatch:
        if not _is_decode(batch) or batch.context_lens is None:
            return batch
        return replace(batch, context_lens=change(batch.context_lens), plans=None)

    return changed


def _shorter(lengths: Tensor) -> Tensor:
    return (lengths - 1).clamp_(min=1)


def _longer(lengths: Tensor) -> Tensor:
    """Return lengths of one key more, where the page has room for it."""
    return torch.where(lengths % 16 > 0, lengths + 1, lengths)


def _future_key(run: RunAttention) -> RunAttention:
    """In a chunk the last token but one of each sequence sees the last one's key."""

    def attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        run(q, k, v, batch, flags, out)
        if batch.page_table is None or batch.max_seqlen_q < 2:
            return
        for it in sequences_of(batch):
            if it.num_queries < 2:
                continue
            row, lengths = slice(it.end - 2, it.end - 1), torch.tensor([it.num_keys], dtype=torch.int32)
            alone = replace(
                batch,
                cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
                max_seqlen_q=1,
                page_table=batch.page_table[it.index : it.index + 1].contiguous(),
                context_lens=lengths,
                plans=None,
            )
            run(q[row].contiguous(), k, v, alone, flags, out[row])

    return attend


def _one_in_thousand() -> Plant:
    calls = count()

    def zero(out: Tensor, _: AttentionBatch) -> None:
        if next(calls) % 1000 == 999:
            out[-1] = 0

    return _behind(zero)()


def _scaled(flags: AttentionFlags) -> AttentionFlags:
    return replace(flags, scale=flags.scale * (1 + 1e-4))


def _wider(flags: AttentionFlags) -> AttentionFlags:
    return flags if flags.window is None else replace(flags, window=flags.window + 1)


def _fault(name: str, plant: Callable[[], Plant], **more: object) -> Fault:
    return Fault(name, Kind.ATTENTION, plant, **more)  # type: ignore[arg-type]


ATTENTION_FAULTS = (
    _fault("whole output x (1 + 1e-5)", _behind(lambda out, _: out.mul_(1 + 1e-5))),
    _fault("a head x 1.01", _behind(lambda out, _: out[:, 1].mul_(1.01))),
    _fault("row 0 x 1.001", _behind(lambda out, _: out[0].mul_(1.001))),
    _fault("scale of scores x (1 + 1e-4)", _before(layers=_scaled)),
    _fault("queries in bf16", _before(queries=lambda q: q.bfloat16().to(q.dtype))),
    _fault("a future key in a chunk", lambda: Plant(attention=_future_key)),
    _fault("a window of one key more", _before(layers=_wider), model=Model.WINDOWED),
    _fault("a stale last page", _before(batches=_stale_page)),
    _fault("decode without its last key", _before(batches=_contexts(_shorter))),
    _fault("the last row of each prompt x 1.001", _behind(_last_rows)),
    _fault("decode reads one key too many", _before(batches=_contexts(_longer))),
    _fault("row 2 of decode batches is row 1's", _behind(_neighbours_row)),
    _fault("the last row of one call in 1,000 is 0", _one_in_thousand, most_answers=400),
)
