"""Experts with a bounded activation, by each path, against fp64."""

import pytest
import torch

from kernels.experts.capped.eager import run_capped_tiles
from kernels.experts.formats import FewBitFormat
from kernels.experts.kinds import ExpertFormat
from kernels.experts.paths import EXPERTS_PATHS
from kernels.experts.shape import ExpertsShape
from kernels.fused.capped_kind import CappedSilu
from kernels.vocabulary.path import Reject
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.experts_checks import check_experts
from qualification.measure.faults.experts_faults import ExpertsFault, wrong_experts
from qualification.measure.inputs.experts_inputs import even_case, experts_cases

CAPPED = CappedSilu(0.5)  # a fifth of the gates and three fifths of what they multiply are beyond it
ROWS = TokenRows.LE_16
SHAPES = (
    ExpertsShape(Dtype.FP32, ExpertFormat.PLAIN, 5, 2, 33, 17, CAPPED, False, ROWS),
    ExpertsShape(Dtype.FP16, ExpertFormat.PLAIN, 3, 3, 48, 40, CAPPED, False, ROWS),
    ExpertsShape(Dtype.FP16, FewBitFormat.FP8_BLOCKS, 4, 2, 128, 128, CAPPED, False, ROWS),
    ExpertsShape(Dtype.FP16, FewBitFormat.INT4_32, 4, 2, 72, 40, CAPPED, False, ROWS),
)
PATHS = [path for path in EXPERTS_PATHS if path.limits.is_capped]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_each_path_bounds_what_it_multiplies(path: object, shape: ExpertsShape, device: torch.device) -> None:
    run = next(it.run for it in PATHS if it is path)
    is_slow = path is PATHS[0] and shape.format is not ExpertFormat.PLAIN  # in Triton's interpreter
    names = ("fewest",) if is_slow else ("none to most",) if path is PATHS[0] else ("fewest", "none to most", "unequal")
    cases = [it for it in experts_cases(shape, device, seed=0) if it.name in names]
    if run is run_capped_tiles and shape.format is not ExpertFormat.PLAIN:
        assert [it.code for it in PATHS[-1].limits.rejections(shape)] == [Reject.LAYOUT]
        return
    assert run is not None
    assert {it.name: it.where for it in check_experts(run, cases) if not it.is_passed} == {}


def test_experts_that_bound_nothing_are_refused() -> None:
    cases = experts_cases(SHAPES[0], torch.device("cpu"), seed=0)
    assert not all(it.is_passed for it in check_experts(wrong_experts(ExpertsFault.CLAMP_IGNORED), cases))


def test_no_other_path_takes_a_bounded_activation() -> None:
    others = [path for path in EXPERTS_PATHS if not path.limits.is_capped]
    assert all(path.limits.rejections(shape) for path in others for shape in SHAPES)


def test_a_row_by_tiles_is_that_of_its_token_alone() -> None:
    case = even_case(SHAPES[0], torch.device("cpu"), seed=1)

    def computed(rows: slice) -> torch.Tensor:
        out = torch.empty_like(case.hidden[rows])
        given = case.hidden[rows], case.experts[rows].int(), case.weights[rows]
        run_capped_tiles(*given, case.expert_weights, CAPPED, out)  # type: ignore[arg-type]
        return out

    whole = computed(slice(None))
    assert all(torch.equal(computed(slice(row, row + 1))[0], whole[row]) for row in range(len(whole)))
