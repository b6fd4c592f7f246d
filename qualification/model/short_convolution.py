"""Layers of a gated short convolution (LFM2): their sizes, and what they keep of a sequence.

    b, c, x = split(in_proj(hidden));   out_proj(c * convolution(b * x))

Source: Liquid AI 2025 (LFM2 technical report), and its class in transformers.
"""

from dataclasses import dataclass, field, replace

from kernels.convolution.sizes import ConvolutionSizes
from kernels.vocabulary.shape import Dtype
from qualification.model.config import RecurrenceConfig, RecurrenceProducts, StateTensor
from qualification.model.fields import ModelConfigError


@dataclass(frozen=True, slots=True)
class ShortConvolutionConfig(RecurrenceConfig):
    """sizes     channels, width and bias of the convolution; its two products have biases where it has one
    hidden_size  of what the layer reads
    num_drafted  tokens of a sequence that a step may compute and take back
    """

    sizes: ConvolutionSizes = field(kw_only=True)
    hidden_size: int = field(kw_only=True)
    num_drafted: int = field(default=0, kw_only=True)

    @classmethod
    def of(cls, sizes: ConvolutionSizes, hidden_size: int, num_drafted: int = 0) -> "ShortConvolutionConfig":
        """Return the mixer of these sizes, with what it keeps and how many numbers it has."""
        tensors = sizes.state_tensors(Dtype.FP32, num_drafted)  # in the dtype of the weights, whichever that is
        state = tuple(StateTensor(shape, None) for shape, _ in tensors)
        count = 4 * hidden_size * sizes.channels + sizes.channels * sizes.width
        count += (4 * sizes.channels + hidden_size) * sizes.has_bias
        name = "the gated short convolution"
        return cls(name, state, count, sizes=sizes, hidden_size=hidden_size, num_drafted=num_drafted)

    @property
    def products(self) -> RecurrenceProducts:
        size = self.sizes.channels * self.hidden_size
        return RecurrenceProducts(3 * size, size)

    def of_rank(self, rank: int, world: int) -> "ShortConvolutionConfig":
        """Return the channels of one of several ranks. Raises ModelConfigError where they cannot be shared equally."""
        del rank
        if self.sizes.channels % world:
            raise ModelConfigError(
                f"{self.sizes.channels} channels of {self.name} cannot be split among {world} ranks: {world} must "
                "divide them"
            )
        own = replace(self.sizes, channels=self.sizes.channels // world)
        return ShortConvolutionConfig.of(own, self.hidden_size, self.num_drafted)

    def taking_back(self, num_drafted: int) -> "ShortConvolutionConfig":
        return ShortConvolutionConfig.of(self.sizes, self.hidden_size, num_drafted)
