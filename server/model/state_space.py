"""A layer of a state space (Mamba2): one product, convolution and recurrence, the gates and the norm of its result."""

from dataclasses import dataclass

from torch import Tensor

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
    norm       [heads * numbers of one], of the result; groups: how many of its parts are normed each by itself
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
        return self.output(gate_and_norm(out, gates, self.norm, self.groups, self.eps), step)
