"""The page table of a batch as an argument of Triton kernels that take packed keys, too."""

from torch import Tensor

from kernels.calls.batch import AttentionBatch


def page_table_argument(batch: AttentionBatch) -> Tensor:
    """Return the page table, or, of packed keys, a tensor that is not read.

    Triton compiles what follows an early return, whatever the constant before it: with None in place of a pointer no
    GPU could compile the kernels of prompts.
    """
    return batch.cu_seqlens_q if batch.page_table is None else batch.page_table
