"""Runs a decoder over a paged cache, one sequence at a time, with attention written out."""

from functools import partial

import torch
from torch import Tensor

from kernels.calls.indexed import Index
from kernels.recurrence.calls import RecurrenceRows
from kernels.recurrence.sizes import CHUNK
from kernels.reference.choice import chosen_mask
from kernels.vocabulary.shape import Phase
from qualification.model.forward.indexer import chosen_keys
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache
from server.model.layer_state import StateCache, StepStates
from server.model.step import Attend, Step

PAGE_SIZE = 4
NUM_PAGES = 32


class PagedRunner:
    """One sequence at a time, computed in chunks over pages that lie in the cache in no order."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._kv = KVCache.allocate(decoder.config, NUM_PAGES, PAGE_SIZE, torch.float32, torch.device("cpu"))
        for pages in self._kv.tensors:
            pages.fill_(torch.nan)
        order = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(5))
        self._states = StateCache.allocate(decoder.config, 2, torch.float32, torch.device("cpu"))
        for layer in () if self._states is None else self._states.layers:
            for tensor in layer.tensors:
                tensor[:2] = torch.nan
        self._num_steps = 0
        self._slots = (order[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()

    def logits(self, token_ids: Tensor, chunks: list[int]) -> Tensor:
        rows = []
        start = 0
        for size in chunks:
            end = start + size
            positions = torch.arange(start, end, dtype=torch.int32)
            step = Step(
                token_ids[start:end],
                positions,
                self._slots[start:end],
                self._kv,
                self._attend(start, end),
                states=self._step_states(start, end),
            )
            hidden = self._decoder.forward(step)
            rows.append(self._decoder.logits(hidden))
            start = end
        return torch.cat(rows)

    def _step_states(self, start: int, end: int) -> StepStates | None:
        """Read the slot of the chunk before, and write the other one."""
        if self._states is None:
            return None
        source, self._num_steps = self._num_steps % 2 if start else 2, self._num_steps + 1
        int32, int64 = (partial(torch.tensor, dtype=dtype) for dtype in (torch.int32, torch.int64))
        rows = RecurrenceRows(
            starts=int32([0]),
            stops=int32([end - start]),
            firsts=int32([start]),
            folded=int32([start // CHUNK * CHUNK]),
            sources=int64([source]),
            targets=int64([self._num_steps % 2]),
            write_tokens=int64([]),
            write_slots=int64([]),
            longest=end - start,
            phase=Phase.DECODE if start and end == start + 1 else Phase.EXTEND,
        )
        return StepStates(self._states, rows)

    def _attend(self, start: int, end: int) -> Attend:
        distance = torch.arange(start, end)[:, None] - torch.arange(end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, index: Index | None = None, /) -> None:
            keys, values = (pages.flatten(0, 1)[self._slots[:end]] for pages in self._kv.layers[layer].read())
            assert torch.equal(keys[start:], k)
            assert torch.equal(values[start:], v)
            config = self._decoder.config.attentions[layer]
            mask = (distance >= 0) & (distance < (config.window or end))
            if config.chunk is not None:
                chunks = torch.arange(end) // config.chunk
                mask &= chunks[start:, None] == chunks
            if index is not None:
                if index.queries is not None and index.weights is not None:
                    of_pages = keys[:, 0, q.shape[2] :]
                    seen = chosen_keys(index.queries, index.weights, of_pages, index.count)
                    for row, of_row in enumerate(seen):
                        positions = of_row.nonzero()[:, 0]
                        index.chosen[row] = -1
                        index.chosen[row, : len(positions)] = positions
                mask &= chosen_mask(index.chosen, end)
            keys = keys[..., : q.shape[2]]
            group = config.num_heads // config.num_kv_heads
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q, keys) * config.scale
            if config.softcap is not None:
                scores = torch.tanh(scores / config.softcap) * config.softcap
            number = self._decoder.config.attention_layers[layer]
            scores, sinks = scores.masked_fill(~mask, -torch.inf), self._decoder.weights.layers[number].sinks
            if sinks is None:
                weights = torch.softmax(scores, dim=-1)
            else:
                weights = torch.softmax(torch.cat((sinks[:, None, None].expand(-1, len(q), 1), scores), -1), -1)[
                    ..., 1:
                ]
            # A hidden value may be NaN, which a weight of 0 does not hide: those of this sequence are all written.
            out.copy_(torch.einsum("hqk,khd->qhd", weights, values))

        return attend
