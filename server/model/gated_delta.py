"""A layer of the gated delta rule: projections, convolution and recurrence, and the gates of its result."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.fused.gated_norm import norm_and_gate
from kernels.recurrence.calls import RecurrenceState, RecurrenceWeights, RunRecurrence
from server.model.linear import Product
from server.model.step import Step

OnRecurrence = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class WithGates:
    """Projection of what a layer reads: one product, or one of gates beside it.

    size   of the first numbers
    gates  None: `first` makes them too, behind its own
    """

    size: int
    first: Product
    gates: Product | None

    def __call__(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Return the first numbers [T, size], and gates; rows may be further apart than they are long."""
        first = self.first(x, step)
        if self.gates is not None:
            return first, self.gates(x, step)
        return first[:, : self.size], first[:, self.size :]


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """place      among the recurrent layers
    channels   queries, keys and values of a token
    heads      of values, and the numbers of one
    projected  makes queries, keys, values, and the gates of the result; the gates of writing, then those of decay
    norm       [value dim], of the result
    run        computes convolution and recurrence, and reads and writes the states
    observe    is handed what the layer projects, its gates, and its results before they are normed; None of most steps
    """

    place: int
    channels: int
    heads: tuple[int, int]
    projected: WithGates
    output: Product
    weights: RecurrenceWeights
    norm: Tensor
    eps: float
    run: RunRecurrence
    observe: OnRecurrence | None = None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        assert step.states is not None, "a step of a model with recurrent layers has their states"
        projected, gates = self.projected(x, step)
        num_heads, value_dim = self.heads
        out = x.new_empty(x.shape[0], num_heads, value_dim)
        state = RecurrenceState(*step.states.cache.layers[self.place].tensors)
        writing, decay = gates[:, :num_heads], gates[:, num_heads:]
        self.run(projected[:, : self.channels], decay, writing, self.weights, step.states.rows, state, out)
        if self.observe is not None:
            self.observe(projected, gates, out)
        return self.output(norm_and_gate(out, projected[:, self.channels :], self.norm, self.eps), step)
