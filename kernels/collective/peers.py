"""The ranks of one host, as the paths of a collective need them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.collective.inboxes import Inboxes


@dataclass(frozen=True, slots=True)
class Peers:
    """`world` processes of torch.distributed's default group. `index` is this one's.

    inboxes  for sums of rows; None on a CPU, and where GPUs cannot address each other's memory
    """

    index: int
    world: int
    inboxes: Inboxes | None = None


@dataclass(frozen=True, slots=True)
class AddNorm:
    """Addition and norm that follow a sum: residual += sum, rounded to its dtype, then RMSNorm of that.

    residual  [rows, columns] of the parts' dtype, contiguous, written in place
    weight    [columns], of the same dtype or fp32
    """

    residual: Tensor
    weight: Tensor
    eps: float


# Fills out [rows, columns] with the sum of the ranks' parts, or with the norm that follows. `part` may be written over,
# and out may be part: (peers, part, what follows or None, out).
RunCollective = Callable[[Peers, Tensor, AddNorm | None, Tensor], None]
