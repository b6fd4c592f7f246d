"""Inputs on which wrong sums over ranks go wrong: parts that cancel, edges of programs, other sizes between."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.collective.inboxes import PROGRAMS
from kernels.collective.peers import AddNorm
from kernels.collective.shape import CollectiveShape, Follows
from kernels.system.device import torch_dtype

_MOST_ROWS_CPU = 512
_CANCELLING = 256.0  # of a part, which another rank takes away again
_LARGE = 1000.0
_LOST = 2.0**-14  # of a part, beside which fp32 loses the others: their order is then in the bits of the sum
# In this order: what is stale from a call of many rows shows in the few rows of the next.
NAMES = ("fewest", "most", "few again", "cancelling", "order", "one large", "border", "border and one", "most again")


@dataclass(frozen=True, slots=True)
class CollectiveCase:
    """Inputs of the ranks, which each of them makes for itself from the seed.

    parts    [ranks, rows, columns]
    follows  None where nothing follows; its residual is as before the call
    """

    name: str
    seed: int
    shape: CollectiveShape
    parts: Tensor
    follows: AddNorm | None


def tested_rows(shape: CollectiveShape, *, is_cpu: bool) -> int:
    """The most rows that are tested: the bucket's upper edge (2x the lower without an end), on a CPU less."""
    most = 2 * shape.rows.lo if shape.rows.hi is None else shape.rows.hi
    return min(most, max(_MOST_ROWS_CPU, shape.rows.lo + 1)) if is_cpu else most


def collective_cases(shape: CollectiveShape, device: torch.device, *, seed: int) -> Iterator[CollectiveCase]:
    """Every hostile input, with numbers of rows in the shape's bucket.

    cancelling   every second rank takes away what the one before it adds, but for a rest
    order        the second rank's part is large, the third takes it away again: what the first added is lost
    one large    the last rank's part is 1000 times the others'
    border       as many rows as programs run at once, and one more
    """
    return (collective_case(shape, name, device, seed=seed) for name in NAMES)


def collective_case(shape: CollectiveShape, name: str, device: torch.device, *, seed: int) -> CollectiveCase:
    """The input of that name, the same on every rank of a machine."""
    random = torch.Generator(device).manual_seed(seed * len(NAMES) + NAMES.index(name))
    most = tested_rows(shape, is_cpu=device.type == "cpu")
    wanted = {
        "fewest": 1,
        "few again": 2,
        "border": PROGRAMS - shape.rows.lo,
        "border and one": PROGRAMS + 1 - shape.rows.lo,
    }
    rows = min(shape.rows.lo + max(wanted.get(name, most), 1), most)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=random, device=device)

    parts = randn(shape.world, rows, shape.columns)
    if name == "cancelling":
        large = _CANCELLING * randn(rows, shape.columns)
        parts[0::2] += large
        parts[1::2] -= large
    if name == "order":
        parts *= _LOST
        parts[1:3] = parts[1:2] / _LOST**2
        parts[2:3] *= -1
    if name == "one large":
        parts[-1] *= _LARGE
    dtype = torch_dtype(shape.dtype)
    follows = None
    if shape.follows is Follows.ADD_NORM:
        weight = 1 + 0.1 * randn(shape.columns)
        follows = AddNorm(randn(rows, shape.columns).to(dtype), weight.to(dtype), 1e-5)
    return CollectiveCase(name, seed, shape, parts.to(dtype), follows)
