"""Sessions for tests of graphs: drive an engine, collect its outputs, sum the attention's launches; step inputs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kernels.vocabulary.shape import Phase
from server.engine.execution.graph_keys import GraphKey
from server.engine.execution.step_buffer import TOKEN_ARRAYS, DeviceInputs, StepTensors, TokenArray, graph_layout
from server.engine.execution.step_writer import StepWriter
from server.engine.scheduling.engine import Engine
from server.engine.scheduling.sequence import Batch, Sequence
from server.protocol.messages import DispatchCount, EmbeddedSpan, Fork, SamplingParams, StepOutput, Submit

_PHASES = frozenset(phase.value for phase in Phase)


def attention_counts(*outputs: StepOutput) -> list[DispatchCount]:
    return [count for output in outputs for count in output.record.dispatches if count.phase in _PHASES]


class Session:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: list[StepOutput] = []

    def submit(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        forks: Iterable[Fork] = (),
        embedded: Iterable[EmbeddedSpan] = (),
        **sampling: object,
    ) -> None:
        """Submit a prompt with `params`, or with 20 greedy tokens and what `sampling` changes of that."""
        if params is None:
            params = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
        self.engine.submit(Submit(name, prompt, params, forks=[*forks], embedded=tuple(embedded)))

    def step(self) -> None:
        is_compiling = self.engine.num_waiting > 0  # perhaps: then there may be nothing to compute yet
        output = self.engine.step()
        assert is_compiling or output is not None
        if output is not None:
            self.outputs.append(output)

    def drain(self) -> "Session":
        while self.engine.has_work:
            self.step()
        assert self.engine.step() is None  # idle: the pages are counted
        return self

    def tokens(self, name: str) -> list[int]:
        deltas = [delta for output in self.outputs for delta in output.deltas if delta.request_id == name]
        return [token for delta in deltas for token in delta.token_ids]

    def all_tokens(self, num_requests: int) -> list[list[int]]:
        return [self.tokens(f"r{index}") for index in range(num_requests)]

    def submit_all(self, prompts: list[list[int]], **sampling: Any) -> "Session":
        for index, prompt in enumerate(prompts):
            self.submit(f"r{index}", prompt, **sampling)
        return self

    def total(self, field: str) -> int:
        return sum(getattr(output.record, field) for output in self.outputs)

    def launches(self) -> Counter[tuple[str, str]]:
        """Attention launches by phase and path."""
        found: Counter[tuple[str, str]] = Counter()
        for count in attention_counts(*self.outputs):
            found[count.phase, count.path] += count.num_launches
        return found


class Inputs:
    """A writer of step buffers, and a device that gets them."""

    def __init__(
        self,
        keys: Iterable[GraphKey] = (),
        *,
        num_prompts: int = 1,
        page_size: int = 4,
        num_pages: int = 50,
        max_context: int = 200,
        token_arrays: tuple[TokenArray, ...] = TOKEN_ARRAYS,
    ) -> None:
        self.writer = StepWriter(page_size=page_size, num_pages=num_pages, is_pinned=False, token_arrays=token_arrays)
        self.device = DeviceInputs(torch.device("cpu"))
        layouts = {
            key: graph_layout(
                key,
                num_prompts=num_prompts,
                page_size=page_size,
                max_context=max_context,
                token_arrays=token_arrays,
            )
            for key in keys
        }
        if layouts:
            self.writer.declare(layouts)
            self.device.declare(layouts)

    def load(
        self, batch: Batch, key: GraphKey | None = None, chosen_at: Mapping[Sequence, int] | None = None
    ) -> StepTensors:
        """Write a batch and copy it to the device."""
        return self.device.load(self.writer.write(batch, chosen_at or {}, key))
