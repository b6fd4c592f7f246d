"""Sums over ranks by torch.distributed: NCCL between GPUs, gloo between processes of a CPU.

Parts are added in the order of the ranks, in fp32, and the sum is rounded once. Of two ranks NCCL's all-reduce does
just that. Of more it would round between ranks, in an order of its own: each rank then gets everyone's part of one
slice, adds them up, and gives the sum to all, which moves as many bytes as a ring does.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.collective.peers import AddNorm, Peers
from kernels.fused.norm import add_rms_norm

gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on


def run_library(peers: Peers, part: Tensor, follows: AddNorm | None, out: Tensor) -> None:
    """Fill out [rows, columns] with the sum of the ranks' parts, or with the norm that follows.

    part, out  contiguous; part may be written over, and out may be part
    """
    total = _sum(part, peers.world)
    if follows is not None:
        total, _ = add_rms_norm(total, follows.residual, follows.weight, follows.eps)
    if total.data_ptr() != out.data_ptr():
        out.copy_(total)


def _sum(part: Tensor, world: int) -> Tensor:
    if part.is_cuda and world == 2:
        dist.all_reduce(part)
        return part
    if not part.is_cuda or part.numel() % world:
        parts = part.new_empty(world, *part.shape)
        gather_into(parts.flatten(0, 1), part)
        return part.copy_(_added(parts))
    slices = part.new_empty(world, part.numel() // world)
    dist.all_to_all_single(slices.flatten(), part.flatten())
    gather_into(part.flatten(), _added(slices).to(part.dtype))
    return part


def _added(parts: Tensor) -> Tensor:
    """Sum over the first dim, in its order and in fp32."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total
