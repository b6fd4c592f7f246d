"""Launches of `gluon.decode.hopper`, past Triton's binder, which costs the host more than a short step the GPU."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded
from kernels.calls.processors import num_processors
from kernels.hopper.decode.cluster import hallmark_gluon_decode_cluster
from kernels.hopper.decode.kernel import hallmark_gluon_decode, hallmark_gluon_decode_combine
from kernels.hopper.decode.variants import DecodeVariant, variant_of
from kernels.tma.launches import Launches, Maps, TensorMap, any_map, repeated, scales, tensor_map
from kernels.tma.pointers import AnyTensor, PointerClass, any_tensor, pointer_class

# Of a combining program: partial results that it works on at once where a row has many, by padded head dim, which makes
# 64 registers a thread; and its warps.
_PARTS = {64: 64, 128: 64, 256: 32}
_COMBINE_WARPS = 4
_MAX_WINDOW = 1 << 30  # int32 arithmetic on positions must not overflow


class ToLaunch(NamedTuple):
    """The kernels, and the programs of the first one."""

    split: Loaded
    combine: Loaded
    num_programs: int


@repeated
def run_decode(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> Launches | None:
    """Fill `out`, in one or two launches that do not wait for the device and are the same for all lengths.

    q, out [tokens, heads, head_dim]; k, v [num_pages, page_size, kv_heads, head_dim]; fp16 or bf16, last dims
    contiguous. Slots past a context may hold anything, NaN too; so may page-table entries past a sequence's last page
    (the kernel for one sequence reads some, and uses none) and those before the page where a window begins; a table may
    have no column. A sequence may have several queries, its last positions.
    Lengths must not come from a launch that lets the next one start early; all else may.
    Raises ValueError for arguments that the path's limits reject, and for pages that TMA cannot address.
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
    addressable = _addressable(q)
    if addressable is not q:
        run_decode(addressable, k, v, batch, flags, out)  # the copy is held until launched
        return None
    max_queries = max(1, batch.max_seqlen_q)
    heads = (q.shape[1], k.shape[2])
    max_keys = batch.max_context if flags.window is None else min(batch.max_context, flags.window)
    sizes = (q.shape[2], k.shape[1], heads, max_queries, batch.num_seqs, max_keys)
    variant = variant_of(*sizes, flags)
    if variant.cluster > 1:
        launch = launch_of_clusters(q, k, v, batch, flags, out, variant=variant)
        if launch is not None:
            return launch
        variant = variant_of(*sizes, flags, in_clusters=False)
    return launches_of(q, k, v, batch, flags, out, variant=variant)


def launches_of(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *,
    variant: DecodeVariant,
) -> Launches:  # fmt: skip
    """The launches of a call, of a variant made for these arguments."""
    operands = operands_of(batch, flags, out)
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
    return Launches(
        split,
        num_programs,
        *maps_of(split, variant, q, k, v),
        (*result, table_at, *strides, operands.table.stride(0), *numbers, *scales(flags), window),
        sinks_at=2,
        then=to_launch.combine.repeated((num_programs, variant.heads, 1), (*result, *strides, *numbers, window)),
        then_sinks_at=Loaded.FIRST + 2,
        held=(scratch,),
    )


def launch_of_clusters(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, *,
    variant: DecodeVariant,
) -> Launches | None:  # fmt: skip
    """The launch of a call for one sequence, of a variant made for these arguments; None where no cluster has room."""
    operands = operands_of(batch, flags, out)
    kernel = cluster_launcher(variant, q.device, *operands.compiled_in(q.dtype))
    if kernel is None:
        return None
    return Launches(
        kernel,
        k.shape[2] * variant.parts,
        *maps_of(kernel, variant, q, k, v),
        (*operands.addresses(), *operands.strides(), operands.table.shape[1], *scales(flags)),
        sinks_at=1,
    )


