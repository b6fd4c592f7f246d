"""Launches of `gluon.decode.fp8.hopper`, past Triton's binder, as those of `gluon.decode.hopper`."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.fp8_cache.hopper.kernel import hallmark_gluon_decode_fp8
from kernels.fp8_cache.hopper.variants import Fp8DecodeVariant, fp8_variant_of
from kernels.fp8_cache.pages import page_bytes, scales_of
from kernels.hopper.decode.kernel import hallmark_gluon_decode_combine
from kernels.hopper.decode.launch import Operands, ToLaunch, operands_of, query_map
from kernels.tma.launches import Launches, Maps, TensorMap, any_map, repeated, scales, tensor_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor

_PARTS = {64: 64, 128: 64, 256: 32}  # as of 16 bits: partial results that a combining program works on at once
_COMBINE_WARPS = 4
_MAX_WINDOW = 1 << 30  # int32 arithmetic on positions must not overflow
_UNITS = torch.float16  # what two dims of 8 bits are called where they are copied


@repeated
def run_decode_fp8_hopper(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> Launches | None:
    """Fill `out`, in two launches that do not wait for the device and are the same for all lengths.

    q, out [tokens, heads, head_dim] fp16 or bf16, last dims contiguous; k, v pages as `pages.allocate` makes them.
    Slots past a context may hold anything; so may page-table entries past a sequence's last page and those before the
    page where a window begins. A sequence may have several queries, its last positions.
    Lengths must not come from a launch that lets the next one start early; all else may.
    Raises ValueError for arguments that the path's limits reject, and for pages without scales.
    """
    if not flags.causal or flags.spans is not None:
        raise ValueError("mask: expected causal, found another")
    if q.shape[0] == 0:
        return None
    table = batch.page_table
    assert table is not None, "decode reads pages"
    if k.shape[0] == 0 or table.shape[1] == 0:
        out.zero_()  # no key, so no query sees one; TMA takes no empty tensor, and a table's first entry may be read
        return None
    stride_token, stride_head, _ = q.stride()
    if min(stride_token, stride_head) <= 0 or (stride_token | stride_head) * 2 % 16 or q.data_ptr() % 16:
        run_decode_fp8_hopper(q.clone(memory_format=torch.contiguous_format), k, v, batch, flags, out)
        return None
    max_keys = batch.max_context if flags.window is None else min(batch.max_context, flags.window)
    variant = fp8_variant_of(
        q.shape[2], k.shape[1], (q.shape[1], k.shape[2]), max(1, batch.max_seqlen_q), batch.num_seqs, max_keys, flags
    )
    return launches_of(q, k, v, batch, flags, out, variant=variant)


def launches_of(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *,
    variant: Fp8DecodeVariant,
) -> Launches:  # fmt: skip
    """The launches of a call, of a variant made for these arguments."""
    for pages in (k, v):
        scales_of(pages)
    operands: Operands = operands_of(batch, flags, out)
    to_launch = launcher(variant, q.device, *operands.compiled_in(q.dtype))
    split, num_programs = to_launch.split, to_launch.num_programs
    size = 2 * num_programs * variant.heads * variant.columns * (variant.block_d + 2)
    # One for all layers of a step: written when the launch before has ended, which may have read it.
    scratch = batch.once(("decode scratch", size), lambda: torch.empty(size, dtype=torch.float32, device=q.device))
    rows_of_sequence = k.shape[2] // variant.heads * variant.parts
    window = 0 if flags.window is None else min(flags.window, _MAX_WINDOW)
    out_at, *between, table_at = operands.addresses()
    result = (out_at, scratch.data_ptr(), *between)
    strides, numbers = operands.strides(), (batch.num_seqs, rows_of_sequence)
    queries = query_map(split, variant.group, q.shape, q.stride()).at(q.data_ptr())
    return Launches(
        split,
        num_programs,
        queries,
        page_maps(split, k.shape, (k.data_ptr() | v.data_ptr()) % 16),
        (*result, table_at, *strides, operands.table.stride(0), *numbers, *scales(flags), window),
        sinks_at=2,
        then=to_launch.combine.repeated((num_programs, variant.heads, 1), (*result, *strides, *numbers, window)),
        then_sinks_at=Loaded.FIRST + 2,
        held=(scratch,),
    )


class ScaledMaps(Maps):
    """The kernel's arguments for keys, values and the scales of both, by the addresses of keys and values."""

    def __init__(self, units: tuple[TensorMap, TensorMap], of_scales: tuple[TensorMap, TensorMap], behind: int) -> None:
        """`behind`: bytes from a page's numbers to its scales."""
        super().__init__(*units)
        self._of_scales, self._behind = of_scales, behind

    def __missing__(self, at: tuple[int, int]) -> tuple[object, ...]:
        made = super().__missing__(at)
        if made:
            added = (it.at(address + self._behind) for it, address in zip(self._of_scales, at, strict=True))
            made = self[at] = (*made, *(argument for of_map in added for argument in of_map))
        return made


