"""The linear shape: everything that selects the kernel of a product with a weight. Torch-free."""

import re
from dataclasses import dataclass

from kernels.linear.epilogue import Epilogue
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage format of a weight: a word of a shape's line. `weights.py` has the class of its weights."""

    name: str

    def num_bytes(self, dtype: Dtype) -> int:
        """Return the bytes of one number of the weight, scales not counted, for products of inputs of that dtype."""
        return 1 if self in FP8_FORMATS else dtype.num_bytes


PLAIN = WeightFormat("plain")  # [out, in] in the dtype of x, rows contiguous
# Numbers of 8 bits (e4m3) times scales; x is rounded to such numbers too, with scales of its own.
FP8_ROWS = WeightFormat("fp8_rows")  # a scale a row, and one of each row of x
FP8_STATIC = WeightFormat("fp8_static")  # a scale a row, and one of all x, which the checkpoint holds
FP8_BLOCKS = WeightFormat("fp8_blocks")  # a scale of 128 x 128 numbers, and one of 128 of a row of x
FP8_FORMATS = frozenset({FP8_ROWS, FP8_STATIC, FP8_BLOCKS})


@dataclass(frozen=True, slots=True)
class LinearShape:
    """y [rows, size_out] = epilogue(x [rows, size_in] @ weight [epilogue.parts * size_out, size_in]^T + bias)."""

    dtype: Dtype  # of x and the weight
    size_in: int
    size_out: int
    rows: LinearRows
    has_bias: bool = False
    epilogue: Epilogue = Epilogue.NONE
    weight_format: WeightFormat = PLAIN

    def __post_init__(self) -> None:
        """Raises ValueError for a shape that has another name: each product must have one only."""
        if self.epilogue is Epilogue.FP32 and self.dtype is Dtype.FP32:
            raise ValueError("a product of fp32 is stored in fp32 anyway: its epilogue is none")
        if self.has_bias and self.epilogue is Epilogue.SWIGLU:
            raise ValueError("swiglu behind a bias is computed by a kernel of its own: the product's epilogue is none")

    @property
    def operator(self) -> Operator:
        return Operator.LINEAR

    @property
    def kind(self) -> str:
        """The line without the bucket: what the shapes of one weight, or of equal ones, share."""
        parts = [
            Operator.LINEAR.value,
            self.dtype.value,
            self.weight_format.name,
            f"in{self.size_in}",
            f"out{self.size_out}",
        ]
        if self.has_bias:
            parts.append("bias")
        if self.epilogue is not Epilogue.NONE:
            parts.append(self.epilogue.value)
        return " ".join(parts)

    def __str__(self) -> str:
        """One line for logs, plans and reports; unique for every shape."""
        return f"{self.kind} r-{self.rows.label}"

    @property
    def dtype_out(self) -> Dtype:
        return Dtype.FP32 if self.epilogue is Epilogue.FP32 else self.dtype

    @property
    def num_weight_rows(self) -> int:
        return self.epilogue.parts * self.size_out

    def flops(self, num_rows: int) -> int:
        """Floating-point operations of the product of so many rows."""
        return 2 * num_rows * self.size_in * self.num_weight_rows

    def hbm_bytes(self, num_rows: int) -> int:
        """Bytes that a product of so many rows must read and write: x, the weight and the bias in, y out."""
        weight = self.num_weight_rows * self.size_in * self.weight_format.num_bytes(self.dtype)
        read = num_rows * self.size_in + self.has_bias * self.size_out
        return weight + read * self.dtype.num_bytes + num_rows * self.size_out * self.dtype_out.num_bytes


_SHAPE = re.compile(
    r"linear (?P<dtype>\w+) (?P<format>\w+) in(?P<size_in>\d+) out(?P<size_out>\d+)(?P<bias> bias)?"
    r"(?: (?P<epilogue>swiglu|fp32))? r-(?P<rows>\w+)"
)


def parse_linear_shape(text: str) -> LinearShape:
    """Parse a shape's line. Raises ValueError for text that `str` makes of no shape."""
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no linear shape")
    parts = found.groupdict()
    shape = LinearShape(
        dtype=Dtype(parts["dtype"]),
        size_in=int(parts["size_in"]),
        size_out=int(parts["size_out"]),
        rows=LinearRows(parts["rows"]),
        has_bias=parts["bias"] is not None,
        epilogue=Epilogue(parts["epilogue"] or "none"),
        weight_format=WeightFormat(parts["format"]),
    )
    if str(shape) != text:
        raise ValueError(f"{text!r} is no linear shape as {shape} is written")
    return shape
