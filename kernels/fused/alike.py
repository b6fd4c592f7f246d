"""Activations on a CPU whose bits do not depend on a number's place in its tensor.

PyTorch's own SiLU, GELU and sigmoid compute the numbers that fill no whole vector by other instructions: those at the
end of a tensor, and of each thread's part of it. Its exp, tanh and erf do not, and sums, products and quotients of two
numbers are rounded alike anywhere.
"""

import math

import torch
from torch import Tensor

from kernels.fused.activation_kind import Activation


def gated_alike(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate_up[:, :I]) * gate_up[:, I:], computed in fp32, rounded once.

    gate_up [T, 2 * I]. Returns [T, I] of its dtype.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return activated_alike(gate, activation).mul_(up).to(gate_up.dtype)


def activated_alike(x: Tensor, activation: Activation) -> Tensor:
    """activation(x), a new tensor; x is fp32."""
    match activation:
        case Activation.SILU:
            return x / (1 + torch.exp(-x))
        case Activation.GELU:
            return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))
        case Activation.GELU_TANH:
            inner = x * x * x * 0.044715 + x
            return 0.5 * x * (1 + torch.tanh(inner * math.sqrt(2 / math.pi)))


def sigmoid_alike(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), a new tensor; x is fp32."""
    return torch.reciprocal(1 + torch.exp(-x))
