"""The trial of products with weights in a qualification: wrong products, checks on hostile inputs, the timed call."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice, product
from operator import itemgetter

import torch
from torch import Tensor

from kernels.linear.formats.int4_formats import INT4_FORMATS
from kernels.linear.library.library_path import RunProposed
from kernels.linear.paths import RunLinear
from kernels.linear.rounded_input import TakesRounded
from kernels.linear.shape import FP8_FORMATS, LinearShape, WeightFormat
from kernels.system.device import torch_dtype
from kernels.vocabulary.shape import Dtype
from qualification.evidence.evidence import Check, Invariance
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.linear_checks import check_linear, some_rows
from qualification.measure.checks.norm_checks import EPS, factors_of
from qualification.measure.faults import fp8_faults, int4_faults, norm_faults
from qualification.measure.faults.fp8_faults import Fp8Fault
from qualification.measure.faults.int4_faults import Int4Fault
from qualification.measure.faults.linear_faults import LinearFault, can_show_in, trial_shapes, wrong_linear
from qualification.measure.faults.norm_faults import NormFault, WrongNorm
from qualification.measure.inputs.linear_inputs import (
    LinearCase,
    LinearOperands,
    linear_cases,
    operands_of,
    rows_to_test,
)
from qualification.measure.orders.linear_order import check_linear_order

Call = Callable[[], None]
_RIGHT = (LinearFault.NONE, Fp8Fault.NONE, NormFault.NONE, Int4Fault.NONE)
AnyFault = LinearFault | Fp8Fault | NormFault | Int4Fault

_MOST_PROFILED = 12  # numbers of rows


@dataclass(frozen=True, slots=True)
class LinearPassedWrongly:
    """A fault that no check refused, or a right product that one did."""

    fault: AnyFault
    shape: LinearShape


def passed_wrongly_in_few_bits(
    formats: frozenset[WeightFormat], device: torch.device, *, seed: int
) -> tuple[LinearPassedWrongly, ...]:
    """Try the checker on every planted fault of weights of 8 or 4 bits, and on none; empty when it judges all right.

    formats  of which those of both kinds are tried that there are
    """
    wrong: list[tuple[LinearShape, AnyFault, RunLinear]] = []
    if formats & FP8_FORMATS:
        wrong += [
            (shape, fault, fp8_faults.wrong_fp8(fault))
            for shape in fp8_faults.trial_shapes()
            for fault in Fp8Fault
            if fp8_faults.can_show_in(fault, shape)
        ]
        wrong += [
            (shape, norm_fault, WrongNorm(norm_fault))
            for shape in fp8_faults.trial_shapes()[:-1]
            for norm_fault in NormFault
            if norm_faults.can_show_in(norm_fault, shape)
        ]
    if formats & INT4_FORMATS:
        of_shapes = product(int4_faults.trial_shapes(), Int4Fault)
        wrong += [(shape, fault, int4_faults.wrong_int4(fault)) for shape, fault in of_shapes]
    return _passed_wrongly(wrong, device, seed=seed)


def _passed_wrongly(
    wrong: Iterable[tuple[LinearShape, AnyFault, RunLinear]], device: torch.device, *, seed: int
) -> tuple[LinearPassedWrongly, ...]:
    """Return the products that the checker judges wrong. `wrong`: shape by shape, with the fault that each has."""
    found = []
    with one_thread():
        for shape, of_shape in groupby(wrong, key=itemgetter(0)):
            inputs = list(linear_cases(shape, operands_of(shape, device, seed=seed), seed=seed))
            for _, fault, run in of_shape:
                # The first case that refuses a fault decides.
                passes = all(check.is_passed for case in inputs for check in check_linear(run, [case]))
                if passes is not (fault in _RIGHT):
                    found.append(LinearPassedWrongly(fault, shape))
    return tuple(found)


class LinearTrial:
    """The trial of products with weights."""

    def passed_wrongly(
        self, dtypes: frozenset[Dtype], device: torch.device, *, seed: int
    ) -> tuple[LinearPassedWrongly, ...]:
        wrong = (
            (shape, fault, wrong_linear(fault, shape))
            for dtype in Dtype
            if dtype in dtypes
            for shape in trial_shapes(dtype)
            for fault in LinearFault
            if can_show_in(fault, shape)
        )
        return _passed_wrongly(wrong, device, seed=seed)

    def tested(self, shape: LinearShape, *, is_cpu: bool) -> tuple[int, int]:
        num_rows = rows_to_test(shape.rows, is_cpu=is_cpu)[-1]
        return num_rows, num_rows

    def check(
        self,
        shape: LinearShape,
        run: RunLinear,
        device: torch.device,
        *,
        seed: int,
        references: object,  # noqa: ARG002
    ) -> tuple[Check, ...]:
        """`references` are not kept: fp64 of a product takes about as long as its inputs."""
        runs: Sequence[RunLinear] = run.variants if isinstance(run, RunProposed) else (run,)
        return check_linear(runs, _cases(shape, run, device, seed=seed))

    def check_order(
        self, shape: LinearShape, run: RunLinear, device: torch.device, *, seed: int, order: str
    ) -> Invariance:
        is_library = isinstance(run, RunProposed)
        runs: Sequence[RunLinear] = run.variants if isinstance(run, RunProposed) else (run,)
        return check_linear_order(runs, shape, device, seed=seed, order=order, takes_strides=not is_library)

    def timed_call(self, shape: LinearShape, run: RunLinear, device: torch.device, *, seed: int) -> tuple[Call, int]:
        operands = operands_of(shape, device, seed=seed)
        num_rows, _ = self.tested(shape, is_cpu=device.type == "cpu")
        x = torch.randn(num_rows, shape.size_in, dtype=torch_dtype(shape.dtype), device=device)
        return _call(run, x, operands, shape), 1

    def profiled_calls(self, shape: LinearShape, run: RunLinear, device: torch.device, *, seed: int) -> list[Call]:
        """Calls on several numbers of rows, for which libraries choose kernels; of the measured choice each of its."""
        [case] = islice(_cases(shape, run, device, seed=seed), 1)
        counts = case.row_counts[:: -max(1, len(case.row_counts) // _MOST_PROFILED)]
        runs: Sequence[RunLinear] = run.variants if isinstance(run, RunProposed) else (run,)
        inputs = {count: (case.first_rows(count), _result(shape, count, device)) for count in counts}
        given = case.operands.weight, case.operands.bias, shape.epilogue
        pairs = [(each, count) for each in runs[:2] for count in counts]
        pairs += [(each, count) for each in runs[2:] for count in some_rows(counts)]
        calls = [partial(each, inputs[count][0], *given, inputs[count][1]) for each, count in pairs]
        return calls + [_normed_call(run, case, shape, count) for count in some_rows(counts) if _rounds(run, shape)]

    def calls(self, shape: LinearShape, run: RunLinear, device: torch.device, *, seed: int) -> Iterator[Call]:
        for case in _cases(shape, run, device, seed=seed):
            yield _call(run, case.first_rows(case.row_counts[0]), case.operands, shape)
            if _rounds(run, shape):
                yield _normed_call(run, case, shape, case.row_counts[0])


def _cases(shape: LinearShape, run: RunLinear, device: torch.device, *, seed: int) -> Iterator[LinearCase]:
    """Algorithms of the library take rows of x one behind the other."""
    is_library = isinstance(run, RunProposed)
    return linear_cases(shape, operands_of(shape, device, seed=seed), seed=seed, takes_strides=not is_library)


def _call(run: RunLinear, x: Tensor, operands: LinearOperands, shape: LinearShape) -> Call:
    return partial(run, x, operands.weight, operands.bias, shape.epilogue, _result(shape, x.shape[0], x.device))


def _rounds(run: RunLinear, shape: LinearShape) -> bool:
    """Return whether the norm before a product of this shape may round its inputs."""
    return isinstance(run, TakesRounded) and shape.size_in <= run.most_columns


def _normed_call(run: RunLinear, case: LinearCase, shape: LinearShape, num_rows: int) -> Call:
    """Return a norm with a residual, and the product of what it rounds."""
    assert isinstance(run, TakesRounded), "it was asked for"
    x, operands, given = case.x[:num_rows].contiguous(), case.operands, (factors_of(case.x), EPS, case.operands.weight)
    residual, out = torch.zeros_like(x), _result(shape, num_rows, x.device)

    def call() -> None:
        rounded, _ = run.normed(x, residual, *given)
        run(rounded, operands.weight, operands.bias, shape.epilogue, out)

    return call


def _result(shape: LinearShape, num_rows: int, device: torch.device) -> Tensor:
    return torch.empty(num_rows, shape.size_out, dtype=torch_dtype(shape.dtype_out), device=device)
