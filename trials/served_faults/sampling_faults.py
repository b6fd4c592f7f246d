"""Tokens that are chosen or scored in another way: parameters that a row loses, and a sampler that is wrong."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from kernels.sampling.sampling import SampleResult, SamplingTensors
from served_faults.plant import Fault, Kind, Plant
from server.engine.execution.grammars import BoundRow, Grammars
from server.engine.execution.sampler import Sampler
from server.engine.scheduling.runner_api import StepResult
from server.engine.scheduling.sequence import Batch
from support.engine import serving_faults as faults

Change = Callable[[SamplingTensors], SamplingTensors]


class ChangedSampler(Sampler):
    """Chooses by other parameters, and scores otherwise."""

    def __init__(self, change: Change = lambda it: it, scores: Callable[[Tensor], Tensor] = lambda it: it) -> None:
        self._change, self._scores = change, scores

    def choose(self, logits: Tensor, sampling: SamplingTensors | None) -> SampleResult:
        return super().choose(logits, None if sampling is None else self._change(sampling))

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int, *, is_reproducible: bool = False) -> Tensor:
        return self._scores(super().score(logits, token_ids, num_top, is_reproducible=is_reproducible))


def _sampler(change: Change) -> Callable[[], Plant]:
    return lambda: Plant(sampler=ChangedSampler(change))


def _changed(**changes: Callable[[Any], Any]) -> Change:
    """Change fields of the parameters that a sampler is given."""

    def change(sampling: SamplingTensors) -> SamplingTensors:
        return replace(sampling, **{name: it(getattr(sampling, name)) for name, it in changes.items()})

    return change


def _ignored(_: object) -> None:
    return None


def _lost(**values: object) -> Callable[[Batch], AbstractContextManager[object]]:
    """Sample each sequence of a step by these values in the place of its own."""

    @contextmanager
    def during(batch: Batch) -> Iterator[None]:
        sequences = batch.drawn_sequences
        wanted = [seq.sampling for seq in sequences]
        for seq in sequences:
            seq.sampling = structs.replace(seq.sampling, **values)  # type: ignore[arg-type]
        yield
        for seq, own in zip(sequences, wanted, strict=True):
            seq.sampling = own

    return during


def _scores_off(scores: Tensor) -> Tensor:
    scores[:, 0] -= 0.05
    return scores


class SecondBest(Sampler):
    """Takes the second best token of the first row once in 50 calls."""

    def __init__(self) -> None:
        self._calls = count()

    def choose(self, logits: Tensor, sampling: SamplingTensors | None) -> SampleResult:
        if next(self._calls) % 50 == 49 and logits.shape[0] < 9:
            logits = logits.clone()
            logits[0, logits[0].argmax()] = -torch.inf
        return super().choose(logits, sampling)


class AnotherToken:
    """Reports another token than was chosen once in 50 steps."""

    def __init__(self) -> None:
        self._steps = count()

    def __call__(self, result: StepResult) -> StepResult:
        if next(self._steps) % 50 != 49 or not result.tokens or not result.tokens[0]:
            return result
        return replace(result, tokens=[[(result.tokens[0][0] + 1) % 90], *result.tokens[1:]])


class OpenGrammars(Grammars):
    """Masks that allow every token."""

    def __init__(self, inner: Grammars) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def allowed(self, rows: "list[BoundRow] | tuple[BoundRow, ...]", num_rows: int) -> Tensor:  # type: ignore[override]
        return torch.full_like(self._inner.allowed(rows, num_rows), -1)


def _one_seed(seeds: Tensor) -> Tensor:
    return torch.full_like(seeds, 12345)


SAMPLING_FAULTS = (
    Fault("top_p ignored", Kind.SAMPLING, _sampler(_changed(top_p=torch.ones_like))),
    Fault("penalties ignored", Kind.SAMPLING, _sampler(_changed(penalties=_ignored))),
    Fault("masks of grammars ignored", Kind.SAMPLING, lambda: Plant(grammars=OpenGrammars)),
    Fault("seeds ignored", Kind.SAMPLING, _sampler(_changed(seeds=_one_seed))),
    Fault("temperature x 2", Kind.SAMPLING, _sampler(_changed(temperature=lambda it: it * 2))),
    Fault(
        "the second best token once in 50 calls", Kind.SAMPLING, lambda: Plant(sampler=SecondBest()), most_answers=200
    ),
    Fault("log probabilities off by 0.05", Kind.SAMPLING, lambda: Plant(sampler=ChangedSampler(scores=_scores_off))),
)
OWN_SAMPLING_FAULTS = (
    Fault("min_p ignored", Kind.SAMPLING, _sampler(_changed(log_min_p=lambda it: torch.full_like(it, -torch.inf)))),
    Fault("top_k of half", Kind.SAMPLING, _sampler(_changed(top_k=lambda it: (it // 2).clamp_(min=1)))),
    Fault("noise of the position before", Kind.SAMPLING, _sampler(_changed(positions=lambda it: it - 1))),
    Fault("biases ignored", Kind.SAMPLING, _sampler(_changed(biased_rows=_ignored))),
    Fault("a row loses its top_p", Kind.SAMPLING, lambda: Plant(during=_lost(top_p=1.0))),
    Fault("a row loses its penalties", Kind.SAMPLING, lambda: Plant(during=_lost(frequency_penalty=0.0))),
    Fault("another token once in 50 steps", Kind.SAMPLING, lambda: Plant(result=AnotherToken())),
    Fault("penalties of the neighbour", Kind.SAMPLING, lambda: Plant(during=faults.neighbours_penalties)),
    Fault(
        "the grammar of another request", Kind.SAMPLING, lambda: Plant(queued=faults.NeighboursGrammar()),
        most_answers=120,
    ),
    Fault("one seed for all answers", Kind.SAMPLING, lambda: Plant(batch=faults.one_seed_for_all)),
    Fault(
        "a seed that a preemption loses", Kind.SAMPLING, lambda: Plant(batch=faults.seed_forgotten), num_pages=16,
        asks=("seeded", "drawn"),
    ),
    Fault("every answer is greedy", Kind.SAMPLING, lambda: Plant(during=faults.greedy_for_all)),
)  # fmt: skip
