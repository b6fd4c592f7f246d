"""The Gluon experts against fp64, on an sm_90 GPU; what a number of tokens chooses, anywhere."""

from collections.abc import Callable

import pytest
import torch

from kernels.experts.formats import FewBitFormat
from kernels.experts.fp8 import launch as fp8_launch
from kernels.experts.hopper.launch import run_experts_hopper, run_in_tiles
from kernels.experts.int4 import launch as int4_launch
from kernels.experts.kinds import ClampedSwiglu, ExpertFormat
from kernels.experts.mxfp4 import launch as codes_launch
from kernels.experts.mxfp4.tilings import ALL_TILES
from kernels.experts.paths import EXPERTS_PATHS
from kernels.experts.shape import ExpertsShape
from kernels.experts.tiles import hopper_rows
from kernels.experts.weights import ExpertWeights
from kernels.fused.activation_kind import Activation
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.experts_checks import check_experts
from qualification.measure.inputs.experts_inputs import experts_cases

ROWS, PLAIN = TokenRows.LE_128, ExpertFormat.PLAIN
MIXTURES = {
    "bf16": ExpertsShape(Dtype.BF16, PLAIN, 12, 4, 320, 160, Activation.SILU, False, ROWS),
    "bias, clamped": ExpertsShape(Dtype.FP16, PLAIN, 7, 3, 192, 96, ClampedSwiglu(), True, ROWS),
    "128 experts": ExpertsShape(Dtype.BF16, PLAIN, 128, 8, 512, 288, Activation.GELU_TANH, False, ROWS),
}
FEW_BITS = {
    "fp8 blocks": ExpertsShape(Dtype.BF16, FewBitFormat.FP8_BLOCKS, 9, 3, 384, 640, Activation.GELU_TANH, False, ROWS),
    "fp8 rows": ExpertsShape(Dtype.FP16, FewBitFormat.FP8_ROWS, 128, 8, 512, 256, Activation.SILU, False, ROWS),
    "int4": ExpertsShape(Dtype.BF16, FewBitFormat.INT4_128, 9, 3, 384, 640, Activation.SILU, False, ROWS),
}
CODES = ExpertsShape(
    Dtype.BF16, ExpertFormat.MXFP4, 6, 2, 320, 192, ClampedSwiglu(), True, TokenRows.LE_512
)  # fmt: skip
CODES_IN_TILES = {
    "bias, clamped": CODES,
    "narrow": ExpertsShape(Dtype.BF16, ExpertFormat.MXFP4, 5, 1, 64, 64, Activation.SILU, False, ROWS),
}
NARROW = ExpertsShape(Dtype.FP16, PLAIN, 5, 1, 64, 16, Activation.SILU, False, ROWS)


HEIGHTS = (1, 16, 32, 64, 128)
# A mixture, what computes it in tiles that the caller chooses, and tiles.
IN_TILES: list[tuple[ExpertsShape, Callable[..., None], object]] = [
    *((mixture, run_in_tiles, rows) for mixture in MIXTURES.values() for rows in HEIGHTS),
    *((FEW_BITS[name], fp8_launch.run_in_tiles, rows) for name in ("fp8 blocks", "fp8 rows") for rows in HEIGHTS),
    *((FEW_BITS["int4"], int4_launch.run_in_tiles, rows) for rows in HEIGHTS),
    *((mixture, codes_launch.run_in_tiles, tiles) for mixture in CODES_IN_TILES.values() for tiles in ALL_TILES),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(("mixture", "compute", "tiles"), IN_TILES, ids=lambda it: getattr(it, "__name__", str(it)))
def test_tiles_of_every_height_are_right_on_every_hostile_input(
    mixture: ExpertsShape, compute: Callable[..., None], tiles: object, device: torch.device
) -> None:
    checks = check_experts(lambda *given: compute(*given, tiles), experts_cases(mixture, device, seed=0))
    assert {check.name: check.where for check in checks if not check.is_passed} == {}


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("mixture", [NARROW, CODES], ids=["inner dims that cannot be folded", "codes of 4 bits"])
def test_other_mixtures_are_right_with_few_or_many_tokens(mixture: ExpertsShape, device: torch.device) -> None:
    checks = check_experts(run_experts_hopper, experts_cases(mixture, device, seed=0))
    assert {check.name: check.where for check in checks if not check.is_passed} == {}


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("rows", [1, 16, 64, 128])
def test_a_tokens_bits_do_not_depend_on_its_neighbours(rows: int, device: torch.device) -> None:
    case = next(case for case in experts_cases(MIXTURES["bf16"], device, seed=1) if case.name == "even")
    outs = []
    for others in (case.experts, case.experts.flip(0)):
        experts = others.clone()
        experts[5] = case.experts[5]
        hidden = case.hidden.flip(0)
        hidden[5] = case.hidden[5]
        out = torch.empty_like(hidden)
        assert isinstance(case.expert_weights, ExpertWeights)
        run_in_tiles(hidden, experts, case.weights, case.expert_weights, case.activation, out, rows)
        outs.append(out[5].clone())
    assert torch.equal(*outs)


def test_tiles_are_higher_the_more_rows_an_expert_has() -> None:
    assert [hopper_rows(tokens, 8, 128) for tokens in (1, 2, 3, 128, 320, 512, 1024)] == [1, 1, 16, 16, 32, 64, 128]


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("name", [*MIXTURES, "codes"])
def test_a_token_has_the_bits_it_has_alone(name: str, device: torch.device) -> None:
    """Paths of one order: alone, beside one other, and in tiles of every height."""
    mixture = CODES if name == "codes" else MIXTURES[name]
    path = next(it for it in EXPERTS_PATHS if it.name.endswith(".ordered") and mixture.format in it.limits.formats)
    assert path.run is not None
    for case in experts_cases(mixture, device, seed=0):
        given = case.expert_weights, case.activation
        out, alone = torch.empty_like(case.hidden), torch.empty_like(case.hidden)
        path.run(case.hidden, case.experts, case.weights, *given, out)
        for first in range(0, len(out), 2 if len(out) % 2 == 0 else 1):
            rows = slice(first, first + (2 if len(out) % 2 == 0 else 1))
            path.run(case.hidden[rows], case.experts[rows], case.weights[rows], *given, alone[rows])
        assert torch.equal(out.view(torch.int16), alone.view(torch.int16)), case.name
