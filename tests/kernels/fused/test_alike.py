"""Activations of a CPU's paths with one order: a row's bits alone are those in any batch, and its numbers are right."""

import pytest
import torch

from kernels.fused.activation import gated_torch
from kernels.fused.activation_kind import Activation
from kernels.fused.alike import gated_alike, sigmoid_alike


@pytest.mark.parametrize("activation", list(Activation))
def test_an_activation_does_not_depend_on_the_place(activation: Activation) -> None:
    draw = torch.Generator().manual_seed(3)
    for width in (24, 100, 2000):
        gate_up = torch.randn(67, 2 * width, generator=draw) * 3
        found = gated_alike(gate_up, activation)
        torch.testing.assert_close(found, gated_torch(gate_up, activation), rtol=1e-4, atol=1e-4)
        for row in range(67):
            assert torch.equal(gated_alike(gate_up[row : row + 1].clone(), activation)[0], found[row])
    x = torch.randn(997, 1, generator=draw)
    assert torch.equal(sigmoid_alike(x), torch.cat([sigmoid_alike(row) for row in x.clone()])[:, None])
