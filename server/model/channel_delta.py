"""A layer of Kimi Delta Attention: projections, convolution and recurrence, and the gates of its result."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fused.gated_norm import norm_and_gate
from kernels.recurrence.calls import RecurrenceState, RunRecurrence
from kernels.recurrence.channel_delta.weights import ChannelDeltaWeights
from server.model.gated_delta import OnRecurrence, WithGates
from server.model.linear import Product
from server.model.step import Step


@dataclass(frozen=True, slots=True)
class ChannelDelta:
    """place      among the recurrent layers
    heads      of values, and the numbers of one
    projected  makes queries, keys and values of a token; the gates of writing, then what `decays` and what
               `output_gates` read, as many numbers as a value has
    norm       [value dim], of the result
    run        computes convolution and recurrence, and reads and writes the states
    observe    is handed queries, keys, values and output gates, the gates of writing and the decays, and the results
               before they are normed; None of most steps
    """

    place: int
    heads: tuple[int, int]
    projected: WithGates
    decays: Product
    output_gates: Product
    output: Product
    weights: ChannelDeltaWeights
    norm: Tensor
    eps: float
    run: RunRecurrence
    observe: OnRecurrence | None = None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        assert step.states is not None, "a step of a model with recurrent layers has their states"
        num_heads, dim = self.heads
        projected, gates = self.projected(x, step)
        writing, of_decays, of_output = gates.split_with_sizes((num_heads, dim, dim), dim=1)
        decays = self.decays(of_decays.contiguous(), step)
        output_gates = self.output_gates(of_output.contiguous(), step)
        out = x.new_empty(x.shape[0], num_heads, dim)
        state = RecurrenceState(*step.states.cache.layers[self.place].tensors)
        self.run(projected, decays, writing, self.weights, step.states.rows, state, out)
        if self.observe is not None:
            self.observe(torch.cat([projected, output_gates], dim=1), torch.cat([writing, decays], dim=1), out)
        return self.output(norm_and_gate(out, output_gates, self.norm, self.eps, is_sigmoid=True), step)