class Operands(NamedTuple):
    """A call's tensors besides queries, keys and values, in the order in which the kernels take them."""

    out: Tensor
    sinks: Tensor | None
    cu_seqlens_q: Tensor
    context_lens: Tensor
    table: Tensor

    def strides(self) -> tuple[int, int]:
        """Return the strides of the output's rows and heads."""
        return self.out.stride(0), self.out.stride(1)

    def compiled_in(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return the arguments of `compiled_decode` and `compiled_cluster` that follow the variant."""
        return dtype, *map(pointer_class, self), self.strides()

    def addresses(self) -> tuple[int | None, ...]:
        return tuple(None if x is None else x.data_ptr() for x in self)


def operands_of(batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> Operands:
    table, context_lens = batch.page_table, batch.context_lens
    assert table is not None, "decode reads pages"
    assert context_lens is not None, "pages come with lengths"
    return Operands(out, flags.sinks, batch.cu_seqlens_q, context_lens, table)


def maps_of(kernel: Loaded, variant: DecodeVariant, q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[object, ...], Maps]:
    """The kernel's arguments for the queries, and the maps of the pages."""
    queries = query_map(kernel, variant.group, q.shape, q.stride()).at(q.data_ptr())
    return queries, page_maps(kernel, k.shape, k.stride(), v.stride(), (k.data_ptr() | v.data_ptr()) % 16)


# Pure functions of what is compiled in: the caches hold no state. What falls out is found again in Triton's own cache.
@lru_cache(maxsize=256)
def launcher(variant: DecodeVariant, device: torch.device, *compiled_in: Any) -> ToLaunch:
    split, combine = (Loaded(kernel, device) for kernel in compiled_decode(variant, *compiled_in))
    return ToLaunch(split, combine, num_processors(device) * variant.per_processor)


@lru_cache(maxsize=256)
def cluster_launcher(variant: DecodeVariant, device: torch.device, *compiled_in: Any) -> Loaded | None:
    """Return the loaded kernel; None where the device has no room for a cluster, as a slice of a GPU may not."""
    kernel = compiled_cluster(variant, *compiled_in)
    loaded = Loaded(kernel, device, cluster=variant.cluster)
    return loaded if _most_clusters(kernel, variant.cluster) > 0 else None


def _most_clusters(kernel: Any, cluster: int) -> int:
    """Clusters that the current device can run at a time, of a kernel that is loaded."""
    try:  # Triton asks for programs of 128 threads, as ours are
        return int(driver.active.utils.cuOccupancyMaxActiveClusters(kernel.function, kernel.metadata.shared, cluster))
    except RuntimeError as error:
        if "cluster misconfiguration" in str(error):
            return 0
        raise


def compiled_cluster(
    variant: DecodeVariant,
    dtype: torch.dtype,
    out: PointerClass,
    sinks: PointerClass | None,
    cu_seqlens_q: PointerClass,
    context_lens: PointerClass,
    table: PointerClass,
    out_strides: tuple[int, int],
) -> Any:
    """The kernel of clusters, for such tensors."""
    queries = any_map(dtype, [1, variant.queries, variant.members, variant.block_d])
    pages = any_map(dtype, [1, 1, variant.box_n, variant.block_d])
    tensors = (any_tensor(x) for x in (out, sinks, cu_seqlens_q, context_lens, table))
    return hallmark_gluon_decode_cluster.warmup(
        queries, pages, pages, *tensors, *out_strides, 0, 0.0, 0.0, variant,
        grid=(1,), num_warps=variant.warps, launch_pdl=True,
    )  # fmt: skip


def compiled_decode(
    variant: DecodeVariant,
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
    pages = any_map(dtype, [1, variant.heads, variant.block_n, variant.chunk_d])
    lengths = (any_tensor(cu_seqlens_q), any_tensor(context_lens))
    result = (any_tensor(out), AnyTensor(torch.float32, 0), any_tensor(sinks), *lengths)
    split = hallmark_gluon_decode.warmup(
        queries, pages, pages, *result, any_tensor(table), *out_strides, 0, 0, 0, 0.0, 0.0, 0, variant,
        grid=(1,), num_warps=variant.warps, launch_pdl=True,
    )  # fmt: skip
    combine = hallmark_gluon_decode_combine.warmup(
        *result, *out_strides, 0, 0, 0, _PARTS[variant.block_d], variant, grid=(1,), num_warps=_COMBINE_WARPS,
        launch_pdl=True,
    )  # fmt: skip
    return split, combine


def _addressable(q: Tensor) -> Tensor:
    """`q` itself where TMA can address it: 16-byte aligned, positive strides; a copy elsewhere."""
    stride_token, stride_head, _ = q.stride()
    in_bytes = (stride_token | stride_head) * q.itemsize
    if stride_token > 0 and stride_head > 0 and in_bytes % 16 == 0 and q.data_ptr() % 16 == 0:
        return q
    return q.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def query_map(kernel: Loaded, group: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
    """Return the map of boxes of some KV heads' queries: [kv_heads, tokens, group, head_dim].

    Heads past a group and dims past the head dim arrive as zeros.
    """
    (num_tokens, num_heads, head_dim), (stride_token, stride_head, _) = shape, strides
    dims = (num_heads // group, num_tokens, group, head_dim)
    return tensor_map(kernel, 0, dims, (group * stride_head, stride_token, stride_head, 1))


@lru_cache(maxsize=64)  # kept for the next step
def page_maps(
    kernel: Loaded, shape: tuple[int, ...], k_strides: tuple[int, ...], v_strides: tuple[int, ...], residue: int
) -> Maps:
    """Return maps of boxes of some tokens of some heads in a page: [num_pages, kv_heads, page_size, head_dim].

    residue: of addresses modulo 16. Raises ValueError where TMA cannot address the memory.
    """
    num_pages, page_size, num_heads, head_dim = shape

    def pages(place: int, strides: tuple[int, ...]) -> TensorMap:
        in_bytes = [stride * itemsize for stride in strides[:-1]]
        if strides[-1] != 1 or min(in_bytes) <= 0 or any(size % 16 for size in (residue, *in_bytes)):
            raise ValueError(f"expected strides and an address of whole 16 bytes, found {strides} at {residue:#x}")
        dims = (num_pages, num_heads, page_size, head_dim)
        return tensor_map(kernel, place, dims, (strides[0], strides[2], strides[1], strides[3]))

    itemsize: int = kernel.boxes[1][1]
    return Maps(pages(1, k_strides), pages(2, v_strides))
