"""`torch.attention.latent.tiles`: attention whose values are the first numbers of its keys, in one order of sums."""

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.sdpa.key_tiles import run_attention_tiles


def run_latent_tiles(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> None:
    """Arguments as of `RunAttention`, v a view of the first numbers of k, out of v's size.

    Whole keys are taken for values, and the results' numbers behind the values' are dropped.
    """
    wide = torch.empty_like(q)
    run_attention_tiles(q, k, k, batch, flags, wide)
    out.copy_(wide[..., : v.shape[-1]])
