"""Experts with a bounded activation, and without a gate, by each path of their own, against fp64."""

import pytest
import torch

from kernels.experts.formats import FewBitFormat
from kernels.experts.kinds import ExpertFormat
from kernels.experts.paths import EXPERTS_PATHS, ExpertsPath
from kernels.experts.shape import ExpertForm, ExpertsShape
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.ungated_kind import Ungated
from kernels.vocabulary.path import Reject
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.experts_checks import check_experts
from qualification.measure.inputs.experts_inputs import even_case, experts_cases

CAPPED = CappedSilu(0.5)  # a fifth of the gates and three fifths of what they multiply are beyond it
ROWS, CPU = TokenRows.LE_16, torch.device("cpu")
SHAPES = (
    ExpertsShape(Dtype.FP32, ExpertFormat.PLAIN, 5, 2, 33, 17, CAPPED, False, ROWS),
    ExpertsShape(Dtype.FP16, ExpertFormat.PLAIN, 3, 3, 48, 40, CAPPED, False, ROWS),
    ExpertsShape(Dtype.FP16, FewBitFormat.FP8_BLOCKS, 4, 2, 128, 128, CAPPED, False, ROWS),
    ExpertsShape(Dtype.FP16, FewBitFormat.INT4_32, 4, 2, 72, 40, CAPPED, False, ROWS),
    ExpertsShape(Dtype.FP32, ExpertFormat.PLAIN, 5, 2, 33, 17, Ungated.RELU2, False, ROWS),
    ExpertsShape(Dtype.FP16, ExpertFormat.PLAIN, 4, 3, 40, 56, Ungated.RELU2, False, TokenRows.LE_128),
    ExpertsShape(Dtype.FP16, FewBitFormat.FP8_STATIC, 4, 2, 72, 40, Ungated.RELU2, False, ROWS),
    ExpertsShape(Dtype.FP16, FewBitFormat.FP8_ROWS, 4, 2, 72, 40, Ungated.RELU2, False, ROWS),
    ExpertsShape(Dtype.FP16, FewBitFormat.FP8_BLOCKS, 4, 2, 128, 128, Ungated.RELU2, False, ROWS),
    ExpertsShape(Dtype.FP16, FewBitFormat.INT4_32, 4, 2, 72, 40, Ungated.RELU2, False, ROWS),
)
OF_FORM = [path for path in EXPERTS_PATHS if path.limits.form is not ExpertForm.GATED]
PAIRS = [(path, shape) for path in OF_FORM for shape in SHAPES if not path.limits.rejections(shape)]


@pytest.mark.parametrize(("path", "shape"), PAIRS, ids=[f"{path.name}, {shape}" for path, shape in PAIRS])
def test_each_path_computes_the_experts_of_its_form(
    path: ExpertsPath, shape: ExpertsShape, device: torch.device
) -> None:
    if path.run is None:
        pytest.skip("needs Triton")
    is_triton = path.name.startswith("triton.")
    is_slow = is_triton and shape.format is not ExpertFormat.PLAIN  # in Triton's interpreter
    names = ("fewest",) if is_slow else ("none to most",) if is_triton else ("fewest", "none to most", "unequal")
    cases = [it for it in experts_cases(shape, device, seed=0) if it.name in names]
    assert {it.name: it.where for it in check_experts(path.run, cases) if not it.is_passed} == {}


def test_a_form_is_computed_by_its_own_paths_alone() -> None:
    for shape in SHAPES:
        taking = [path for path in EXPERTS_PATHS if not path.limits.rejections(shape)]
        assert taking
        assert {path.limits.form for path in taking} == {shape.form}
    packed = ExpertsShape(Dtype.BF16, ExpertFormat.MXFP4, 4, 2, 64, 32, Ungated.RELU2, False, ROWS)
    codes = {it.code for path in EXPERTS_PATHS for it in path.limits.rejections(packed)}
    assert all(path.limits.rejections(packed) for path in EXPERTS_PATHS)
    assert codes >= {Reject.LAYOUT}


@pytest.mark.usefixtures("rows_of_one_order")
@pytest.mark.parametrize("name", ["ungated", "capped"])
def test_a_token_has_the_same_bits_beside_any_number_of_others(name: str, device: torch.device) -> None:
    """Compare with the paths of no order, whose tiles of more tokens sum in other steps."""
    shape = next(it for it in SHAPES if it.form.name.lower() == name and it.dtype is Dtype.FP32)
    case = even_case(shape, device, seed=1)
    times = -(-9 * shape.num_experts // case.experts.numel())

    def changed(path: str) -> int:
        [found] = [it for it in EXPERTS_PATHS if it.name == path]
        assert found.run is not None
        hidden, experts, weights = (it.repeat(times, 1) for it in (case.hidden, case.experts.int(), case.weights))
        many, few = torch.empty_like(hidden), torch.empty_like(hidden[:1])
        found.run(hidden, experts, weights, case.expert_weights, shape.activation, many)
        found.run(hidden[:1], experts[:1], weights[:1], case.expert_weights, shape.activation, few)
        return int((few != many[:1]).sum())

    assert changed(f"triton.experts.{name}.ordered") == 0
    assert changed(f"triton.experts.{name}") > 0
