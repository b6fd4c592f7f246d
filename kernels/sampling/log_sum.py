"""The logarithm of the sum of a row's exponentials, whose bits depend on that row alone.

PyTorch sums one row in other parts than several: on a GPU by how many results there are, on a CPU by its threads.
"""

import torch
from torch import Tensor

from kernels.fused.backend import jit, runs_on_triton, tl

_BLOCK = 4096


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return log(sum(exp(logits))) of each row of logits [R, V] fp32, last dim contiguous: [R, 1]."""
    num_rows, vocab = logits.shape
    if runs_on_triton(logits):
        out = logits.new_empty(num_rows, 1)
        if num_rows:
            _log_sum_exp_kernel[(num_rows,)](logits, out, logits.stride(0), vocab, BLOCK=_BLOCK, num_warps=8)
        return out
    if num_rows == 1:  # of two rows each is summed by itself
        return torch.logsumexp(logits.expand(2, vocab).contiguous(), dim=1, keepdim=True)[:1]
    return torch.logsumexp(logits, dim=1, keepdim=True)


@jit
def _log_sum_exp_kernel(logits_ptr, out_ptr, stride_row, vocab, BLOCK: tl.constexpr):
    """One program a row: the largest logit, then the sum of what is left of each."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = logits_ptr + row * stride_row + start + cols
        largest = tl.maximum(largest, tl.load(at, mask=start + cols < vocab, other=float("-inf")))
    most = tl.max(largest, axis=0)
    shift = tl.where(tl.abs(most) == float("inf"), 0.0, most)  # as torch: no NaN of infinities less themselves
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = logits_ptr + row * stride_row + start + cols
        total += tl.exp(tl.load(at, mask=start + cols < vocab, other=float("-inf")) - shift)
    tl.store(out_ptr + row, tl.log(tl.sum(total, axis=0)) + shift)
