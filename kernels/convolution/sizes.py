"""The sizes of a gated short convolution, and what a layer keeps of a sequence: its latest inputs."""

from dataclasses import dataclass

from kernels.vocabulary.shape import Dtype


@dataclass(frozen=True, slots=True)
class ConvolutionSizes:
    """channels  each convolved by itself
    width        tokens that a result reads, the newest included
    has_bias     whether a number of each channel is added before the result is gated
    """

    channels: int
    width: int
    has_bias: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no layer has."""
        if self.channels < 1 or self.width < 2:
            raise ValueError(f"a convolution needs a channel and a width of 2 at least, found {self}")

    def state_tensors(self, dtype: Dtype, num_drafted: int = 0) -> tuple[tuple[tuple[int, ...], Dtype], ...]:
        """Return shape and dtype of each tensor of `ConvolutionState`, of one sequence.

        num_drafted  tokens that a step may compute and take back: what it writes lies beside what it reads
        """
        return (((self.width + num_drafted, self.channels), dtype),)
