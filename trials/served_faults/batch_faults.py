"""Wrong bookkeeping of batches, wrong pages, wrong copies for forks."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import torch

from served_faults.plant import Fault, Kind, Plant
from server.engine.execution.runner import ModelRunner
from server.engine.execution.step_buffer import HostViews
from server.engine.scheduling.sequence import Batch
from support.engine import serving_faults as faults
from support.engine.serving_faults import Edit


def _buffer(edit: Callable[[], Edit]) -> Callable[[], Plant]:
    return lambda: Plant(buffer=edit())


def _tables_swapped(views: HostViews) -> None:
    """Two rows read each other's pages."""
    table, lengths = views["decode page_table"], views["decode context_lens"]
    most = -(-min(lengths[0], lengths[1]) // 16)  # those that both have
    table[[0, 1], :most] = table[[1, 0], :most]


def _contexts_swapped(views: HostViews) -> None:
    """A row sees as many keys as its neighbour has, where its own pages hold them."""
    lengths = views["decode context_lens"]
    lengths[0] = min(lengths[0], lengths[1])


def _tokens_swapped(views: HostViews) -> None:
    tokens = views["token_ids"]
    tokens[[-1, -2]] = tokens[[-2, -1]]


def _slots_swapped(views: HostViews) -> None:
    """Two rows write their keys and values to each other's pages."""
    slots = views["slots"]
    slots[[-1, -2]] = slots[[-2, -1]]


def _no_copies(batch: Batch) -> Batch:
    """Forks begin with a page that nothing was copied to."""
    return replace(batch, page_copies=())


def _page_given_twice(batch: Batch) -> Batch:
    """The last row's newest page is that of the first row."""
    if batch.num_rows < 2 or len(batch.page_tables[0]) < 1:
        return batch
    table = array("i", batch.page_tables[-1])
    table[-1] = batch.page_tables[0][-1]
    return replace(batch, page_tables=(*batch.page_tables[:-1], table))


def _shifted_chunk(batch: Batch) -> Batch:
    """A prompt's later chunk is computed as if it stood one place before its own."""
    if not batch.num_extend:
        return batch
    row = batch.num_prefill
    lengths = list(batch.context_lens)
    if lengths[row] - 1 <= batch.query_lens[row]:
        return batch
    lengths[row] -= 1
    needed = -(-lengths[row] // 16)
    tables = list(batch.page_tables)
    tables[row] = tables[row][:needed]
    return replace(batch, context_lens=tuple(lengths), page_tables=tuple(tables))


class WordChanged:
    """Another writer changes a word of one page every fourth step."""

    def __init__(self) -> None:
        self._steps = count()

    def __call__(self, runner: ModelRunner) -> None:
        step = next(self._steps)
        if step % 4 == 3:
            words = runner.worker.kv.layers[1].v.view(torch.int32)
            words[step // 4 % runner.num_pages, :, 0, 0] ^= 1 << 24


BATCH_FAULTS = (
    Fault("context length one short in batches", Kind.BATCH, _buffer(lambda: faults.short_contexts)),
    Fault("positions one behind in batches", Kind.BATCH, _buffer(lambda: faults.late_positions)),
    Fault("page tables of two rows swapped", Kind.BATCH, _buffer(lambda: _tables_swapped)),
    Fault("another row's token", Kind.BATCH, _buffer(lambda: _tokens_swapped)),
    Fault("salt ignored: another tenant's pages", Kind.PAGES, lambda: Plant(queued=faults.unsalted)),
    Fault("names of pages of one byte", Kind.PAGES, lambda: Plant(queued=faults.short_keys)),
    Fault("last page of a fork not copied", Kind.FORKS, lambda: Plant(batch=_no_copies)),
)
OWN_BATCH_FAULTS = (
    Fault("samples of two rows swapped", Kind.BATCH, lambda: Plant(result=faults.samples_swapped)),
    Fault("the last row's token is that of the step before", Kind.BATCH, _buffer(faults.StaleTokens)),
    Fault("a neighbour's context length", Kind.BATCH, _buffer(lambda: _contexts_swapped)),
    Fault("two rows write to each other's slots", Kind.BATCH, _buffer(lambda: _slots_swapped)),
    Fault("a later chunk one place too early", Kind.BATCH, lambda: Plant(batch=_shifted_chunk)),
    Fault("a neighbour's first page", Kind.PAGES, _buffer(lambda: faults.neighbours_page)),
    Fault("pages named without those before them", Kind.PAGES, lambda: Plant(queued=faults.unchained_keys)),
    Fault("a page given to two sequences", Kind.PAGES, lambda: Plant(batch=_page_given_twice)),
    Fault("words of pages change", Kind.PAGES, lambda: Plant(step=WordChanged())),
    Fault("a fork's copy is of the page before", Kind.FORKS, lambda: Plant(batch=faults.wrong_page_copied)),
)
