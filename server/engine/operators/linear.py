"""Products with weights by the plan's decisions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.library.library_path import Note, RunMeasured, RunProposed
from kernels.linear.ordered.library_path import RunMeasuredInOrder, RunProposedInOrder
from kernels.linear.paths import LinearPath, RunLinear
from kernels.linear.rounded_input import Input, RoundedInput, TakesRounded, unrounded
from kernels.linear.shape import FP8_FORMATS, PLAIN, LinearShape
from kernels.system.device import dtype_of, torch_dtype
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import is_for_order
from kernels.vocabulary.row_buckets import LinearRows
from qualification.decision.decision import Decision
from server.engine.operators.launch_errors import LAUNCH_ERRORS
from server.engine.operators.rows_table import Calls, RowsTable, StepSizes
from server.engine.operators.table import OperatorChoice, TableOptions
from server.model.linear import SUMMED, Linear, WeightName
from server.model.step import Step

_MOST_COMPILED = 128  # rows of kernels of our own, of which each bucket has one


class Early(Protocol):
    """Taker of the rows of a result while later ones are still multiplied."""

    def pieces(self, num_rows: int, /) -> tuple[int, ...]:
        """Return the rows of each launch of a product of so many rows."""

    def start(self, rows: Tensor, /) -> None:
        """Take the next rows of a result that is multiplied in several launches."""


class LinearTable(RowsTable[LinearShape, RunLinear]):
    """The decisions for the products of a model."""

    def __init__(
        self,
        decisions: Mapping[LinearShape, Decision[LinearShape]],
        paths: Iterable[LinearPath],
        **options: Unpack[TableOptions[LinearShape]],
    ) -> None:
        """`paths`: those of this machine, as an engine launches them (`with_measured`)."""
        super().__init__(Operator.LINEAR, decisions, paths, **options)
        self._one_of_each: dict[LinearShape, ServedProduct] = {}  # by the shape of one row

    def warm_up(self) -> None:
        """Compile every kernel of our own, by running each: then none is compiled in service.

        More than 128 rows are the library's, but where products are summed in one order, or weights have few bits:
        there a kernel of our own multiplies what the library does not.
        """
        for product in self._one_of_each.values():
            weight = product.linear.weight
            for place, shape in enumerate(product.calls.shapes):
                choice, rows = product.calls.choices[place], shape.rows.hi or shape.rows.lo + 1
                path = None if choice is None else choice.decision.path
                has_few_bits = shape.weight_format != PLAIN
                is_own = path is not None and (is_for_order(path) or has_few_bits)
                if rows > _MOST_COMPILED and not is_own:
                    continue
                rows = min(rows, max(_MOST_COMPILED, shape.rows.lo + 1))
                x = torch.zeros(rows, weight.size[1], dtype=weight.dtype, device=weight.device)
                out = product.whole(x)
                if choice is not None and isinstance(choice.run, RunMeasuredInOrder):
                    choice.run.own(x, weight, product.linear.bias, product.shape.epilogue, out)

    def pairs(self, sizes: StepSizes) -> list[tuple[str, str]]:
        """Return the (path, shape) pairs of a step, of paths of our own: PyTorch's products are in every model's."""
        return [pair for pair in super().pairs(sizes) if not pair[0].startswith("torch.")]

    def normed(
        self, calls: Calls[LinearShape], x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Any
    ) -> tuple[RoundedInput, Tensor] | None:
        """Norm and round inputs by what is decided for so many rows; the next path where one fails to launch.

        None, with nothing done, where no path is left that takes them so. Raises DeviceLost where other ranks wait.
        """
        place, columns = calls.place(x.shape[0]), x.shape[1]
        while (choice := calls.choices[place]) is not None and isinstance(choice.run, TakesRounded):
            if columns > choice.run.most_columns:
                return None
            try:
                return choice.run.normed(x, residual, norm, eps, weight)
            except LAUNCH_ERRORS as error:
                self.replace(choice, error)
        return None

    def _given(self, run: RunLinear, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give a path plain inputs in the place of those that were rounded for another one."""
        x = given[0]
        return (x.plain(), *given[1:]) if isinstance(x, RoundedInput) and x.maker is not run else given

    def product(
        self,
        layer: int | None,
        name: Enum,
        linear: Linear,
        epilogue: Epilogue,
        *,
        is_sampled: bool | None = None,
        is_of_head: bool = False,
        early: Early | None = None,
    ) -> "ServedProduct":
        """Return what multiplies with a weight; outside of all layers `layer` is None. Called once for each weight.

        early       what takes rows of the products that the ranks sum up
        is_sampled  whether its rows are `StepSizes.num_sampled`; None: where it is the head
        is_of_head  whether a pass of the draft head multiplies with it, and no step of the model
        """
        weight = linear.weight
        rows, size_in = weight.size
        dtype, has_bias = dtype_of(weight.dtype), linear.bias is not None
        kind = LinearShape(dtype, size_in, rows // epilogue.parts, LinearRows.LE_1, has_bias, epilogue, weight.format())
        every = (replace(kind, rows=bucket) for bucket in LinearRows)
        is_sampled = name is WeightName.HEAD if is_sampled is None else is_sampled
        planned = (shape for shape in every if shape in self.decided)
        early = early if name in SUMMED else None
        calls = self.add(
            planned,
            num_launches=int(not is_of_head),
            num_of_head=int(is_of_head),
            is_sampled=is_sampled,
            pieces=None if early is None else early.pieces,
        )
        found = ServedProduct(self, calls, layer, name, kind, linear, torch_dtype(kind.dtype_out), early)
        self._one_of_each.setdefault(kind, found)
        return found


@dataclass(frozen=True, slots=True)
class ProductCall:
    """Call of one product: what it read [rows, size_in], and out [rows, size_out]."""

    product: "ServedProduct"
    read: Input
    out: Tensor

    @property
    def x(self) -> Tensor:
        """Return what was read in its own dtype: of a rounded norm it is normed again."""
        return unrounded(self.read)


@dataclass(frozen=True, slots=True)
class ServedProduct:
    """The product with one weight, by the path that is decided for the number of rows.

    layer      None: outside of all layers, as the head
    shape      that of one row
    dtype_out  of the result
    early      what takes rows of the result while later ones are multiplied, or None
    """

    table: LinearTable
    calls: Calls[LinearShape]
    layer: int | None
    name: Enum
    shape: LinearShape
    linear: Linear
    dtype_out: torch.dtype
    early: Early | None = None

    @property
    def rounds_inputs(self) -> bool:
        return self.shape.weight_format in FP8_FORMATS

    def normed(
        self, hidden: Tensor, residual: Tensor | None, norm: Tensor, eps: float
    ) -> tuple[RoundedInput, Tensor] | None:
        """Return the product's input and the residual. None, with nothing done, where x must be plain."""
        if not hidden.is_contiguous() or not (residual is None or residual.is_contiguous()):
            return None
        return self.table.normed(self.calls, hidden, residual, norm, eps, self.linear.weight)

    def __call__(self, x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return epilogue(x [rows, size_in] @ weight^T + bias). Raises NoPathError."""
        if self.early is None:
            return self.whole(x, out)
        x = unrounded(x)
        pieces = list(self.early.pieces(x.shape[0]))
        if len(pieces) == 1:
            return self.whole(x, out)
        if out is None:
            out = x.new_empty(x.shape[0], self.shape.size_out, dtype=self.dtype_out)
        for rows, result in zip(x.split_with_sizes(pieces), out.split_with_sizes(pieces), strict=True):
            choice = self._launch(rows, result)
            self.early.start(result)
        self._tapped(choice, x, out)
        return out

    def whole(self, x: Input, out: Tensor | None = None) -> Tensor:
        """Return what a call does, by one launch and for nobody else."""
        if out is None:
            out = x.new_empty(x.shape[0], self.shape.size_out, dtype=self.dtype_out)
        self._tapped(self._launch(x, out), x, out)
        return out

    def _launch(self, x: Input, out: Tensor) -> OperatorChoice[LinearShape, RunLinear]:
        linear = self.linear
        return self.table.launch(self.calls, x.shape[0], x, linear.weight, linear.bias, self.shape.epilogue, out)

    def _tapped(self, choice: OperatorChoice[LinearShape, RunLinear], x: Input, out: Tensor) -> None:
        """Show a call to who checks it: of several launches their last one's path, of the rows of all."""
        if self.table.tap is not None:
            self.table.tap(choice, ProductCall(self, x, out))


@dataclass(frozen=True, slots=True)
class MeasuredProducts:
    """Products by the library's algorithms: by the fastest of all, or by those of one order of sums.

    One of them has measured algorithms; the other multiplies as a path may without any.
    """

    by_time: RunMeasured
    in_order: RunMeasuredInOrder

    @classmethod
    def of(cls, note: Note) -> "MeasuredProducts":
        return cls(RunMeasured(note), RunMeasuredInOrder(note))


def with_measured(paths: Iterable[LinearPath], measured: MeasuredProducts) -> tuple[LinearPath, ...]:
    """Return the paths as an engine launches them: the library's by the algorithms measured for the model's weights."""
    return tuple(_with_measured(path, measured) for path in paths)


def _with_measured(path: LinearPath, measured: MeasuredProducts) -> LinearPath:
    if isinstance(path.run, RunProposedInOrder):
        return replace(path, run=measured.in_order)
    return replace(path, run=measured.by_time) if isinstance(path.run, RunProposed) else path
