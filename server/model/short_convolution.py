"""A layer of a gated short convolution: the projection of gates and inputs, the convolution, the projection back."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.convolution.calls import ConvolutionState, ConvolutionWeights, RunConvolution
from server.model.linear import Product
from server.model.step import Step

OnConvolution = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """place   among the recurrent layers
    projected  makes the gates of inputs, those of results, and the inputs
    run        computes the convolution with its gates, and reads and writes the states
    observe    is handed what the layer projects, and its results; None of most steps
    """

    place: int
    projected: Product
    output: Product
    weights: ConvolutionWeights
    run: RunConvolution
    observe: OnConvolution | None = None

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        assert step.states is not None, "a step of a model with recurrent layers has their states"
        projected = self.projected(x, step)
        out = x.new_empty(x.shape[0], self.weights.taps.shape[0])
        state = ConvolutionState(*step.states.cache.layers[self.place].tensors)
        self.run(projected, self.weights, step.states.rows, state, out)
        if self.observe is not None:
            self.observe(projected, out)
        return self.output(out, step)
