"""The inputs of one step as one piece of memory, laid out from one list: the same on the host and on each rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.calls.batch import AttentionBatch
from kernels.recurrence.calls import RecurrenceRows
from kernels.vocabulary.shape import Phase
from qualification.model.config import ModelConfig
from server.engine.execution.graph_keys import GraphKey, GraphSizes, graph_keys
from server.engine.operators.dispatch import PhasePart
from server.engine.operators.rows_table import phase_of_step
from server.engine.scheduling.embeddings import embedding_rows
from server.engine.scheduling.sequence import Sequence

Views = dict[str, Tensor]
HostViews = dict[str, NDArray[Any]]

_STATE_WRITES_A_PROMPT = 2  # of a graph: two snapshots; where there are more, of forks, no graph computes the step
_OF_STATE_ROWS, _STATE_SLOTS = ("starts", "stops", "firsts", "folded"), ("sources", "targets")  # as in RecurrenceRows
_STATE_WRITES = ("write_tokens", "write_slots")
_ALIGNMENT_BYTES = 64  # of every array: Triton compiles a kernel again for a pointer that is not a multiple of 16


@dataclass(frozen=True, slots=True)
class TokenArray:
    """An array with a value a token, or several. The arrays of a step reach the decoder as the fields of `Step`.

    values      gives those of tokens [first, stop) of a sequence; padding is 0. None: written by `StepWriter` itself
    num_parts   values of a token; the array is [num_parts, tokens] where there are several
    """

    name: str
    dtype: torch.dtype
    values: Callable[[Sequence, int, int], object] | None = None
    num_parts: int = 1


# A new input of each token is a line here, and a field of the same name in server/model/step.py.
TOKEN_ARRAYS = (
    TokenArray("token_ids", torch.int64),
    TokenArray("slots", torch.int64),
    TokenArray("positions", torch.int32),
)
_THREE_POSITIONS = TokenArray("positions", torch.int32, num_parts=3)
_SOURCES = TokenArray("sources", torch.int64)  # of a draft head's steps: see `Worker.follow`
_EMBEDDING_ROWS = TokenArray("embedding_rows", torch.int64, embedding_rows)  # of steps that have such tokens only


def token_arrays_of(config: ModelConfig) -> tuple[TokenArray, ...]:
    """Return the arrays of a model's steps."""
    if not config.has_three_positions:
        return TOKEN_ARRAYS
    return tuple(_THREE_POSITIONS if it.name == _THREE_POSITIONS.name else it for it in TOKEN_ARRAYS)


def head_arrays_of(config: ModelConfig) -> tuple[TokenArray, ...]:
    """Return the arrays of the steps of a model's draft head."""
    return (*token_arrays_of(config), _SOURCES)


def with_embedding_rows(arrays: tuple[TokenArray, ...]) -> tuple[TokenArray, ...]:
    """Return the arrays of a step with tokens that have embeddings of their own."""
    return (*arrays, _EMBEDDING_ROWS)


