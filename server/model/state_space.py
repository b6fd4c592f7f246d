"""A layer of a state space (Mamba2): one product, convolution and recurrence, the gates and the norm of its result."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fused.activation import gated
from kernels.fused.activation_kind import Activation
from kernels.fused.alike import gated_alike
from kernels.fused.group_norm import gate_and_norm
from kernels.recurrence.calls import RecurrenceState, RunRecurrence
from kernels.recurrence.state_space.weights import StateSpaceWeights
from server.model.gated_delta import OnRecurrence
from server.model.linear import Product
from server.model.step import Step


@dataclass(frozen=True, slots=True)
class StateSpace:
    """place      among the recurrent layers
    channels   C, B and x of a token
    heads      of x, and the numbers of one
    projected  makes C, B and x, the gates of the result, and the steps
    norm       [heads * numbers of one], of the result, or [0], where it is not normed
    groups     how many of its parts are normed each by itself
    is_alike   whether a row's bits may not depend on the other rows, on a CPU
    run        computes convolution and recurrence, and reads and writes the states
    observe    is handed what the layer projects, the steps, and its results before they are gated; None of most steps
    """

    place: int
    channels: int
    heads: tuple[int, int]
    projected: Product
    output: Product
    weights: StateSpaceWeights
    norm: Tensor
    groups: int
    eps: float
    run: RunRecurrence
    is_alike: bool
    observe: OnRecurrence | None = None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        assert step.states is not None, "a step of a model with recurrent layers has their states"
        projected = self.projected(x, step)
        num_heads, dim = self.heads
        gates, steps = projected[:, self.channels : -num_heads], projected[:, -num_heads:]
        out = x.new_empty(x.shape[0], num_heads, dim)
        state = RecurrenceState(*step.states.cache.layers[self.place].tensors)
        self.run(projected[:, : self.channels], steps, steps, self.weights, step.states.rows, state, out)
        if self.observe is not None:
            self.observe(projected[:, :-num_heads], steps, out)
        return self.output(self._gated(out, gates), step)

    def _gated(self, out: Tensor, gates: Tensor) -> Tensor:
        """Return results times silu(gates), normed where there is a norm: [T, heads * d] of [T, heads, d]."""
        if self.norm.numel():
            return gate_and_norm(out, gates, self.norm, self.groups, self.eps)
        both = torch.cat((gates, out.flatten(1)), dim=1)
        return gated_alike(both, Activation.SILU) if self.is_alike else gated(both, Activation.SILU)
