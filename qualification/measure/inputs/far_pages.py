"""Hostile inputs whose pages lie so far into their pool that an offset of 32 bits names another place.

Pools of the other inputs are small: `page * stride` in 32 bits is right in all of them, and wrong in a server whose
pool of a layer has more than 2**31 numbers. Here every page that is used begins past number 2**32 of its pool. Taken
modulo 2**32, signed or not, its offset is that of one of the first pages, which hold NaN.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kernels.vocabulary.shape import AttentionShape
from kernels.vocabulary.value_shape import values_of
from qualification.measure.inputs.attention_inputs import Case, few_case
from qualification.measure.inputs.far_memory import FAR, far_memory

_ALIGNED_PAGES = 16  # so many pages of any stride are whole 16 bytes, as copies of tiles need it


def far_cases(shape: AttentionShape, device: torch.device, *, seed: int) -> Iterator[Case]:
    """Yield the case `far_pages` of a shape with pages; nothing where there is no memory for its pool, which is logged.

    The pool takes 2**32 numbers, of keys and values together: 8.6 GB of a GPU in 16 bits, and on a CPU addresses alone,
    of which the pages that are used get memory.
    """
    if shape.page_size is None:
        return
    near = few_case(shape, device, seed=seed)
    num_pages = -(-max(near.k.shape[0], near.v.shape[0]) // _ALIGNED_PAGES) * _ALIGNED_PAGES
    stride = max(near.k.stride(0), near.v.stride(0))
    first, size = -(-FAR // stride), near.k.element_size()
    memory = far_memory((first + 2 * num_pages) * stride * size, device)
    if memory is None:
        return
    for start in (0, first):  # keys and values in turn
        memory[start * stride * size : (start + 2 * num_pages) * stride * size] = 0xFF  # NaN in every dtype
    pool = memory.view(near.k.dtype)
    k = _moved(near.k, pool, stride, first, 0)
    values = values_of(shape)
    if values is not None and values.is_latent:
        v = k[..., : values.dim]
    else:
        v = _moved(near.v, pool, stride, first, num_pages)
    assert near.batch.page_table is not None, "a shape with pages has a page table"
    batch = replace(near.batch, page_table=near.batch.page_table + first)
    yield replace(near, name="far_pages", k=k, v=v, batch=batch, near=near)


def _moved(pages: Tensor, pool: Tensor, stride: int, first: int, offset: int) -> Tensor:
    """Return a view of the pool from its page `offset` on, whose pages from `first` on are copies of these.

    pages   [n, page_size, kv_heads, dim], dense but for what lies behind the numbers of a page
    pool    [numbers], of the same dtype; stride: numbers from page to page
    """
    strides = (stride, *pages.stride()[1:])
    found = pool.as_strided((first + pages.shape[0], *pages.shape[1:]), strides, offset * stride)
    of_page = pages.stride(0)  # with the scales of 8 bits
    bytes_of = [
        x.as_strided((pages.shape[0], of_page), (step, 1), at).view(torch.uint8)
        for x, step, at in ((found, stride, (offset + first) * stride), (pages, of_page, pages.storage_offset()))
    ]
    bytes_of[0].copy_(bytes_of[1])
    return found