# Pure functions of what is compiled in: the caches hold no state. What falls out is found again in Triton's own cache.
@lru_cache(maxsize=256)
def launcher(variant: Fp8DecodeVariant, device: torch.device, *compiled_in: Any) -> ToLaunch:
    split, combine = (Loaded(kernel, device) for kernel in compiled_decode_fp8(variant, *compiled_in))
    return ToLaunch(split, combine, num_processors(device) * variant.per_processor)


def compiled_decode_fp8(
    variant: Fp8DecodeVariant,
    dtype: torch.dtype,
    out: PointerClass,
    sinks: PointerClass | None,
    cu_seqlens_q: PointerClass,
    context_lens: PointerClass,
    table: PointerClass,
    out_strides: tuple[int, int],
) -> tuple[Any, Any]:
    """Compile both kernels for tensors of these dtypes and alignments."""
    queries = any_map(dtype, [variant.heads, variant.queries, variant.members, variant.chunk_d])
    pages = any_map(_UNITS, [1, variant.heads, variant.block_n, variant.units])
    of_scales = _any_map_of_scales([1, variant.heads, variant.block_n])
    lengths = (any_tensor(cu_seqlens_q), any_tensor(context_lens))
    result = (any_tensor(out), AnyTensor(torch.float32, 0), any_tensor(sinks), *lengths)
    split = hallmark_gluon_decode_fp8.warmup(
        queries, pages, pages, of_scales, of_scales, *result, any_tensor(table), *out_strides, 0, 0, 0, 0.0, 0.0, 0,
        variant, grid=(1,), num_warps=variant.warps, launch_pdl=True,
    )  # fmt: skip
    combine = hallmark_gluon_decode_combine.warmup(
        *result, *out_strides, 0, 0, 0, _PARTS[variant.block_d], variant, grid=(1,), num_warps=_COMBINE_WARPS,
        launch_pdl=True,
    )  # fmt: skip
    return split, combine


def _any_map_of_scales(box: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float32)
    return TensorDescriptor(AnyTensor(torch.float32, 0), [1] * len(box), [8] * (len(box) - 1) + [1], box, layout)


@lru_cache(maxsize=64)  # kept for the next step
def page_maps(kernel: Loaded, shape: tuple[int, ...], residue: int) -> Maps:
    """Return maps of boxes of some tokens of some heads in a page: units, and scales.

    residue: of addresses modulo 16. Raises ValueError where TMA cannot address the memory.
    """
    num_pages, page_size, num_heads, head_dim = shape
    size = page_bytes(page_size, num_heads, head_dim)
    if residue or head_dim % 16 or page_size % 16:
        raise ValueError(f"expected addresses and rows of whole 16 bytes, found {shape} at {residue:#x}")
    units, row = head_dim // 2, num_heads * head_dim // 2
    dims, strides = (num_pages, num_heads, page_size, units), (size // 2, units, row, 1)
    of_scales, scale_strides = (num_pages, num_heads, page_size), (size // 4, page_size, 1)
    return ScaledMaps(
        (tensor_map(kernel, 1, dims, strides), tensor_map(kernel, 2, dims, strides)),
        (tensor_map(kernel, 3, of_scales, scale_strides), tensor_map(kernel, 4, of_scales, scale_strides)),
        page_size * num_heads * head_dim,
    )
