"""Prepared calls of `gluon.decode.hopper`: the launches of launch.py, but for addresses and the stream."""

from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.launch import Loaded
from kernels.calls.prepared import Launch, PreparedCall, launch_options, steady_range
from kernels.hopper.decode.launch import cluster_launcher, launcher, operands_of, page_maps, query_map
from kernels.hopper.decode.variants import DecodeVariant, variant_of
from kernels.hopper.schedule import bounded_window
from kernels.hopper.tensor_layout import is_addressable
from kernels.tma.launches import Maps, scales
from kernels.tma.prepared import KeptMaps


def prepare_decode(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor
) -> PreparedCall | None:
    """Prepare both launches of calls of this form, or the one by clusters. Raises ValueError as `run_decode` does."""
    table = batch.page_table
    if not flags.causal or flags.spans is not None or table is None or batch.context_lens is None:
        return None
    if q.shape[0] == 0 or k.shape[0] == 0 or table.shape[1] == 0:
        return None
    if not is_addressable(q.stride(), q.itemsize) or q.data_ptr() % 16:
        return None

    def variant_at(max_context: int, *, in_clusters: bool = True) -> DecodeVariant:
        max_keys = max_context if flags.window is None else min(max_context, flags.window)
        heads = (q.shape[1], k.shape[2])
        return variant_of(
            q.shape[2], k.shape[1], heads, max(1, batch.max_seqlen_q), batch.num_seqs, max_keys, flags,
            in_clusters=in_clusters,
        )  # fmt: skip

    variant, launch = variant_at(batch.max_context), None
    if variant.cluster > 1:
        launch = _by_clusters(q, k, v, batch, flags, out, variant)
    if launch is None:
        launch = _by_shares(q, k, v, batch, flags, out, variant_at(batch.max_context, in_clusters=False))
    return PreparedCall(launch, *steady_range(batch.max_context, table.shape[1] * k.shape[1], variant_at))


def _by_shares(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, variant: DecodeVariant
) -> Launch:
    operands = operands_of(batch, flags, out)
    kernels = launcher(variant, q.device, *operands.compiled_in(q.dtype))
    queries, pages = _maps(kernels.split, variant, q, k, v)
    split, combine, num_programs = kernels.split.launch, kernels.combine.launch, kernels.num_programs
    stream, options, combine_options = kernels.split.stream, *map(launch_options, (kernels.split, kernels.combine))
    size = 2 * num_programs * variant.heads * variant.columns * (variant.block_d + 2)
    numbers, window = (batch.num_seqs, k.shape[2] // variant.heads * variant.parts), bounded_window(flags)
    strides = operands.strides()
    rest = (*strides, operands.table.stride(0), *numbers, *scales(flags), window, *kernels.split.tail)
    combine_rest = (*strides, *numbers, window, *kernels.combine.tail)
    combine_grid = (num_programs, variant.heads, 1)

    def launch(
        beside: Tensor, q_at: int, k_at: int, v_at: int, starts_at: int, table_at: int, lengths_at: int | None,
        sinks_at: int | None, _spans_at: int | None, out_at: int,
    ) -> None:  # fmt: skip
        held = beside.new_empty(size)
        now, result = stream(), (out_at, held.data_ptr(), sinks_at, starts_at, lengths_at)
        split(num_programs, 1, 1, now, *options, *queries[q_at], *pages[k_at, v_at], *result, table_at, *rest)
        combine(*combine_grid, now, *combine_options, *result, *combine_rest)

    return launch


def _by_clusters(
    q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor, variant: DecodeVariant
) -> Launch | None:
    operands = operands_of(batch, flags, out)
    kernel = cluster_launcher(variant, q.device, *operands.compiled_in(q.dtype))
    if kernel is None:
        return None
    queries, pages = _maps(kernel, variant, q, k, v)
    attend, stream, options = kernel.launch, kernel.stream, launch_options(kernel)
    num_programs = k.shape[2] * variant.parts
    rest = (*operands.strides(), operands.table.shape[1], *scales(flags), *kernel.tail)

    def launch(
        _beside: Tensor, q_at: int, k_at: int, v_at: int, starts_at: int, table_at: int, lengths_at: int | None,
        sinks_at: int | None, _spans_at: int | None, out_at: int,
    ) -> None:  # fmt: skip
        attend(
            num_programs, 1, 1, stream(), *options, *queries[q_at], *pages[k_at, v_at], out_at, sinks_at, starts_at,
            lengths_at, table_at, *rest,
        )  # fmt: skip

    return launch


def _maps(kernel: Loaded, variant: DecodeVariant, q: Tensor, k: Tensor, v: Tensor) -> tuple[KeptMaps, Maps]:
    """Maps of queries and of pages. Raises ValueError for pages that TMA cannot address."""
    residue = (k.data_ptr() | v.data_ptr()) % 16
    pages = page_maps(kernel, k.shape, k.stride(), v.stride(), residue)
    return KeptMaps(query_map(kernel, variant.group, q.shape, q.stride())), pages
