"""Each path of a CPU that claims an order is right on hostile inputs, and has one order in all shapes of a class."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.catalog import ALL_PATHS
from kernels.experts.kinds import ClampedSwiglu
from kernels.experts.shape import ExpertsShape
from kernels.fused.activation_kind import Activation
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.ungated_kind import Ungated
from kernels.linear.epilogue import Epilogue
from kernels.linear.shape import LinearShape
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.operators import AnyShape, Operator
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.row_buckets import LinearRows, TokenRows
from kernels.vocabulary.shape import AttentionShape, Dtype, Mask
from kernels.vocabulary.value_shape import Values, values_of, with_values
from qualification.evidence.anchors import class_of
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.references import References
from qualification.measure.faults.indexed_faults import trial_shapes_of_indexers
from qualification.measure.faults.order_faults import trial_shapes
from qualification.measure.trials.trial import trial_of

CPU = torch.device("cpu")
FLAGS = (
    {},
    {"softcap": 20.0, "sinks": True, "mask": Mask.SPANS},
    {"window": 150, "sinks": True},
    {"window": 5, "softcap": 20.0, "mask": Mask.SPANS},
)


def shapes_of(operator: Operator, dtype: Dtype) -> Iterator[AnyShape]:
    """Small shapes of several classes; of attention in its phases, under flags, and of narrow values."""
    for shape in trial_shapes(operator, dtype):
        if isinstance(shape, AttentionShape):
            flagged = [replace(shape, **flags) for flags in FLAGS]  # type: ignore[arg-type]
            yield from flagged
            if values_of(shape) is None:
                yield from (with_values(it, Values(10)) for it in flagged)
        elif isinstance(shape, LinearShape):
            yield replace(shape, has_bias=True)
            yield replace(shape, size_in=100, size_out=37, rows=LinearRows.LE_64)
            yield replace(shape, epilogue=Epilogue.SWIGLU)
        elif isinstance(shape, ExpertsShape):
            yield replace(shape, activation=Activation.GELU)
            yield replace(shape, num_experts=6, activation=ClampedSwiglu(), has_bias=True, rows=TokenRows.LE_128)
            yield from (replace(shape, activation=it) for it in (CappedSilu(0.5), Ungated.RELU2))
    if operator is Operator.ATTENTION:
        yield from trial_shapes_of_indexers(dtype)


# Sums over ranks take several processes, and test_eager_recurrence.py cuts recurrences.
OPERATORS = (Operator.ATTENTION, Operator.LINEAR, Operator.EXPERTS)
PATHS = [
    it for it in ALL_PATHS if it.order is not None and Device.CPU in it.limits.devices and it.operator in OPERATORS
]


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
@pytest.mark.parametrize("path", PATHS, ids=lambda it: it.name)
def test_a_path_is_right_and_has_one_order_in_all_phases(path: AnyPath, dtype: Dtype) -> None:
    shapes = [it for it in shapes_of(path.operator, dtype) if path.serves(it) and not path.limits.rejections(it)]
    assert shapes
    assert path.run is not None
    assert path.order is not None
    digests: dict[tuple[str, str], str] = {}
    with one_thread():
        for shape in shapes:
            checks = trial_of(shape).check(shape, path.run, CPU, seed=1, references=References())
            assert [it for it in checks if not it.is_passed] == [], shape
            seen = trial_of(shape).check_order(shape, path.run, CPU, seed=1, order=path.order)
            assert seen.is_passed, (shape, seen.failure)
            for name, digest in seen.digests:
                assert digests.setdefault((class_of(shape), name), digest) == digest, shape
