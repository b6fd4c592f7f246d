"""The Gluon experts against fp64, on an sm_90 GPU; what a number of tokens chooses, anywhere."""

import pytest
import torch
from torch import Tensor

from kernels.experts.few_bits.weights import AnyExperts, FewBitExperts
from kernels.experts.formats import FewBitFormat
from kernels.experts.fp8 import launch as fp8_launch
from kernels.experts.hopper.launch import run_experts_hopper, run_in_tiles
from kernels.experts.int4 import launch as int4_launch
from kernels.experts.kinds import ClampedSwiglu, ExpertActivation, ExpertFormat
from kernels.experts.mxfp4 import launch as codes_launch
from kernels.experts.mxfp4.tilings import ALL_TILES, CodesTiles
from kernels.experts.paths import EXPERTS_PATHS, RunExperts
from kernels.experts.shape import ExpertsShape
from kernels.experts.tiles import hopper_rows
from kernels.experts.weights import AnyExpertWeights, ExpertWeights, Mxfp4Weights
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


def in_tiles(rows: int) -> RunExperts:
    """The path by tiles of so many slots, whatever the number of tokens."""

    def run(
        hidden: Tensor,
        experts: Tensor,
        weights: Tensor,
        of: AnyExpertWeights,
        activation: ExpertActivation,
        out: Tensor,
    ) -> None:
        assert isinstance(of, ExpertWeights)
        run_in_tiles(hidden, experts, weights, of, activation, out, rows)

    return run


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("name", MIXTURES)
def test_tiles_of_every_height_are_right_on_every_hostile_input(name: str, rows: int, device: torch.device) -> None:
    checks = check_experts(in_tiles(rows), experts_cases(MIXTURES[name], device, seed=0))
    assert {check.name: check.where for check in checks if not check.is_passed} == {}


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("name", FEW_BITS)
def test_experts_of_8_and_4_bits_are_right_at_every_tile_height(name: str, rows: int, device: torch.device) -> None:
    in_these = int4_launch.run_in_tiles if name == "int4" else fp8_launch.run_in_tiles

    def run(
        hidden: Tensor, experts: Tensor, weights: Tensor, of: AnyExperts, activation: ExpertActivation, out: Tensor
    ) -> None:
        assert isinstance(of, FewBitExperts)
        in_these(hidden, experts, weights, of, activation, out, rows)

    checks = check_experts(run, experts_cases(FEW_BITS[name], device, seed=0))
    assert {check.name: check.where for check in checks if not check.is_passed} == {}


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
def test_inner_dims_that_cannot_be_folded_are_right_too(device: torch.device) -> None:
    checks = check_experts(run_experts_hopper, experts_cases(NARROW, device, seed=0))
    assert {check.name: check.where for check in checks if not check.is_passed} == {}


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
def test_codes_of_4_bits_are_right_with_few_or_many_tokens(device: torch.device) -> None:
    checks = check_experts(run_experts_hopper, experts_cases(CODES, device, seed=0))
    assert {check.name: check.where for check in checks if not check.is_passed} == {}


def by_codes(tiles: CodesTiles) -> RunExperts:
    """The path of codes by these tiles, whatever the number of tokens."""

    def run(
        hidden: Tensor,
        experts: Tensor,
        weights: Tensor,
        of: AnyExpertWeights,
        activation: ExpertActivation,
        out: Tensor,
    ) -> None:
        assert isinstance(of, Mxfp4Weights)
        codes_launch.run_in_tiles(hidden, experts, weights, of, activation, out, tiles)

    return run


@pytest.mark.gpu
@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("tiles", ALL_TILES, ids=str)
@pytest.mark.parametrize("name", CODES_IN_TILES)
def test_codes_are_right_at_every_tile_height(name: str, tiles: CodesTiles, device: torch.device) -> None:
    checks = check_experts(by_codes(tiles), experts_cases(CODES_IN_TILES[name], device, seed=0))
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
