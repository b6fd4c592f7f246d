"""The kernel of `gluon.decode.fp8.hopper`: as `hallmark_gluon_decode`, over keys and values of 8 bits with scales.

Every program streams an equal number of key tiles, with their scales, through a ring in shared memory, and finishes the
rows that belong to it alone; `hallmark_gluon_decode_combine` puts together the rows that lie in several.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.fp8_cache.hopper.stream import attend_tile, fetch, finished, load_queries, make_ring, start_state
from kernels.hopper.decode.kernel import launch_dependents, prefetch_table, store_result, wait_for_launch_before
from kernels.hopper.decode.stream import heads_of_row, next_row, start_cursor, tiles_of_program


@jit(do_not_specialize=["stride_table", "num_seqs", "num_rows", "window"])
def hallmark_gluon_decode_fp8(
    q_desc, k_desc, v_desc, k_scales_desc, v_scales_desc, out, scratch, sinks, cu_seqlens_q, context_lens, page_table,
    stride_out_query, stride_out_head, stride_table, num_seqs, num_rows, scale, softcap_scale, window,
    VARIANT: gl.constexpr,
):  # fmt: skip
    """Compute the tiles of one program, row after row. num_rows: rows of a sequence."""
    HEADS: gl.constexpr = VARIANT.heads
    STAGES: gl.constexpr = VARIANT.stages
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [HEADS, 1, VARIANT.column_warps], [1, 16, 8])
    prefetch_table(page_table, num_seqs * stride_table)
    lengths = (cu_seqlens_q, context_lens, num_seqs, num_rows)
    maps = (q_desc, k_desc, v_desc, k_scales_desc, v_scales_desc)
    table = (page_table, stride_table)
    ring = make_ring(q_desc.dtype, VARIANT)
    program = gl.program_id(0)
    tile, end, _per_program, sequence, before = tiles_of_program(lengths, program, gl.num_programs(0), window, VARIANT)
    first_tile = tile
    cursor = start_cursor(lengths, sequence, tile - before, window, VARIANT)
    wait_for_launch_before()
    ahead = cursor
    for stage in range(STAGES):
        ahead = fetch(ahead, tile + stage, first_tile, end, stage, maps, table, ring, lengths, window, VARIANT)
    launch_dependents()  # not before: the next launch's own shares would hold up these copies
    while tile < end:
        _sequence, query, rows, keys, tiles, first, row, block = cursor
        count = gl.minimum(tiles - block, end - tile)
        fill = tile - first_tile
        mbarrier.wait(ring[3].index(fill % STAGES), (fill // STAGES) & 1)
        x, powers = load_queries(ring, fill % STAGES, HEADS, MMA, VARIANT)
        state = start_state(HEADS, MMA, VARIANT)
        for i in range(count):
            fill = tile - first_tile + i
            stage = fill % STAGES
            phase = (fill // STAGES) & 1
            mbarrier.wait(ring[3].index(stage), phase)
            key = (first + block + i) * VARIANT.block_n
            state = attend_tile(
                x, powers, state, key, keys, rows, stage, phase, ring, (scale, softcap_scale), window, VARIANT
            )
            ahead = fetch(ahead, tile + i + STAGES, first_tile, end, stage, maps, table, ring, lengths, window, VARIANT)
        first_head, first_member = heads_of_row(row, VARIANT)
        target = (out, stride_out_query, stride_out_head, query, rows, first_head, first_member)
        slot = 2 * program + (block == 0).to(gl.int32)
        store_result(finished(state, VARIANT), target, sinks, scratch, slot, count == tiles, VARIANT)
        cursor = next_row(cursor, lengths, window, VARIANT)
        tile += count
