"""The checkers of all operators: each planted fault is refused, what is right passes, and no trial is for show."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum

import pytest
import torch

from kernels.linear.formats.int4_formats import INT4_FORMATS
from kernels.linear.shape import FP8_FORMATS
from kernels.recurrence.shape import RecurrenceShape
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.recurrence_operator import CONVOLUTION
from kernels.vocabulary.shape import Dtype, Phase
from qualification.evidence.evidence import Check
from qualification.measure.faults.attention_faults import Fault, narrow_passed_wrongly
from qualification.measure.faults.cache_faults import CacheFault, cache_faults_passed_wrongly
from qualification.measure.faults.collective_faults import CollectiveFault
from qualification.measure.faults.convolution_faults import ConvolutionFault
from qualification.measure.faults.experts_faults import ExpertsFault
from qualification.measure.faults.fp8_faults import Fp8Fault
from qualification.measure.faults.indexed_faults import IndexedFault, indexed_faults_passed_wrongly
from qualification.measure.faults.int4_faults import Int4Fault
from qualification.measure.faults.latent_faults import LatentFault, latent_faults_passed_wrongly
from qualification.measure.faults.linear_faults import LinearFault
from qualification.measure.faults.norm_faults import NormFault
from qualification.measure.faults.recurrence_faults import RecurrenceFault
from qualification.measure.trials.linear_trial import passed_wrongly_in_few_bits
from qualification.measure.trials.recurrence_trial import RECURRENCE_TRIAL
from qualification.measure.trials.trial import TRIALS

CPU = torch.device("cpu")
Passed = Callable[..., Sequence[object]]
OF_NARROW_VALUES = {Fault.STRIDES_OF_KEYS, Fault.SCALE_OF_VALUES}
# The one shows in fp32, the other where drafted tokens are verified (test_recurrence_faults.py).
OF_OTHER_RECURRENCES = {RecurrenceFault.TF32, RecurrenceFault.DRAFTS_FOLDED}


def prompts(dtype: Dtype) -> list[RecurrenceShape]:
    """Return the shapes of a trial of recurrences that take the least time; a qualification tries the others too."""
    return [it for it in RECURRENCE_TRIAL.trial_shapes(dtype) if it.phase is Phase.EXTEND]


def in_few_bits(_: frozenset[Dtype], device: torch.device, *, seed: int) -> Sequence[object]:
    return passed_wrongly_in_few_bits(FP8_FORMATS | INT4_FORMATS, device, seed=seed)


# The faults that were passed wrongly, of some dtypes; and all that must show in some shape.
TRIED: dict[str, tuple[Passed, set[Enum]]] = {
    "attention": (TRIALS[Operator.ATTENTION].passed_wrongly, {*Fault} - OF_NARROW_VALUES),
    "narrow values": (narrow_passed_wrongly, OF_NARROW_VALUES),
    "latents": (latent_faults_passed_wrongly, {*LatentFault}),
    "indexers": (indexed_faults_passed_wrongly, {*IndexedFault}),
    "cache of 8 bits": (cache_faults_passed_wrongly, {*CacheFault}),
    "products": (TRIALS[Operator.LINEAR].passed_wrongly, {*LinearFault}),
    "products of few bits": (in_few_bits, {*Fp8Fault, *NormFault, *Int4Fault}),
    "experts": (TRIALS[Operator.EXPERTS].passed_wrongly, {*ExpertsFault}),
    "sums": (TRIALS[Operator.COLLECTIVE].passed_wrongly, {*CollectiveFault}),
    "recurrences": (
        replace(RECURRENCE_TRIAL, trial_shapes=prompts).passed_wrongly,
        {*RecurrenceFault} - OF_OTHER_RECURRENCES,
    ),
    "convolutions": (TRIALS[CONVOLUTION].passed_wrongly, {*ConvolutionFault}),
}
of_each_trial = pytest.mark.parametrize("name", TRIED)


def dtypes_of(name: str) -> frozenset[Dtype]:
    return frozenset({Dtype.BF16} if name == "recurrences" else {Dtype.FP32, Dtype.BF16})


def faults_of(passed: Sequence[object]) -> set[Enum]:
    return {it[0] if isinstance(it, tuple) else it.fault for it in passed}  # type: ignore[attr-defined]


@of_each_trial
def test_each_planted_fault_is_refused_and_none_passes(name: str) -> None:
    passed, _ = TRIED[name]
    assert passed(dtypes_of(name), CPU, seed=1) == ()


@of_each_trial
@pytest.mark.parametrize("passes", [True, False])
def test_a_checker_of_one_verdict_is_found_out(name: str, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault is tried in some shape, and what is right in all of them."""
    monkeypatch.setattr(Check, "is_passed", passes)
    passed, every = TRIED[name]
    is_right = {fault for fault in every if fault.name == "NONE"}
    found = faults_of(passed(dtypes_of(name), CPU, seed=1))
    assert found >= every - is_right if passes else found >= is_right
