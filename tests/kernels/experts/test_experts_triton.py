"""The Triton experts: routing, sorting and products against fp64, in the interpreter or on the GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.experts.kinds import ClampedSwiglu, ExpertFormat, RoutingConfig, Scores
from kernels.experts.portable.dequantize import dequantized_on_device
from kernels.experts.portable.launch import run_experts
from kernels.experts.routing.route_torch import route
from kernels.experts.routing.route_triton import run_route
from kernels.experts.routing.sorting import hallmark_experts_prefix, sort_slots
from kernels.experts.shape import ExpertForm, ExpertsShape
from kernels.experts.tiles import expert_tiles, most_tiles
from kernels.experts.ungated.launch import run_ungated_triton
from kernels.experts.weights import ExpertWeights, dequantized
from kernels.fused.activation_kind import Activation
from kernels.fused.ungated_kind import Ungated
from kernels.reference.experts import num_wrong_routes
from kernels.system.device import torch_dtype
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.experts_checks import check_experts
from qualification.measure.inputs.experts_inputs import experts_cases

SOFTMAX = RoutingConfig(7, 3)
SIGMOID = RoutingConfig(12, 3, Scores.SIGMOID, renormalizes=True, num_groups=4, num_active_groups=2, scale=2.5)
ROUTINGS = {
    "softmax": (SOFTMAX, False),
    "one expert": (replace(SOFTMAX, num_active=1), False),
    "all experts, renormalised": (replace(SOFTMAX, num_active=7, renormalizes=True), False),
    "128 experts": (RoutingConfig(128, 8, renormalizes=True), False),
    "groups": (SIGMOID, False),
    "groups and correction bias": (SIGMOID, True),
    "correction bias": (RoutingConfig(5, 2, Scores.SIGMOID), True),
}
ROWS = TokenRows.LE_128
MIXTURES = {
    "odd sizes": ExpertsShape(Dtype.FP32, ExpertFormat.PLAIN, 5, 2, 33, 17, Activation.SILU, False, ROWS),
    "one expert a token": ExpertsShape(Dtype.FP16, ExpertFormat.PLAIN, 6, 1, 64, 24, Activation.GELU, True, ROWS),
    "all experts": ExpertsShape(Dtype.FP32, ExpertFormat.PLAIN, 3, 3, 40, 64, Activation.GELU_TANH, True, ROWS),
    "mxfp4": ExpertsShape(Dtype.FP16, ExpertFormat.MXFP4, 5, 2, 64, 32, ClampedSwiglu(), True, ROWS),
    "bf16": ExpertsShape(Dtype.BF16, ExpertFormat.PLAIN, 12, 4, 264, 136, Activation.SILU, False, ROWS),
    "no gate": ExpertsShape(Dtype.FP32, ExpertFormat.PLAIN, 5, 2, 33, 17, Ungated.RELU2, False, ROWS),
    "no gate in bf16": ExpertsShape(Dtype.BF16, ExpertFormat.PLAIN, 12, 5, 264, 136, Ungated.RELU2, False, ROWS),
    "mxfp4 in bf16": ExpertsShape(Dtype.BF16, ExpertFormat.MXFP4, 6, 2, 288, 160, ClampedSwiglu(), True, ROWS),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_chooses_and_weighs_as_fp64_does(name: str, device: torch.device) -> None:
    config, has_bias = ROUTINGS[name]
    logits = 3 * torch.randn(9, config.num_experts, device=device)
    bias = torch.randn(config.num_experts, device=device) if has_bias else None
    weights, experts = run_route(logits, config, bias)
    assert num_wrong_routes(logits, config, bias, weights, experts) == 0


@pytest.mark.parametrize("name", ROUTINGS)
def test_an_expert_that_all_tokens_visit_changes_no_other(name: str, device: torch.device) -> None:
    config, has_bias = ROUTINGS[name]
    count = config.num_experts
    logits = 3 * torch.randn(9, count + 4, device=device)
    logits[:3, count], logits[:, count + 1 :] = torch.tensor([-200.0, 0.0, 200.0], device=device), torch.nan
    bias = torch.randn(count, device=device) if has_bias else None
    weights, experts = run_route(logits, config, bias, has_gate=True)
    of_others = run_route(logits[:, :count], config, bias)
    assert torch.equal(weights[:, :-1], of_others[0])
    assert torch.equal(experts[:, :-1], of_others[1])
    assert experts[:, -1].tolist() == [count] * 9
    torch.testing.assert_close(weights[:, -1], logits[:, count].sigmoid())
    on_cpu = route(logits.cpu(), config, None if bias is None else bias.cpu(), has_gate=True)
    torch.testing.assert_close((weights.cpu(), experts.cpu()), on_cpu)


def test_scales_of_experts_multiply_their_weights_in_the_end(device: torch.device) -> None:
    for config in (SOFTMAX, SIGMOID):
        logits, scales = (torch.randn(*shape, config.num_experts, device=device) for shape in ((9,), ()))
        weights, experts = run_route(logits, config)
        scaled, chosen = run_route(logits, config, None, scales)
        assert torch.equal(chosen, experts)
        assert torch.equal(scaled, weights * scales[experts.long()])


def test_of_equal_experts_and_groups_the_lower_goes_first(device: torch.device) -> None:
    for config in (SOFTMAX, SIGMOID):
        logits = torch.tensor([[0.0, -0.0] * 6, [1.0] * 12], device=device)[:, : config.num_experts]
        weights, experts = run_route(logits, config)
        expected = route(logits.cpu(), config)
        assert torch.equal(experts.cpu(), expected[1])
        torch.testing.assert_close(weights.cpu(), expected[0])


def test_a_token_with_too_few_experts_visits_none_twice(device: torch.device) -> None:
    logits = torch.full((1, 7), -torch.inf, device=device)
    logits[0, 4] = 1.0
    weights, experts = run_route(logits, SOFTMAX)
    assert experts.tolist() == [[4, 0, 1]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


def sorted_by_torch(experts: Tensor) -> Tensor:
    return experts.cpu().flatten().sort(stable=True).indices.int()


@pytest.mark.parametrize("num_blocks", [1, 1024, 1025, 2500])
def test_places_of_an_expert_go_on_over_every_block_of_slots(num_blocks: int, device: torch.device) -> None:
    """A program sums 1,024 blocks of 64 slots at once: 8,192 tokens of 8 experts have more than that."""
    counts = torch.randint(0, 65, (2, num_blocks), dtype=torch.int32)
    sums, totals = counts.clone().to(device), torch.empty(2, dtype=torch.int32, device=device)
    hallmark_experts_prefix[(2,)](sums, totals, num_blocks, BLOCK=1024, IS_DEPENDENT=False)
    assert torch.equal(sums.cpu(), (counts.cumsum(1) - counts).int())
    assert totals.tolist() == counts.sum(1).tolist()


# The last two cases have more slots than are compared: they take three launches, the last one sums blocks twice.
@pytest.mark.parametrize(
    ("num_tokens", "num_active", "num_experts"),
    [(1, 1, 1), (9, 2, 5), (20, 3, 512), (700, 3, 70), pytest.param(9001, 8, 64, marks=pytest.mark.gpu)],
)
def test_slots_are_sorted_stably(num_tokens: int, num_active: int, num_experts: int, device: torch.device) -> None:
    experts = torch.rand(num_tokens, num_experts).argsort(1)[:, :num_active].int().contiguous().to(device)
    found = sort_slots(experts, num_experts, 16)
    assert torch.equal(found.order.cpu(), sorted_by_torch(experts))
    counts = torch.bincount(experts.cpu().flatten(), minlength=num_experts).tolist()
    expected, row = [], 0
    for expert, rows in enumerate(counts):
        expected += [[expert, row + first, row + rows] for first in range(0, rows, 16)]
        row += rows
    tiles = found.tiles.tolist()
    assert tiles[: len(expected)] == expected
    assert all(expert == -1 for expert, _, _ in tiles[len(expected) :])


def test_no_assignment_has_more_tiles_than_the_bound() -> None:
    for counts in ([1] * 40, [17] * 5, [16] * 5, [640], [0, 33, 1, 15, 16]):
        assert sum(-(-rows // 16) for rows in counts) <= most_tiles(sum(counts), len(counts), 16)


# bf16 is silent garbage in Triton's interpreter.
@pytest.mark.first
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.gpu] if mixture.dtype is Dtype.BF16 else [])
        for name, mixture in MIXTURES.items()
    ],
)
def test_experts_are_right_on_every_hostile_input(name: str, device: torch.device) -> None:
    cases = experts_cases(MIXTURES[name], device, seed=0)
    run = run_ungated_triton if MIXTURES[name].form is ExpertForm.UNGATED else run_experts
    if device.type == "cpu":  # the interpreter takes seconds for many tokens: the edges of tiles of one mixture only
        names = {"none to most", "large", "unequal"} | ({"edges"} if name in ("odd sizes", "no gate") else set())
        cases = (case for case in cases if case.name in names)
    checks = check_experts(run, cases)
    assert {check.name: check.where for check in checks if not check.is_passed} == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_become_the_numbers_that_the_specification_says(dtype: torch.dtype, device: torch.device) -> None:
    blocks = torch.randint(256, (3, 101, 5, 16), dtype=torch.uint8, device=device)
    scales = torch.randint(100, 140, (3, 101, 5), dtype=torch.uint8, device=device)
    scales[0, 0, 0] = 0
    assert torch.equal(dequantized_on_device(blocks, scales, dtype), dequantized(blocks, scales, dtype))


def test_few_and_many_tokens_take_tiles_of_their_own() -> None:
    few, many = expert_tiles(8, 128, 2, None), expert_tiles(8192, 128, 2, None)
    assert few != many


def test_integers_are_summed_the_same_beside_any_neighbours(device: torch.device) -> None:
    """Use exact numbers: every bit of a token's result must stay when the other tokens visit other experts."""
    mixture = MIXTURES["odd sizes"]
    case = next(case for case in experts_cases(mixture, device, seed=1) if case.name == "even")
    of = case.expert_weights
    assert isinstance(of, ExpertWeights)
    weights = replace(of, gate_up=(of.gate_up * 8).round(), down=(of.down * 8).round())
    hidden, shares = (case.hidden * 2).round(), torch.full_like(case.weights, 0.5)
    outs = []
    for others in (case.experts, case.experts.flip(0)):
        experts = others.clone()
        experts[5] = case.experts[5]
        out = torch.empty_like(hidden)
        run_experts(hidden, experts, shares, weights, case.activation, out)
        outs.append(out[5].clone())
    assert torch.equal(*outs)


def test_no_tokens_launch_nothing(device: torch.device) -> None:
    mixture = MIXTURES["odd sizes"]
    case = next(iter(experts_cases(mixture, device, seed=0)))
    out = torch.empty(0, mixture.hidden, dtype=torch_dtype(mixture.dtype), device=device)
    run_experts(out, case.experts[:0], case.weights[:0], case.expert_weights, case.activation, out)
    assert run_route(torch.empty(0, 7, device=device), SOFTMAX)[1].shape == (0, 3)
