"""Parts of a qualification that are an operator's own: wrong kernels, checks on hostile inputs, the timed call."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, Protocol

import torch

from kernels.vocabulary.operators import AnyShape, Operator, operator_of
from kernels.vocabulary.path import RunAttention
from kernels.vocabulary.recurrence_operator import CONVOLUTION, RECURRENCE
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase
from qualification.evidence.evidence import Check, Invariance
from qualification.measure.checks.attention_checks import check_path
from qualification.measure.checks.references import References
from qualification.measure.faults.attention_faults import passed_wrongly
from qualification.measure.inputs.attention_inputs import Case, cases, long_case, longest_lengths
from qualification.measure.inputs.far_pages import far_cases
from qualification.measure.orders.attention_order import check_attention_order
from qualification.measure.trials.collective_trial import CollectiveTrial
from qualification.measure.trials.convolution_trial import CONVOLUTION_TRIAL
from qualification.measure.trials.experts_trial import ExpertsTrial
from qualification.measure.trials.linear_trial import LinearTrial
from qualification.measure.trials.recurrence_trial import RECURRENCE_TRIAL

Run = Callable[..., None]  # of a path, with the arguments of its operator
Call = Callable[[], None]

_DECODE_SEQUENCES = {"cpu": 2, "cuda": 8}  # in the timed batch


class Trial(Protocol):
    """`shape` is of the operator, `run` the call of one of its paths."""

    def passed_wrongly(self, dtypes: frozenset[Dtype], device: torch.device, *, seed: int) -> tuple[object, ...]:
        """Try the checker on every planted fault, and on none; empty when it judges all of them right."""

    def tested(self, shape: Any, *, is_cpu: bool) -> tuple[int, int]:
        """Queries and keys of the longest sequence that is tested; of an operator without context the rows, twice."""

    def check(
        self, shape: Any, run: Run, device: torch.device, *, seed: int, references: References
    ) -> tuple[Check, ...]:
        """The worst result of each check over all hostile inputs. Errors of `run` are not caught."""

    def check_order(self, shape: Any, run: Run, device: torch.device, *, seed: int, order: str) -> Invariance:
        """Check whether bits depend on the batch, of a path that claims the order. Errors of `run` are not caught."""

    def timed_call(self, shape: Any, run: Run, device: torch.device, *, seed: int) -> tuple[Call, int]:
        """(the call that is timed, how often it is what `flops_of` counts), on inputs of the longest tested length.

        Of attention its number of sequences, of an operator whose shape counts rows 1.
        """

    def profiled_calls(self, shape: Any, run: Run, device: torch.device, *, seed: int) -> list[Call]:
        """Calls whose kernels are looked at beside those of the timed one: on few rows, which others may serve."""

    def calls(self, shape: Any, run: Run, device: torch.device, *, seed: int) -> Iterator[Call]:
        """Every call that `check` makes, for who compiles what a qualification launches.

        Calls on far pages are left out: they launch what others do, and each takes gigabytes.
        """


class AttentionTrial:
    """The trial of attention."""

    def passed_wrongly(self, dtypes: frozenset[Dtype], device: torch.device, *, seed: int) -> tuple[object, ...]:
        return passed_wrongly(dtypes, device, seed=seed)

    def tested(self, shape: AttentionShape, *, is_cpu: bool) -> tuple[int, int]:
        longest = longest_lengths(shape, is_cpu=is_cpu)
        return longest.queries, longest.keys

    def check(
        self, shape: AttentionShape, run: RunAttention, device: torch.device, *, seed: int, references: References
    ) -> tuple[Check, ...]:
        every = chain(cases(shape, device, seed=seed), far_cases(shape, device, seed=seed + 7))
        return check_path(run, every, references)

    def check_order(
        self, shape: AttentionShape, run: RunAttention, device: torch.device, *, seed: int, order: str
    ) -> Invariance:
        return check_attention_order(run, shape, device, seed=seed, order=order)

    def timed_call(
        self, shape: AttentionShape, run: RunAttention, device: torch.device, *, seed: int
    ) -> tuple[Call, int]:
        num_seqs = _DECODE_SEQUENCES[device.type] if shape.phase is Phase.DECODE else 1
        return call_of(run, long_case(shape, device, seed=seed, num_seqs=num_seqs)), num_seqs

    def profiled_calls(
        self, shape: AttentionShape, run: RunAttention, device: torch.device, *, seed: int
    ) -> list[Call]:
        """Two on short sequences, and in decode one on one alone, which another kernel may serve than several."""
        found = list(islice(self.calls(shape, run, device, seed=seed), 2))
        return found + ([call_of(run, long_case(shape, device, seed=seed))] if shape.phase is Phase.DECODE else [])

    def calls(self, shape: AttentionShape, run: RunAttention, device: torch.device, *, seed: int) -> Iterator[Call]:
        for case in cases(shape, device, seed=seed):
            yield call_of(run, case)


def call_of(run: RunAttention, case: Case) -> Call:
    out = torch.empty_like(case.q[..., : case.v.shape[-1]])
    return lambda: run(case.q, case.k, case.v, case.batch, case.flags, out)


TRIALS: Mapping[Operator, Trial] = MappingProxyType(
    {
        Operator.ATTENTION: AttentionTrial(),
        Operator.LINEAR: LinearTrial(),
        Operator.EXPERTS: ExpertsTrial(),
        Operator.COLLECTIVE: CollectiveTrial(),
        RECURRENCE: RECURRENCE_TRIAL,
        CONVOLUTION: CONVOLUTION_TRIAL,
    }
)


def trial_of(shape: AnyShape) -> Trial:
    return TRIALS[operator_of(shape)]
