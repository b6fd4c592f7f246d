"""The operators that are proven by shape and path, and what is asked of a shape whatever its operator is.

An operator beside attention has a shape class that follows `RowsShape`: a frozen dataclass of everything that selects
its kernels, with a bucket of rows. Attention's shape has two buckets of lengths, and answers by the functions here.
"""

from enum import Enum
from typing import Protocol

from kernels.vocabulary.shape import AttentionShape, Dtype, Phase, flops, hbm_bytes_standard, hbm_bytes_tiled


class Operator(Enum):
    """One heavy kind of work in a forward pass. The value is the first word of its shapes' lines, and their phase."""

    ATTENTION = "attention"  # whose lines begin with its phase instead
    LINEAR = "linear"
    EXPERTS = "experts"
    COLLECTIVE = "collective"


class AnyBucket(Protocol):
    """A half-open interval `(lo, hi]`; None for one without an end."""

    @property
    def label(self) -> str: ...
    @property
    def lo(self) -> int: ...
    @property
    def hi(self) -> int | None: ...


class RowsShape(Protocol):
    """Shape of an operator that computes the rows of a call (tokens) each by itself."""

    @property
    def operator(self) -> Operator: ...
    @property
    def dtype(self) -> Dtype:
        """Return the dtype of the rows and of the result."""

    @property
    def rows(self) -> AnyBucket: ...
    @property
    def kind(self) -> str:
        """The line without the bucket: what the shapes of one weight, or of equal ones, share."""

    def flops(self, num_rows: int) -> int:
        """Floating-point operations of a call on so many rows."""

    def hbm_bytes(self, num_rows: int) -> int:
        """HBM bytes of a call when weights, rows and results are read or written once."""

    def __hash__(self) -> int: ...


AnyShape = AttentionShape | RowsShape
_FEW_ROWS = 128


def operator_of(shape: AnyShape) -> Operator:
    return Operator.ATTENTION if isinstance(shape, AttentionShape) else shape.operator


def phase_of(shape: AnyShape) -> str:
    """The value of the label `phase`: attention's phase, else the operator, whose calls take the rows of all phases."""
    return shape.phase.value if isinstance(shape, AttentionShape) else shape.operator.value


def place_of_phase(phase: str) -> int:
    """The place of `phase_of` in reports: attention's phases, then the operators."""
    return [*(it.value for it in Phase), *(it.value for it in Operator)].index(phase)


def buckets_of(shape: AnyShape) -> tuple[AnyBucket, AnyBucket]:
    """The buckets of query and context; of an operator without context the bucket of its rows, twice."""
    if isinstance(shape, AttentionShape):
        return shape.query_bucket, shape.context_bucket
    return shape.rows, shape.rows


def flops_of(shape: AnyShape, num_queries: int, num_keys: int) -> int:
    """Floating-point operations of one sequence of attention, or of a call on `num_queries` rows."""
    return flops(shape, num_queries, num_keys) if isinstance(shape, AttentionShape) else shape.flops(num_queries)


def hbm_bytes_of(shape: AnyShape, num_queries: int, num_keys: int) -> tuple[int, int]:
    """HBM bytes by the IO model: of tiled attention and of standard attention; of other operators one number, twice."""
    if isinstance(shape, AttentionShape):
        return hbm_bytes_tiled(shape, num_queries, num_keys), hbm_bytes_standard(shape, num_queries, num_keys)
    num_bytes = shape.hbm_bytes(num_queries)
    return num_bytes, num_bytes


def is_bound_by_memory(shape: AnyShape) -> bool:
    """Return whether its speed is given in bytes a second: attention's decode, and products of up to 128 rows."""
    if isinstance(shape, AttentionShape):
        return shape.phase is Phase.DECODE
    return shape.rows.hi is not None and shape.rows.hi <= _FEW_ROWS
