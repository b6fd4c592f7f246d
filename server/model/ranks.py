"""Exchange between tensor-parallel ranks within a forward pass: sums of parts, parts of the logits, chosen tokens.

This is the seam that faster exchanges plug into. On CUDA everything goes by NCCL on the current stream, waits for
nothing on the host and allocates only results, so that a CUDA graph can hold it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.fused.norm import add_rms_norm
from server.model.linear import Product


@dataclass(frozen=True, slots=True)
class Ranks:
    """`world` processes of torch.distributed's default group, each with the same shapes. `index` is this one's.

    Every method is called by all ranks, in the same order, and raises torch's RuntimeError where one of them is gone.
    After each one all ranks have the same bits.
    """

    index: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.world:
            raise ValueError(f"rank {self.index} is outside of [0, {self.world})")

    def sum(self, part: Tensor) -> Tensor:
        """Add the ranks' parts, in place. On a CPU in the order of the ranks and in fp32; NCCL chooses the order."""
        if part.is_cuda:
            dist.all_reduce(part)
            return part
        parts = self._gathered(part)
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        return part.copy_(total)

    def add_norm(self, part: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """residual += the sum of the ranks' parts, then RMSNorm: what `add_rms_norm` does with that sum.

        part, residual [T, H], both written in place. Returns (normed, residual); normed may lie in `part`.
        """
        return add_rms_norm(self.sum(part), residual, weight, eps)

    def summed(self, product: Product) -> Product:
        """`product`, of whose result each rank computes a part of the sum."""
        return lambda x: self.sum(product(x))

    def joined(self, part: Tensor, sizes: Sequence[int], out: Tensor | None = None) -> Tensor:
        """[R, sum of sizes] from each rank's columns [R, its size], in `out` where it is given.

        What travels is as wide as the widest part.
        """
        num_rows, widest = part.shape[0], max(sizes)
        padded = part if part.shape[1] == widest else torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        parts = self._gathered(padded.contiguous())
        if out is None:
            out = part.new_empty(num_rows, sum(sizes))
        if min(sizes) == widest:
            out.view(num_rows, self.world, widest).copy_(parts.transpose(0, 1))
            return out
        for found, columns in zip(parts, out.split_with_sizes(list(sizes), dim=1), strict=True):
            columns.copy_(found[:, : columns.shape[1]])
        return out

    def share(self, values: Tensor) -> Tensor:
        """Give rank 0's values to all ranks, in place."""
        dist.broadcast(values, src=0)
        return values

    def _gathered(self, part: Tensor) -> Tensor:
        """[world, *part's shape] of a contiguous tensor."""
        parts = part.new_empty(self.world * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(parts, part)
        return parts.view(self.world, *part.shape)


ALONE = Ranks()
