"""Pages of keys, or of values, in e4m3 with one fp32 scale for each token and KV head, in the page behind its numbers.

A page holds, one after the other,

    [page_size, kv_heads, head_dim] e4m3     numbers
    [kv_heads, page_size]           fp32     what a token's numbers of that head are multiplied by

so that whatever copies, hashes or hands on pages does so with their scales. Pages travel as the view of their numbers,
[num_pages, page_size, kv_heads, head_dim] float8_e4m3fn, whose stride from page to page tells of the scales behind.
Nothing is calibrated: a scale is the largest magnitude of what it scales, over 448.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LEAST_MAGNITUDE = 2.0**-100  # taken as the largest of numbers that are all smaller: no scale is zero or subnormal
SCALE_BYTES = 4
HEAD_DIM_MULTIPLE = 4  # scales lie at whole 4 bytes


def page_bytes(page_size: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the bytes of a page of keys, or of values."""
    return page_size * num_kv_heads * (head_dim + SCALE_BYTES)


def allocate(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, device: torch.device) -> Tensor:
    """Return pages of zeros: the view of their numbers.

    Raises ValueError for a head dim that is no multiple of 4.
    """
    if head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(f"head_dim: expected a multiple of {HEAD_DIM_MULTIPLE} in an fp8 cache, found {head_dim}")
    size = page_bytes(page_size, num_kv_heads, head_dim)
    return view_of(torch.zeros(num_pages, size, dtype=torch.uint8, device=device), page_size, num_kv_heads)


def view_of(memory: Tensor, page_size: int, num_kv_heads: int) -> Tensor:
    """Return the numbers of pages [num_pages, bytes] uint8, contiguous."""
    num_pages, size = memory.shape
    head_dim = size // (page_size * num_kv_heads) - SCALE_BYTES
    strides = (size, num_kv_heads * head_dim, head_dim, 1)
    return memory.view(E4M3).as_strided(
        (num_pages, page_size, num_kv_heads, head_dim), strides, memory.storage_offset()
    )


def memory_of(pages: Tensor) -> Tensor:
    """Return all bytes of pages, [num_pages, bytes] uint8, of the view of their numbers."""
    size = page_bytes(*pages.shape[1:])
    return pages.as_strided((pages.shape[0], size), (size, 1), pages.storage_offset()).view(torch.uint8)


def scales_of(pages: Tensor) -> Tensor:
    """Return the scales of pages, [num_pages, kv_heads, page_size] fp32, of the view of their numbers.

    Raises ValueError where no scales lie behind the numbers: a stride that is not that of such a page.
    """
    num_pages, page_size, num_kv_heads, head_dim = pages.shape
    size = page_bytes(page_size, num_kv_heads, head_dim)
    strides = (size, num_kv_heads * head_dim, head_dim, 1)
    if pages.stride() != strides or pages.storage_offset() % SCALE_BYTES:
        raise ValueError(
            f"fp8 pages: expected strides {strides}, scales behind the numbers, and an offset of whole 4 bytes, "
            f"found {pages.stride()} at {pages.storage_offset()}"
        )
    offset = (pages.storage_offset() + page_size * num_kv_heads * head_dim) // SCALE_BYTES
    return torch.empty(0, dtype=torch.float32, device=pages.device).set_(
        pages.untyped_storage(), offset, (num_pages, num_kv_heads, page_size), (size // SCALE_BYTES, page_size, 1)
    )


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., head_dim] as (e4m3 numbers of its shape, scales [...] fp32): numbers times scale are x, rounded.

    The definition: divisions round to nearest, what exceeds 448 is 448, numbers round to nearest, ties to even.
    """
    precise = x.float()
    largest = precise.abs().amax(dim=-1).clamp_(min=LEAST_MAGNITUDE)
    scales = largest / largest.new_full((1,), LARGEST)  # by a number a GPU would multiply with its reciprocal
    return (precise / scales[..., None]).clamp_(-LARGEST, LARGEST).to(E4M3), scales


def dequantized(pages: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the keys or values that pages hold, [num_pages, page_size, kv_heads, head_dim] in `dtype`.

    Exact in fp64; in fp32 each is rounded once.
    """
    return pages.to(dtype) * scales_of(pages).to(dtype).transpose(1, 2)[..., None]


def dequantized_at(pages: Tensor, page: Tensor, offset: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what pages hold at `offset` [n] of `page` [n], [n, kv_heads, head_dim]."""
    numbers = pages.view(torch.uint8)[page, offset].view(E4M3)
    return numbers.to(dtype) * scales_of(pages)[page, :, offset].to(dtype)[..., None]


def write(x: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    """Write x [tokens, kv_heads, head_dim] into pages at `slots` [tokens] int64, page * page_size + offset.

    Returns what the pages then hold, of x's shape, fp32.
    """
    numbers, scales = quantized(x)
    page, offset = slots // pages.shape[1], slots % pages.shape[1]
    # As bytes: index_put takes no e4m3 on a CPU.
    pages.view(torch.uint8)[page, offset] = numbers.view(torch.uint8)
    scales_of(pages)[page, :, offset] = scales
    return numbers.float() * scales[..., None]
