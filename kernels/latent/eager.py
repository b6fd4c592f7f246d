"""`sdpa.cpu.latent` and `sdpa.math.latent`: attention whose values are the first numbers of its keys, by PyTorch.

Whole keys are taken for values, and the results' numbers behind the values' are dropped: of 512 and 64 that is an
eighth more to multiply.
"""

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.sdpa.backends import run_cpu, run_math


def run_latent_cpu(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """`sdpa.cpu.latent`; arguments as of `RunAttention`, v a view of the first numbers of k, out of v's size."""
    wide = torch.empty_like(q)
    run_cpu(q, k, k, batch, flags, wide)
    out.copy_(wide[..., : v.shape[-1]])


def run_latent_math(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """`sdpa.math.latent`; arguments likewise."""
    wide = torch.empty_like(q)
    run_math(q, k, k, batch, flags, wide)
    out.copy_(wide[..., : v.shape[-1]])
