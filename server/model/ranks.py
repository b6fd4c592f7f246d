"""Exchange between tensor-parallel ranks within a forward pass: sums of parts, and parts of the logits."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from server.model.linear import Product


@dataclass(frozen=True, slots=True)
class Ranks:
    """`world` processes of torch.distributed's default group, each with the same shapes. `index` is this one's.

    Every method is called by all ranks, in the same order, and raises torch's RuntimeError where one of them is gone.
    """

    index: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.world:
            raise ValueError(f"rank {self.index} is outside of [0, {self.world})")

    def sum(self, part: Tensor) -> Tensor:
        """Add the ranks' parts, in place.

        Every rank has the same bits. On a CPU parts are added in the order of the ranks and in fp32; on a GPU NCCL
        chooses the order.
        """
        if part.is_cuda:
            dist.all_reduce(part)
            return part
        parts = [torch.empty_like(part) for _ in range(self.world)]
        dist.all_gather(parts, part)
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        return part.copy_(total)

    def summed(self, product: Product) -> Product:
        """`product`, of whose result each rank computes a part of the sum."""
        return lambda x: self.sum(product(x))

    def joined(self, part: Tensor, sizes: list[int]) -> Tensor:
        """[R, sum of sizes] from each rank's columns [R, its size]; every rank gets them all."""
        widest = max(sizes)
        padded = part if part.shape[1] == widest else torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded.contiguous())
        return torch.cat([found[:, :size] for found, size in zip(parts, sizes, strict=True)], dim=1)


ALONE = Ranks()
