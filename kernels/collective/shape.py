"""The shape of a sum over ranks: everything that selects a kernel for it, and what it costs."""

import re
from dataclasses import dataclass
from enum import Enum

from kernels.vocabulary.operators import Operator
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype

_LINE = re.compile(r"collective (?P<dtype>\w+) c(?P<columns>\d+) ranks(?P<world>\d+) (?P<follows>\w+) r-(?P<rows>\w+)")


class Follows(Enum):
    """Operation that is computed with the sum in the same call."""

    NOTHING = "sum"
    ADD_NORM = "add_norm"  # it is added to the residual, which is normed


@dataclass(frozen=True, slots=True)
class CollectiveShape:
    """The sum of a row over all ranks, which all of them get.

    dtype    of parts, residual and result
    columns  of a row
    world    ranks
    rows     of a call
    """

    dtype: Dtype
    columns: int
    world: int
    follows: Follows
    rows: TokenRows

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that no sum has."""
        if self.columns < 1 or self.world < 2:
            raise ValueError(f"expected columns and two ranks or more, found {self.columns} and {self.world}")

    @property
    def operator(self) -> Operator:
        return Operator.COLLECTIVE

    @property
    def kind(self) -> str:
        """The line without the bucket."""
        name = Operator.COLLECTIVE.value
        return f"{name} {self.dtype.value} c{self.columns} ranks{self.world} {self.follows.value}"

    def __str__(self) -> str:
        """One line for logs, plans and reports; unique for every shape."""
        return f"{self.kind} r-{self.rows.label}"

    def flops(self, num_rows: int) -> int:
        """Additions of the sum, and with a norm six operations of each element."""
        each = self.world - 1 + (6 if self.follows is Follows.ADD_NORM else 0)
        return each * num_rows * self.columns

    def hbm_bytes(self, num_rows: int) -> int:
        """Bytes of one GPU's memory when its part is read, the others' parts and the result written, and they read.

        The residual is read and written too.
        """
        rows = 2 + 2 * (self.world - 1) + (2 if self.follows is Follows.ADD_NORM else 0)
        return rows * num_rows * self.columns * self.dtype.num_bytes


def parse_collective_shape(text: str) -> CollectiveShape:
    """Parse a shape's line. Raises ValueError for text that `str` makes of no shape."""
    found = _LINE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no shape of a collective")
    field = found.groupdict()
    shape = CollectiveShape(
        Dtype(field["dtype"]),
        int(field["columns"]),
        int(field["world"]),
        Follows(field["follows"]),
        TokenRows(field["rows"]),
    )
    if str(shape) != text:
        raise ValueError(f"{text!r} is no shape of a collective as {shape} is written")
    return shape