@dataclass(frozen=True, slots=True)
class PartLayout:
    """The rows of one phase, padding included, and bounds of their lengths.

    table_width  entries of a row of the page table; 0 in prefill, which reads no pages
    has_spans    whether a token sees tokens behind it
    """

    phase: Phase
    num_rows: int
    num_tokens: int
    table_width: int
    max_query: int
    max_context: int
    has_spans: bool = False


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The sizes of a step's arrays. The parts stand in the order of `Phase`: prefill | extend | decode or verify.

    num_sampled   tokens whose logits are computed; None for all of them
    token_arrays  `TOKEN_ARRAYS`, or more in the tests
    num_state_writes  slots that get a recurrent state beside those of the rows; None without recurrent layers
    places        name, dtype, first byte and number of elements of every array that is not empty
    """

    parts: tuple[PartLayout, ...]
    num_sampled: int | None
    token_arrays: tuple[TokenArray, ...] = TOKEN_ARRAYS
    num_state_writes: int | None = None

    num_tokens: int = field(init=False, compare=False)
    num_decode: int = field(init=False, compare=False)  # rows of one token at the end of the step
    num_open: int = field(init=False, compare=False)  # tokens at its end that the device alone may know
    num_bytes: int = field(init=False, compare=False)
    places: list[tuple[str, torch.dtype, int, int]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        last = self.parts[-1]
        object.__setattr__(self, "num_tokens", sum([part.num_tokens for part in self.parts]))
        object.__setattr__(self, "num_decode", last.num_rows if last.phase is Phase.DECODE else 0)
        has_open = last.phase in (Phase.DECODE, Phase.VERIFY)
        object.__setattr__(self, "num_open", last.num_tokens if has_open else 0)
        places, start = [], 0
        for name, dtype, size in self.arrays():
            if size:
                places.append((name, dtype, start, size))
                start += -(-size * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "num_bytes", start)

    @property
    def has_embedded(self) -> bool:
        """Return whether a token has an embedding of its own."""
        return _EMBEDDING_ROWS in self.token_arrays

    @property
    def recurrence_phase(self) -> Phase:
        """Return the phase of the step to recurrent layers."""
        return phase_of_step([part.phase for part in self.parts])

    def arrays(self) -> list[tuple[str, torch.dtype, int]]:
        """Return name, dtype and number of elements of every array, in the order of the memory: the one list.

        token_ids, slots, positions  [tokens], and others of `token_arrays`: see server/model/step.py
        sampled      tokens whose logits are computed
        chosen_at    [tokens of decode or verify] where one that the host has not read yet is among the latest sampled
                     tokens; of a row that verifies, among the drafted ones
        is_pending   likewise, whether it is such a one
        state ...    of recurrent layers, see RecurrenceRows
        cu_seqlens, context_lens, page_table   of each phase: see AttentionBatch; one query a decode row is constant
        spans        of a phase: see AttentionFlags
        """
        found = [(array.name, array.dtype, array.num_parts * self.num_tokens) for array in self.token_arrays]
        found += [
            ("sampled", torch.int64, self.num_sampled or 0),
            ("chosen_at", torch.int64, self.num_open),
            ("is_pending", torch.bool, self.num_open),
        ]
        if self.num_state_writes is not None:
            num_rows = sum([part.num_rows for part in self.parts])
            found += [(f"state {name}", torch.int32, num_rows) for name in _OF_STATE_ROWS]
            found += [(f"state {name}", torch.int64, num_rows) for name in _STATE_SLOTS]
            found += [(f"state {name}", torch.int64, self.num_state_writes) for name in _STATE_WRITES]
        for part in self.parts:
            name, rows = part.phase.value, part.num_rows
            if part.phase is not Phase.DECODE:
                found.append((f"{name} cu_seqlens", torch.int32, rows + 1))
            if part.phase is not Phase.PREFILL:
                found.append((f"{name} context_lens", torch.int32, rows))
                found.append((f"{name} page_table", torch.int32, rows * part.table_width))
            if part.has_spans:
                found.append((f"{name} spans", torch.int32, 2 * part.num_tokens))
        return found


def graph_layout(
    key: GraphKey,
    *,
    num_prompts: int,
    page_size: int,
    max_context: int,
    token_arrays: tuple[TokenArray, ...] = TOKEN_ARRAYS,
    has_states: bool = False,
) -> StepLayout:
    """Return the layout of a graph's step, for `num_prompts` prompts and contexts of at most `max_context` tokens."""
    parts = []
    for part in key.parts:
        longest = min(part.longest.hi or max_context, max_context)
        is_fresh, is_decode = part.phase is Phase.PREFILL, part.phase in (Phase.DECODE, Phase.VERIFY)
        parts.append(
            PartLayout(
                part.phase,
                num_rows=part.size // part.row_tokens if is_decode else num_prompts,
                num_tokens=part.size,
                table_width=0 if is_fresh else -(-longest // page_size),
                max_query=part.row_tokens if is_decode else min(part.size, longest),
                max_context=min(part.size, longest) if is_fresh else longest,
            )
        )
    num_sampled = None if key.prompts is None else sum(part.num_rows for part in parts)
    num_writes = 0 if key.prompts is None else _STATE_WRITES_A_PROMPT * num_prompts
    return StepLayout(tuple(parts), num_sampled, token_arrays, num_writes if has_states else None)


def graph_layouts(
    sizes: GraphSizes,
    *,
    page_size: int,
    max_context: int,
    token_arrays: tuple[TokenArray, ...] = TOKEN_ARRAYS,
    has_states: bool = False,
) -> dict[GraphKey, StepLayout]:
    """Return the layout of every graph of these sizes: on each rank the same, in the same order.

    has_states  of a model with recurrent layers
    """
    layout = partial(
        graph_layout,
        num_prompts=sizes.num_prompts,
        page_size=page_size,
        max_context=max_context,
        token_arrays=token_arrays,
        has_states=has_states,
    )
    return {key: layout(key) for key in graph_keys(sizes)}


class StepMemory:
    """Bytes in which steps are laid out; pinned on the host where the device is a GPU."""

    def __init__(self, num_bytes: int, device: torch.device, *, is_pinned: bool = False) -> None:
        self.data = torch.zeros(_aligned(num_bytes), dtype=torch.uint8, device=device, pin_memory=is_pinned)
        self._typed = {dtype: self.data.view(dtype) for dtype in (torch.int64, torch.int32, torch.bool)}
        self._host = {} if self.data.is_cuda else {dtype: typed.numpy() for dtype, typed in self._typed.items()}

    def views(self, layout: StepLayout) -> Views:
        """Return every array of the layout, flat."""
        found = {}
        for name, dtype, start, size in layout.places:
            first = start // dtype.itemsize
            found[name] = self._typed[dtype][first : first + size]
        return found

    def host_views(self, layout: StepLayout) -> HostViews:
        """Return every array of the layout for numpy; page tables, spans and arrays of several parts as rows."""
        found: HostViews = {}
        for name, dtype, start, size in layout.places:
            first = start // dtype.itemsize
            found[name] = self._host[dtype][first : first + size]
        for part in layout.parts:
            if part.table_width:
                name = f"{part.phase.value} page_table"
                found[name] = found[name].reshape(part.num_rows, part.table_width)
            if part.has_spans:
                name = f"{part.phase.value} spans"
                found[name] = found[name].reshape(part.num_tokens, 2)
        for array in layout.token_arrays:
            if array.num_parts > 1:
                found[array.name] = found[array.name].reshape(array.num_parts, layout.num_tokens)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffer:
    """One step's inputs in host memory: what a worker gets, whatever its rank.

    key          the graph that computes the step; None where it is launched kernel by kernel
    data         [layout.num_bytes] uint8; must stay as it is until the device has copied it
    has_pending  whether a token is known to the device alone
    """

    key: GraphKey | None
    layout: StepLayout
    data: Tensor
    has_pending: bool


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step's inputs on a device.

    tokens      the arrays of `TOKEN_ARRAYS` by name
    sampled     [R] int64, tokens whose logits are computed; None for all of them
    is_pending  bool, and chosen_at int64, of the tokens of decode or verify; None without
    parts       one a phase
    states      of recurrent layers; None for a model without
    """

    tokens: dict[str, Any]
    sampled: Tensor | None
    is_pending: Tensor | None
    chosen_at: Tensor | None
    parts: list[PhasePart]
    states: RecurrenceRows | None = None


class DeviceInputs:
    """Memory of one device for the inputs of steps, which are computed one after another on one stream.

    Graphs read the memory that they were captured with, so their layouts are declared first, all at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = StepMemory(0, device)
        self._device = device
        self._one_query_each = torch.arange(1, dtype=torch.int32, device=device)
        self._graphs: dict[GraphKey, tuple[Tensor, StepTensors]] = {}

    def declare(self, layouts: Mapping[GraphKey, StepLayout]) -> None:
        """Lay out the inputs of graphs in one memory that stays where it is."""
        self._reserve(
            max(layout.num_bytes for layout in layouts.values()), max(layout.num_tokens for layout in layouts.values())
        )
        self._graphs |= {
            key: (self._memory.data[: layout.num_bytes], self._tensors(layout)) for key, layout in layouts.items()
        }

    def of_graph(self, key: GraphKey) -> StepTensors:
        """Return what a graph of this key reads."""
        return self._graphs[key][1]

    def load(self, buffer: StepBuffer) -> StepTensors:
        """Start the copy of a step's inputs to the device."""
        if buffer.key is not None:
            target, tensors = self._graphs[buffer.key]
            target.copy_(buffer.data, non_blocking=True)
            return tensors
        layout = buffer.layout
        if layout.num_bytes > self._memory.data.numel() or layout.num_decode >= self._one_query_each.numel():
            self._reserve(2 * layout.num_bytes, 2 * layout.num_tokens)
        self._memory.data[: layout.num_bytes].copy_(buffer.data, non_blocking=True)
        return self._tensors(layout)

    def _reserve(self, num_bytes: int, num_tokens: int) -> None:
        """Make room. Tensors made before keep the memory that they are in."""
        self._memory = StepMemory(max(num_bytes, self._memory.data.numel()), self._device)
        self._one_query_each = torch.arange(1 + num_tokens, dtype=torch.int32, device=self._device)

    def _tensors(self, layout: StepLayout) -> StepTensors:
        views = self._memory.views(layout)
        parts, start = [], 0
        for part in layout.parts:
            stop = start + part.num_tokens
            parts.append(self._part(part, views, slice(start, stop)))
            start = stop
        return StepTensors(
            {
                it.name: views[it.name] if it.num_parts == 1 else views[it.name].view(it.num_parts, layout.num_tokens)
                for it in layout.token_arrays
            },
            None if layout.num_sampled is None else views.get("sampled"),
            views.get("is_pending"),
            views.get("chosen_at"),
            parts,
            None if layout.num_state_writes is None else self._state_rows(views, layout),
        )

    def _state_rows(self, views: Views, layout: StepLayout) -> RecurrenceRows:
        none = torch.zeros(0, dtype=torch.int64, device=self._device)
        names = (*_OF_STATE_ROWS, *_STATE_SLOTS, *_STATE_WRITES)
        tensors = {name: views.get(f"state {name}", none) for name in names}
        longest = max([part.max_query for part in layout.parts])
        return RecurrenceRows(**tensors, longest=longest, phase=layout.recurrence_phase)

    def _part(self, part: PartLayout, views: Views, tokens: slice) -> PhasePart:
        name, is_prefill = part.phase.value, part.phase is Phase.PREFILL
        is_decode = part.phase is Phase.DECODE
        cu_seqlens = self._one_query_each[: part.num_rows + 1] if is_decode else views[f"{name} cu_seqlens"]
        return PhasePart(
            phase=part.phase,
            tokens=tokens,
            batch=AttentionBatch(
                cu_seqlens_q=cu_seqlens,
                max_seqlen_q=part.max_query,
                max_context=part.max_context,
                cu_seqlens_k=cu_seqlens if is_prefill else None,
                page_table=None if is_prefill else views[f"{name} page_table"].view(part.num_rows, part.table_width),
                context_lens=None if is_prefill else views[f"{name} context_lens"],
            ),
            num_sequences=part.num_rows,
            num_tokens=part.num_tokens,
            spans=views[f"{name} spans"].view(part.num_tokens, 2) if part.has_spans else None,
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
