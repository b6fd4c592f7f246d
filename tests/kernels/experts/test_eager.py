"""The products of experts by torch, against fp64 and, for 4-bit weights, transformers' own unpacking."""

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels.experts.bit_order import order_
from kernels.experts.kinds import ClampedSwiglu, ExpertActivation
from kernels.experts.portable.eager import experts_eager
from kernels.experts.weights import AnyExpertWeights, ExpertWeights, Mxfp4Weights, dequantized
from kernels.fused.activation_kind import Activation

EXPERTS, WIDTH, HIDDEN = 5, 32, 64


def plain(*, has_bias: bool) -> ExpertWeights:
    gate_up, down = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 4, torch.randn(EXPERTS, HIDDEN, WIDTH) / 4
    biases = (torch.randn(EXPERTS, 2 * WIDTH), torch.randn(EXPERTS, HIDDEN)) if has_bias else ()
    return ExpertWeights(gate_up, down, *biases)


def blocks_of(rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Random bytes, with scales from 2 ** -10 to 1."""
    num_blocks = size // 32
    blocks = torch.randint(256, (EXPERTS, rows, num_blocks, 16), dtype=torch.uint8)
    return blocks, torch.randint(117, 128, (EXPERTS, rows, num_blocks), dtype=torch.uint8)


def packed() -> Mxfp4Weights:
    biases = torch.randn(EXPERTS, 2 * WIDTH), torch.randn(EXPERTS, HIDDEN)
    return Mxfp4Weights(*blocks_of(2 * WIDTH, HIDDEN), *blocks_of(HIDDEN, WIDTH), *biases)


def reference(
    hidden: Tensor, experts: Tensor, weights: Tensor, of: AnyExpertWeights, activation: ExpertActivation
) -> Tensor:
    """Token by token and expert by expert, in fp64."""
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    for token in range(hidden.shape[0]):
        for expert, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            gate_up, down = (it.double() for it in of.of(expert, torch.float32))
            inner = gate_up @ hidden[token].double()
            inner = inner if of.gate_up_bias is None else inner + of.gate_up_bias[expert].double()
            gate, up = inner.chunk(2)
            if isinstance(activation, ClampedSwiglu):
                gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
                inner = gate / (1 + torch.exp(-activation.alpha * gate)) * (up + 1)
            else:
                inner = gate / (1 + torch.exp(-gate)) * up
            out = down @ inner
            total[token] += weight * (out if of.down_bias is None else out + of.down_bias[expert].double())
    return total


@pytest.mark.parametrize(("scale", "is_large"), [(128, False), (129, True), (255, True)])
def test_one_scale_above_2_makes_weights_large(scale: int, is_large: bool) -> None:
    of = packed()
    assert of.has_large_scales  # nobody looked
    of.down_scales[3, 7, 0] = scale
    assert of.inspected().has_large_scales is is_large


def visits(num_tokens: int, num_active: int) -> tuple[Tensor, Tensor, Tensor]:
    experts = torch.stack([torch.randperm(EXPERTS)[:num_active] for _ in range(num_tokens)]).int()
    return 2 * torch.randn(num_tokens, HIDDEN), experts, torch.rand(num_tokens, num_active)


@pytest.mark.parametrize("num_active", [1, 3, EXPERTS])
@pytest.mark.parametrize("kind", ["silu", "clamped", "mxfp4"])
def test_the_sum_over_experts_is_that_of_fp64(kind: str, num_active: int) -> None:
    of = packed() if kind == "mxfp4" else plain(has_bias=kind == "clamped")
    activation = Activation.SILU if kind == "silu" else ClampedSwiglu()
    inputs = visits(17, num_active)
    expected = reference(*inputs, of, activation)
    error = (experts_eager(*inputs, of, activation) - expected).abs().max()
    assert error <= 1e-5 * expected.abs().max()


def test_all_tokens_may_visit_one_expert() -> None:
    hidden, _, weights = visits(9, 1)
    experts, of = torch.full((9, 1), 3, dtype=torch.int32), plain(has_bias=False)
    expected = reference(hidden, experts, weights, of, Activation.SILU)
    torch.testing.assert_close(experts_eager(hidden, experts, weights, of, Activation.SILU), expected.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bit_weights_are_unpacked_as_by_transformers(dtype: torch.dtype) -> None:
    blocks, scales = blocks_of(6, 96)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    order_(blocks)
    assert torch.equal(dequantized(blocks, scales, dtype), expected)
