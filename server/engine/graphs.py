"""Decode steps as CUDA graphs: captured before ready, replayed in service, dropped when a decision changes."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kernels.fused.sampling import greedy
from server.engine.dispatch import Choice, Dispatcher, StepAttention
from server.engine.graph_inputs import DecodeInputs
from server.engine.graph_keys import GraphKey, key_of
from server.engine.sequence import Batch
from server.model.decoder import Decoder
from server.model.kv_cache import KVCache

logger = logging.getLogger(__name__)


class Replayable(Protocol):
    """Recorded work: torch.cuda.CUDAGraph, or a closure in the tests."""

    def replay(self) -> None:
        """Start the work again on the same memory."""


Capture = Callable[[Callable[[], None]], Replayable]


class CudaCapture:
    """Records work into CUDA graphs that share one pool of memory: only one of them may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], None]) -> Replayable:
        graph = torch.cuda.CUDAGraph()
        # Only this thread launches anything; the others must not spoil the capture, whatever they ask CUDA for.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            work()
        return graph


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step. `choices`: what its attention ran on; `launches`: how often, by window."""

    replayable: Replayable
    choices: tuple[Choice, ...]
    launches: Mapping[int | None, int]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A batch that a graph can compute, with its decisions made."""

    key: GraphKey
    batch: Batch
    attention: StepAttention


class DecodeGraphs:
    """Whole decode steps: embedding, layers, logits of all rows and their likeliest tokens.

    Graphs write their results to memory of this object, which the next step overwrites.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        dispatcher: Dispatcher,
        *,
        sizes: tuple[int, ...],
        inputs: DecodeInputs,
        device: torch.device,
    ) -> None:
        """Without graphs as yet. `sizes` of rows, ascending; `inputs` for every key that will be captured."""
        self._decoder = decoder
        self._kv = kv
        self._dispatcher = dispatcher
        self._sizes = sizes
        self._inputs = inputs
        self._logits = torch.empty(sizes[-1], decoder.config.vocab_size, dtype=torch.float32, device=device)
        self._tokens = torch.zeros(sizes[-1], dtype=torch.int64, device=device)
        self._tokens_host = torch.zeros(sizes[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
        self._graphs: dict[GraphKey, _Graph] = {}
        self._device = device
        self.num_replays = 0

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """What is captured and was not dropped."""
        return tuple(self._graphs)

    @torch.inference_mode()
    def capture(self, keys: Iterable[GraphKey], capture: Capture, progress: Callable[[str], None]) -> None:
        """Record a graph for each key whose decisions allow it. Raises NoPathError, or what a capture raises.

        Each key runs eagerly first: a launch failure then changes the decision instead of breaking the capture, and
        libraries load their kernels and take their workspaces.
        """
        keys = list(keys)
        for key in keys:
            if self._is_capturable(key):
                self._compute(key, self._attention(key))
        for index, key in enumerate(keys, start=1):
            if not self._is_capturable(key):
                continue
            progress(f"{index}/{len(keys)} {key.size} rows {key.context.label}")
            attention = self._attention(key)
            replayable = capture(lambda key=key, attention=attention: self._compute(key, attention))  # type: ignore[misc]
            self._graphs[key] = _Graph(replayable, attention.choices, attention.launches)

    def find(self, batch: Batch) -> DecodeStep | None:
        """The graph's view of a batch; None where no graph computes it as it is decided now. Raises NoPathError."""
        key = key_of(batch, self._sizes)
        graph = None if key is None else self._graphs.get(key)
        if key is None or graph is None:
            return None
        attention = self._attention(key, num_rows=batch.num_rows)
        if attention.choices != graph.choices:
            logger.warning("the graphs of context %s are dropped: its decision changed", key.context.label)
            self._graphs = {other: kept for other, kept in self._graphs.items() if other.context is not key.context}
            return None
        return DecodeStep(key, batch, attention)

    def replay(self, step: DecodeStep) -> Tensor:
        """Start a step that `find` returned. Returns logits [rows, vocab] fp32, scratch memory until the next one."""
        graph = self._graphs[step.key]
        self._inputs.fill(step.key, step.batch)
        graph.replayable.replay()
        self.num_replays += 1
        step.attention.count_replay(graph.launches)
        return self._logits[: step.batch.num_rows]

    def read_greedy(self, num_rows: int) -> list[int]:
        """Wait for the step; the likeliest token of each of its rows, -1 where the logits gave no ground to choose."""
        self._tokens_host[:num_rows].copy_(self._tokens[:num_rows], non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        tokens: list[int] = self._tokens_host[:num_rows].tolist()
        return tokens

    def _attention(self, key: GraphKey, num_rows: int | None = None) -> StepAttention:
        part = self._inputs.tensors(key).part
        if num_rows is not None:
            part = replace(part, num_sequences=num_rows, num_tokens=num_rows)
        return StepAttention(self._dispatcher, [part], self._kv.k, self._kv.v)

    def _is_capturable(self, key: GraphKey) -> bool:
        return all(choice.is_capturable for choice in self._attention(key).choices)

    def _compute(self, key: GraphKey, attention: StepAttention) -> None:
        """What a graph holds: `size` rows from the inputs' memory to the results'."""
        tensors = self._inputs.tensors(key)
        hidden = self._decoder.forward(tensors.token_ids, tensors.positions, tensors.slots, self._kv, attention)
        chosen = greedy(self._decoder.logits(hidden, out=self._logits[: key.size]))
        self._tokens[: key.size].copy_(chosen.token_ids.masked_fill_(~chosen.is_finite, -1))
