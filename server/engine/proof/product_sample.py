"""Samples of served products and experts: some rows of one call, and how they are judged.

The rules and limits are those of qualification (kernels/reference/linear.py and experts.py, docs/limits.md).
"""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from kernels.reference.compare import Reference, errors_of
from kernels.reference.experts import experts_reference
from kernels.reference.linear import linear_reference, units_may_take_8_bits
from kernels.vocabulary.operators import Operator
from server.engine.operators.experts import ExpertsCall
from server.engine.operators.linear import ProductCall, ServedProduct
from server.engine.proof.shadow_sample import Judgement, digest_of

MOST_ROWS = 16
_LEAST_COLUMNS = 64
# Numbers of weights of one judgement, in fp64: they are most of its memory and time. 2**25 take an H200 about 2 ms.
_MOST_OF_WEIGHT = {"cpu": 2**20, "cuda": 2**25}
_MOST_OF_EXPERTS = {"cpu": 2**22, "cuda": 2**28}
_MOST_FACTOR = 1e9  # reported for an output that holds NaN or infinities too: JSON has neither


@dataclass(frozen=True, slots=True)
class ProductSample:
    """Copies of some rows of a product's x [n, size_in] and y [n, size_out]; `rows`: where they were in the step,
    which has `rows.stop` of them.
    """

    path: str
    product: ServedProduct
    rows: range
    x: Tensor
    y: Tensor

    @property
    def lane(self) -> Operator:
        return Operator.LINEAR

    @property
    def digest(self) -> str:
        """Return the digest of x: samples with the same digest repeat the same computation."""
        return digest_of(self.x)

    @property
    def weight(self) -> str:
        """Return the name of the weight in its layer."""
        return str(self.product.name.value)

    @torch.inference_mode()
    def judge(self, rng: Random) -> Judgement:
        """Compute some columns in fp64 and compare. Waits for the device. Raises torch.OutOfMemoryError."""
        layer, columns = self.product.layer, _drawn_columns(self, rng)
        where = self.weight if layer is None else f"{self.weight} of layer {layer}"
        out, reference = self.y[:, columns], _product_reference(self, columns)
        return judged_rows(self.path, where, self.rows, self.x, out, reference, first_column=columns.start)


@dataclass(frozen=True, slots=True)
class ExpertsSample:
    """Some rows of what a layer's experts read and wrote; `rows`: where they were in the step."""

    path: str
    layer: int
    rows: range
    call: ExpertsCall

    @property
    def lane(self) -> Operator:
        return Operator.EXPERTS

    @property
    def digest(self) -> str:
        return digest_of(self.call.hidden)

    @property
    def weight(self) -> None:
        """Return None: a sample is of all weights of a mixture."""
        return None

    @torch.inference_mode()
    def judge(self, rng: Random) -> Judgement:  # noqa: ARG002
        """Compute the rows in fp64 and compare. Waits for the device. Raises torch.OutOfMemoryError."""
        call = self.call
        reference = experts_reference(call.hidden, call.experts, call.shares, call.weights, call.mixture.activation)
        return judged_rows(self.path, f"experts of layer {self.layer}", self.rows, call.hidden, call.out, reference)


def take_product(call: ProductCall, path: str, rng: Random) -> ProductSample:
    """Copy some rows of a call, without waiting for the device. Raises torch.OutOfMemoryError."""
    rows = _drawn_rows(call.x.shape[0], MOST_ROWS, rng)
    return ProductSample(path, call.product, rows, *(_rows_of(it, rows) for it in (call.x, call.out)))


def take_experts(call: ExpertsCall, path: str, layer: int, rng: Random) -> ExpertsSample:
    """Copy some rows of a call, without waiting for the device. Raises torch.OutOfMemoryError."""
    numbers = 3 * call.hidden.shape[1] * call.mixture.width * call.experts.shape[1]  # of weights that a row visits
    most = max(1, _MOST_OF_EXPERTS[call.hidden.device.type] // numbers)
    rows = _drawn_rows(call.hidden.shape[0], min(MOST_ROWS, most), rng)
    hidden, experts, shares, out = (_rows_of(it, rows) for it in (call.hidden, call.experts, call.shares, call.out))
    return ExpertsSample(path, layer, rows, ExpertsCall(hidden, experts, shares, call.weights, call.mixture, out))


def judged_rows(
    path: str, where: str, rows: range, read: Tensor, out: Tensor, reference: Reference, *, first_column: int = 0
) -> Judgement:
    """Compare some rows and columns of a result with its truth."""
    reason = _why_not_judged(read, out, reference)
    if reason is not None:
        return Judgement(None, detail=reason)
    errors = errors_of(out if out.dim() == 3 else out[:, None], reference)
    row, _, column = errors.worst_at
    position = rows[row]
    factor = _MOST_FACTOR if errors.num_nonfinite else min(errors.worst, _MOST_FACTOR)
    if factor <= 1:
        return Judgement(factor, len(rows), None, position)
    detail = f"{path}, {where}, row {position} of the step, column {first_column + column}"
    detail += f": off by {errors.worst_error:.3g}, at most {errors.worst_limit:.3g} may be"
    if errors.num_nonfinite:
        detail += f"; {errors.num_nonfinite} numbers are not finite"
    return Judgement(factor, len(rows), None, position, detail)


def _drawn_rows(num_rows: int, most: int, rng: Random) -> range:
    """Draw at most `most` rows at equal distances: a slice, which is copied without an index on the device."""
    step = -(-num_rows // most)
    return range(rng.randrange(min(step, num_rows)), num_rows, step)


def _rows_of(tensor: Tensor, rows: range) -> Tensor:
    return tensor[rows.start : rows.stop : rows.step].clone()


def _drawn_columns(sample: ProductSample, rng: Random) -> slice:
    """Columns of the result to compare: as many neighbours as their part of the weight may have numbers."""
    shape, device = sample.product.shape, sample.x.device.type
    count = max(_LEAST_COLUMNS, _MOST_OF_WEIGHT[device] // (shape.size_in * shape.epilogue.parts))
    start = rng.randrange(max(1, shape.size_out - count + 1))
    return slice(start, min(start + count, shape.size_out))


def _product_reference(sample: ProductSample, columns: slice) -> Reference:
    product = sample.product
    weight, epilogue = product.linear.weight, product.shape.epilogue
    firsts = (part * product.shape.size_out for part in range(epilogue.parts))
    rows = [weight.dequantized(slice(first + columns.start, first + columns.stop)) for first in firsts]
    bias = None if product.linear.bias is None else product.linear.bias[columns]
    x = weight.as_multiplied(sample.x)
    numbers = torch.cat(rows) if len(rows) > 1 else rows[0]
    of_8_bits = units_may_take_8_bits(weight.format(), sample.rows.stop)
    return linear_reference(x, numbers, bias, epilogue, sample.x.dtype, of_8_bits=of_8_bits)


def _why_not_judged(read: Tensor, out: Tensor, reference: Reference) -> str | None:
    """Inputs of which nothing can be said: a right kernel may give anything for them."""
    if not bool(torch.isfinite(read).all()):
        return "the rows that it read hold numbers that are not finite"
    most = torch.finfo(out.dtype).max
    if not bool((reference.truth.abs() + reference.limit < most).all()):  # NaN is below nothing
        return f"results may exceed the range of {str(out.dtype).removeprefix('torch.')}"
    return None
