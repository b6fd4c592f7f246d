"""Sums of many rows over two ranks: each sends its rows to the other by copy engines, and adds up what arrives.

Two ranks' sums need no reduction on the way: each gets the other's rows, as many bytes as by NCCL, but no
multiprocessor moves them. Rows can be sent while later ones are still multiplied: `Boxes.start`, ahead of the call.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from kernels.collective.boxes import MOST_PIECES, MOST_ROWS, WORD_BYTES, Boxes, BoxPeers, pieces
from kernels.collective.exchange import hallmark_exchange_sum
from kernels.collective.peers import AddNorm, Peers
from kernels.fused.backend import Aligned, Loaded, next_power_of_2, prepare


def run_exchange(peers: Peers, part: Tensor, follows: AddNorm | None, out: Tensor) -> None:
    """Fill out [rows, columns] with the sum of both ranks' parts, or with the norm that follows.

    part, out  contiguous; part may be written over, and out may be part. Where rows of it were started, all were, in
               order and nothing else
    Raises ValueError where the ranks have no boxes for such rows.
    """
    boxes = peers.boxes if isinstance(peers, BoxPeers) else None
    if boxes is None:
        raise ValueError("the ranks have no boxes: they are not two GPUs that address each other's memory")
    if boxes.started:
        _check(boxes, part)
        _finish(boxes, part, follows, out)
        return
    for first in range(0, part.shape[0], MOST_ROWS):
        some = slice(first, first + MOST_ROWS)
        for rows in part[some].split_with_sizes(list(pieces(part[some].shape[0]))):
            boxes.start(rows)
        then = None if follows is None else replace(follows, residual=follows.residual[some])
        _finish(boxes, part[some], then, out[some])


def _check(boxes: Boxes, part: Tensor) -> None:
    at = part.data_ptr()
    for rows in boxes.started:
        if rows.data_ptr() != at:
            raise ValueError("rows were started that are not those of this sum")
        at += rows.numel() * rows.element_size()
    if at != part.data_ptr() + part.numel() * part.element_size():
        raise ValueError("rows of this sum were started, but not all of them")


def _finish(boxes: Boxes, part: Tensor, follows: AddNorm | None, out: Tensor) -> None:
    """Add up the rows that were started, which are those of the part."""
    (num_rows, columns), weight_dtype = part.shape, None if follows is None else follows.weight.dtype
    residual, weight, eps = (part, part, 0.0) if follows is None else (follows.residual, follows.weight, follows.eps)
    begins = list(accumulate(rows.shape[0] for rows in boxes.started[:-1]))
    begins += [num_rows] * (MOST_PIECES - 1 - len(begins))
    if torch.cuda.is_current_stream_capturing():
        boxes.join()
    kernel = _kernel(part.device, part.dtype, weight_dtype, columns)
    addresses = residual.data_ptr(), weight.data_ptr(), out.data_ptr()
    kernel((num_rows, 1, 1), (part.data_ptr(), boxes.other, boxes.words, *begins, *addresses, eps))
    boxes.finish()


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=64)
def _kernel(device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype | None, columns: int) -> Loaded:
    """weight_dtype: None where nothing follows the sum. Without an early start: what it reads comes by a copy."""
    block = next_power_of_2(columns)
    rows, word = Aligned(dtype), Aligned(torch.int32)
    weight = rows if weight_dtype is None else Aligned(weight_dtype)
    num_warps = min(max(block // 512, 1), 16)  # as `_rms_norm_kernel`, whose order of sums this one's is
    return prepare(
        hallmark_exchange_sum, device, rows, rows, word, 2, 2, 2, rows, weight, rows, 0.0,
        SIZE=columns, BLOCK=block, HAS_NORM=weight_dtype is not None, WORD=WORD_BYTES // 4, num_warps=num_warps,
    )  # fmt: skip
