"""Operations on a product's sums before they are stored. Torch-free."""

from enum import Enum


class Epilogue(Enum):
    """Operation on a product's sums before they are stored."""

    NONE = "none"  # rounded to the dtype of x
    SWIGLU = "swiglu"  # silu(gate) * up, of a weight whose rows are those of the gate, then as many of up
    FP32 = "fp32"  # stored in fp32, of x in 16 bits

    @property
    def parts(self) -> int:
        """Rows of the weight for each column of the result."""
        return 2 if self is Epilogue.SWIGLU else 1
