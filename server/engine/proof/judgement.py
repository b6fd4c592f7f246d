"""The kernels of a recorded step, compared with what the evidence promises of the paths that serve it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kernels.vocabulary.operators import AnyShape, Operator
from kernels.vocabulary.path import AnyPath, KernelPath
from qualification.attest.explain import explain
from qualification.attest.operator_promises import OperatorMismatch, OperatorPromises, operator_mismatches
from qualification.attest.promise import (
    Promise,
    attention_markers,
    call_mismatch,
    kernels_promised,
    promise_of,
    replay_mismatch,
)
from qualification.evidence.evidence import Evidence
from server.engine.operators.attention_table import Choice
from server.engine.proof.step_record import StepRecord
from server.protocol.messages import ExplainedTime


@dataclass(frozen=True, slots=True)
class Promises:
    """Kernels that each choice may launch."""

    paths: Mapping[str, KernelPath]
    evidence: Mapping[tuple[AnyShape, str], Evidence]
    all_paths: Mapping[str, AnyPath] = field(default_factory=dict)  # of every operator

    def of(self, choice: Choice) -> Promise:
        """Evidence of another source, which serves under DEGRADE alone, names the kernels of that one."""
        path = self.paths[choice.use.path]
        evidence = self.evidence.get((choice.decision.shape, path.name))
        is_of_it = evidence is not None and evidence.source_digest == path.source_digest
        return promise_of(path, evidence if is_of_it else None)

    @property
    def markers(self) -> frozenset[str]:
        return attention_markers(self.paths.values())


@dataclass(frozen=True, slots=True)
class Judgement:
    """Differences of a step from what was promised. `kernels`: attention's, by how often they ran."""

    wrong_choices: list[tuple[Choice, str]]
    wrong_operators: list[OperatorMismatch]
    kernels: dict[str, int]

    @property
    def details(self) -> tuple[str, ...]:
        """Return each thing that is wrong, once; nothing where the step matches."""
        of_choices = (detail for _, detail in self.wrong_choices)
        return tuple(dict.fromkeys([*of_choices, *(it.detail for it in self.wrong_operators)]))


def explained_time(
    seconds: Mapping[str, float],
    proven: Mapping[str, Collection[str]],
    *,
    in_attention: Mapping[str, float] = MappingProxyType({}),
) -> ExplainedTime:
    """Explain the time of kernels by their whole names, as a report says it; see `explain`."""
    found = explain(seconds, proven, in_attention=in_attention)
    return ExplainedTime(
        share=found.share,
        seconds={it.value: time for it, time in found.seconds.items()},
        unproven=dict(found.unproven),
        unexplained=dict(found.unexplained),
    )


class Judge:
    """Compares recorded steps with promises. It changes nothing."""

    def __init__(self, promises: Promises, others: Callable[[], Mapping[Operator, OperatorPromises]] = dict) -> None:
        """`others`: promises of operators beside attention, by the decisions as they stand."""
        self.promises = promises
        self._others = others

    def judge(self, step: StepRecord) -> Judgement:
        """Compare the kernels of a step with the promises of its paths."""
        kernels = step.kernels
        return Judgement(
            wrong_choices=self._wrong_choices(step),
            wrong_operators=self._wrong_operators(step, kernels),
            kernels=dict(sorted(kernels.items())) if step.choices else self._attention_only(kernels, step.served),
        )

    def explain(self, step: StepRecord, judgement: Judgement, seconds: Mapping[str, float]) -> ExplainedTime:
        """Explain the time of a step by kernel. The evidence of choices that are judged wrong does not hold."""
        bad = [choice for choice, _ in judgement.wrong_choices]
        good = [choice for choice, _ in step.served if choice not in bad and choice.decision.status.is_valid]
        proven = {operator.value: promises.proven(seconds) for operator, promises in self._others().items()}
        proven[Operator.ATTENTION.value] = kernels_promised((self.promises.of(choice) for choice in good), seconds)
        return explained_time(seconds, proven, in_attention=step.seen.seconds_in_calls)

    def _wrong_choices(self, step: StepRecord) -> list[tuple[Choice, str]]:
        choices, served, seen = step.choices, step.served, step.seen
        if not choices:
            promises = [(self.promises.of(choice), count) for choice, count in served]
            detail = replay_mismatch(promises, seen.outside, self.promises.markers)
            return [] if detail is None else [(choice, detail) for choice, _ in served]
        found = []
        for choice, call in zip(choices, seen.calls, strict=True):
            detail = call_mismatch(self.promises.of(choice), call)
            if detail is not None:
                found.append((choice, detail))
        foreign = sorted(set(seen.outside) & self.promises.markers)
        if foreign:
            found += [(choice, f"{', '.join(foreign)} ran outside of every attention call") for choice, _ in served]
        num_counted = sum(count for _, count in served)
        if num_counted != len(choices):
            detail = f"{num_counted} launches were counted, {len(choices)} calls were made"
            found += [(choice, detail) for choice, _ in served]
        return found

    def _wrong_operators(self, step: StepRecord, kernels: Mapping[str, int]) -> list[OperatorMismatch]:
        """Compare a step's kernels, as far as they are this project's, with what its other operators' paths promise."""
        if step.attention is None or not step.is_whole:
            return []
        promised = []
        for decision in step.attention.other_decisions():
            if decision.path is not None and decision.path in self.promises.all_paths:
                path = self.promises.all_paths[decision.path]
                evidence = self.promises.evidence.get((decision.shape, path.name))
                is_of_it = evidence is not None and evidence.source_digest == path.source_digest
                promised.append((path, promise_of(path, evidence if is_of_it else None)))
        return operator_mismatches(promised, kernels)

    def _attention_only(self, kernels: Mapping[str, int], served: list[tuple[Choice, int]]) -> dict[str, int]:
        """A replay is profiled as a whole; of all its kernels, the attention's."""
        known = self.promises.markers.union(*(self.promises.of(choice).names for choice, _ in served))
        return {name: count for name, count in sorted(kernels.items()) if name in known}
