"""Drives an engine in this process as its server does, without HTTP: what benches of whole steps are made of."""

import time
from collections.abc import Callable

from kernels.vocabulary.shape import Phase
from server.engine.scheduling.engine import Engine
from server.engine.scheduling.step_parts import Part
from server.protocol.messages import FinishReason, SamplingParams, StepOutput, Submit

_TOKEN = 7  # every prompt's; prefix caching is off in a bench


class RequestFailed(Exception):
    """The engine ended a request with an error."""


class Driver:
    """Submits prompts of one token, greedy, that end by their length alone."""

    def __init__(self, engine: Engine, mark: Callable[[Part | None], None] = lambda _: None) -> None:
        """`mark` gets the part that the engine is at when it is called, and None when it returns."""
        self.engine = engine
        self._mark = mark
        self._num_requests = 0
        self._names: list[str] = []  # of what may still run

    def submit(self, num_tokens: int, max_tokens: int) -> None:
        """Queue a request."""
        self._num_requests += 1
        name = f"bench-{self._num_requests}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._mark(Part.REPORT)
        self.engine.submit(Submit(name, [_TOKEN] * num_tokens, sampling))
        self._mark(None)
        self._names.append(name)

    def serve(self, num_requests: int, num_tokens: int, max_tokens: int) -> tuple[list[StepOutput], list[float]]:
        """Every output, and when each came, in seconds since the submission. The engine is idle before and after.

        Raises RequestFailed: the time of a step that the memory did not suffice for is no step's.
        """
        for _ in range(num_requests):
            self.submit(num_tokens, max_tokens)
        started, outputs, seconds = time.perf_counter(), [], []
        while self.engine.has_work:
            output = self._step()
            if output is not None:
                _refuse_failed(output)
                outputs.append(output)
                seconds.append(time.perf_counter() - started)
        self._names.clear()
        return outputs, seconds

    def step(self) -> StepOutput:
        """A step of an engine that has work. Raises RequestFailed."""
        output = self._step()
        assert output is not None, "every request has ended"
        _refuse_failed(output)
        return output

    def _step(self) -> StepOutput | None:
        self._mark(Part.REPORT)
        output = self.engine.step()
        self._mark(None)
        return output

    def clear(self) -> None:
        """End whatever runs."""
        for name in self._names:
            self.engine.cancel(name)
        self._names.clear()
        while self.engine.has_work:
            self._step()


def _refuse_failed(output: StepOutput) -> None:
    """Raise RequestFailed where a request has ended with an error."""
    for delta in output.deltas:
        if delta.finish_reason is FinishReason.ERROR:
            raise RequestFailed(delta.error_message)


def is_decode_of(output: StepOutput, num_sequences: int) -> bool:
    """True when a step computed one token of each of so many sequences and nothing else."""
    phases = {phase.value for phase in Phase}  # not the operators beside attention
    counts = [it for it in output.record.dispatches if it.phase in phases]
    return bool(counts) and all(it.phase == "decode" and it.num_sequences == num_sequences for it in counts)
