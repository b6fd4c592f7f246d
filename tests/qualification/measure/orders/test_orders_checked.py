"""The check of an order: what it compares, what it leaves in the evidence, and that its inputs are those of a class."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.catalog import any_path_named
from kernels.collective.peers import AddNorm
from kernels.collective.shape import CollectiveShape, Follows
from kernels.linear.epilogue import Epilogue
from kernels.linear.shape import LinearShape
from kernels.linear.weights import LinearWeight
from kernels.system.device import read_fingerprint
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.row_buckets import LinearRows, TokenRows
from kernels.vocabulary.shape import AttentionShape, Dtype, Mask, Phase
from qualification.measure.faults.order_faults import OrderFault, seen_of
from qualification.measure.inputs.collective_inputs import CollectiveCase
from qualification.measure.orders.collective_order import any_case, check_collective_order
from qualification.measure.orders.first_bits import FirstBits
from qualification.measure.orders.row_batches import POOL_ROWS, order_counts, row_batches
from qualification.measure.qualify import Bench, qualify_path

CPU = torch.device("cpu")
PREFILL = AttentionShape(Phase.PREFILL, Dtype.FP32, Dtype.FP32, 2, 1, 8, Bucket.LE_128, Bucket.LE_128, window=40)
DECODE = replace(PREFILL, phase=Phase.DECODE, page_size=16)
EXTEND = replace(DECODE, phase=Phase.EXTEND)
ONE_CLASS = {
    "phases": [PREFILL, EXTEND, DECODE, replace(DECODE, phase=Phase.VERIFY)],
    "buckets": [EXTEND, replace(EXTEND, context_bucket=Bucket.LE_512)],
    "pages": [DECODE, replace(DECODE, page_size=32)],
    "images": [PREFILL, replace(PREFILL, mask=Mask.SPANS)],
    "rows": [LinearShape(Dtype.FP32, 40, 24, rows) for rows in (LinearRows.LE_1, LinearRows.LE_8, LinearRows.LE_2K)],
}


@pytest.mark.parametrize("name", ONE_CLASS)
def test_shapes_of_one_class_have_digests_of_one_input(name: str) -> None:
    digests: dict[str, str] = {}
    for shape in ONE_CLASS[name]:
        seen = seen_of(OrderFault.NONE, shape, CPU, seed=0)
        assert seen.is_passed
        assert [(point, digests.setdefault(point, digest)) for point, digest in seen.digests] == list(seen.digests)
    others = dict(seen_of(OrderFault.NONE, shape, CPU, seed=1).digests)
    assert all(others.get(point) != digest for point, digest in digests.items())


def each_row(x: Tensor, weight: LinearWeight, _bias: Tensor | None, _epilogue: Epilogue, out: Tensor) -> None:
    """Compute each row by a call of its own, in fp64."""
    values = weight.dequantized().double()
    for row, result in zip(x, out, strict=True):
        result.copy_(values @ row.double().clone())


def other_for_five(x: Tensor, weight: LinearWeight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Compute five rows in fp32 and any other number of them in fp64: right, and of other bits."""
    if x.shape[0] == 5:
        out.copy_(x @ weight.dequantized().T)
    else:
        each_row(x, weight, bias, epilogue, out)


def product(run: Any, order: str | None = "rows") -> AnyPath:
    return replace(any_path_named("torch.linear"), name="torch.linear", run=run, order=order)


def test_evidence_has_the_check_of_the_order() -> None:
    bench = Bench(read_fingerprint(CPU), CPU, timing_budget_s=0.01, may_profile=False)
    shape = LinearShape(Dtype.FP32, 40, 24, LinearRows.LE_8)
    holds, breaks = (qualify_path(shape, product(run), bench) for run in (each_row, other_for_five))
    assert holds.is_proven
    assert breaks.is_proven  # the numbers are right: it may serve where no order is asked for
    assert (holds.invariance.order, holds.invariance.is_passed) == ("rows", True)
    assert (breaks.invariance.order, breaks.invariance.is_passed) == ("rows", False)
    assert "5 rows" in breaks.invariance.failure
    for path, unasked in ((product(each_row, None), bench), (product(each_row), replace(bench, checks_orders=False))):
        assert qualify_path(shape, path, unasked).invariance is None


def test_bits_are_compared_not_numbers() -> None:
    rows = torch.arange(2)
    first = torch.tensor([[0.0, torch.nan], [1.0, 2.0]])
    for changed, num_changed in ((first.clone(), 0), (-first, 4), (first * torch.tensor([-1.0, 1.0]), 2)):
        bits = FirstBits()
        bits.meet("a", 2, rows, first, "first")
        bits.meet("a", 2, rows.flip(0), changed.flip(0), "again")
        seen = bits.result("order", {"a": rows})
        assert (seen.compared, seen.changed) == (4, num_changed)
        assert seen.where.startswith("again: ") == (num_changed > 0)
    with pytest.raises(ValueError, match="were not computed"):
        bits.result("order", {"a": rows, "b": rows})


def test_every_place_of_a_batch_has_hostile_neighbours() -> None:
    for count in (2, 9, 33):
        between = torch.zeros(count, dtype=torch.bool)
        seen = torch.zeros(POOL_ROWS, dtype=torch.bool)
        for batch in row_batches((count,), CPU):
            is_hostile = batch.source >= POOL_ROWS
            beside = torch.ones(count + 2, dtype=torch.bool)
            beside[1:-1] = is_hostile
            between |= ~is_hostile & beside[:-2] & beside[2:]
            seen[batch.source[~is_hostile]] = True
        assert between.all()
        assert seen.all()


def test_a_gpu_tries_every_number_of_rows_up_to_128() -> None:
    tried = {count for it in LinearRows for count in order_counts(it.lo, it.hi, 10**9, is_cpu=False)}
    assert tried >= {*range(1, 129), 255, 256, 257, 512, 8192, 8193}
    for it in LinearRows:
        for flops in (1, 10**12):  # what a CPU tries is bounded, and lies in the bucket
            counts = order_counts(it.lo, it.hi, flops, is_cpu=True)
            assert counts[0] == it.lo + 1
            assert all(it.holds(count) for count in counts)
            assert len(counts) <= (35 if flops == 1 else 1)


class Ranks:
    """Ranks of which each makes its inputs for itself, by the name of the case."""

    def __call__(self, case: CollectiveCase, part: Tensor, follows: AddNorm | None, out: Tensor) -> None:
        there = any_case(case.shape, case.name, CPU, seed=case.seed)
        assert torch.equal(there.parts.view(torch.int32), case.parts.view(torch.int32))
        out.copy_(part)
        if follows is not None:
            follows.residual.add_(part)

    def everywhere(self, own: Tensor) -> Tensor:
        return torch.stack([own, own])


def test_ranks_make_the_same_inputs_from_a_name() -> None:
    for follows, names in ((Follows.NOTHING, ["sums"]), (Follows.ADD_NORM, ["residual", "sums"])):
        shape = CollectiveShape(Dtype.FP32, 8, 2, follows, TokenRows.LE_16)
        seen = check_collective_order(Ranks(), shape, CPU, seed=0, order="ranks")
        assert seen.is_passed
        assert [name for name, _ in seen.digests] == names
