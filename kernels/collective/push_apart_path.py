"""Sums of few rows over ranks as `push_path.py`, with the norm behind it in a launch of its own.

The fused norm adds up a row's squares in another order than `kernels/fused/norm.py`, which norms many rows behind NCCL:
a row would have other bits in a small batch than in a large one.
"""

from torch import Tensor

from kernels.collective.peers import AddNorm, Peers
from kernels.collective.push_path import run_push
from kernels.fused.norm import add_rms_norm


def run_push_apart(peers: Peers, part: Tensor, follows: AddNorm | None, out: Tensor) -> None:
    """Fill out [rows, columns] with the sum of the ranks' parts, or with the norm that follows.

    part, out  contiguous; part may be written over, and out may be part
    """
    if follows is None:
        run_push(peers, part, None, out)
        return
    run_push(peers, part, None, part)
    normed, _ = add_rms_norm(part, follows.residual, follows.weight, follows.eps)
    if normed.data_ptr() != out.data_ptr():
        out.copy_(normed)
