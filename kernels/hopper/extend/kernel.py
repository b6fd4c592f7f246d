"""`gluon.extend.hopper`: attention of prompt chunks over paged context on sm_90, written in Gluon for Triton 3.6.0.

The roles and consumers of `gluon.prefill.hopper`, with a producer that follows the page table. Where a group of query
heads is a power of two, its heads are packed into the rows of a tile: a short chunk still fills one. Where tiles are
few, or one is much longer than the others, keys are split into parts (gluon_extend_plan.py).

How it is launched: gluon_extend_launch.py. Sources: Kwon et al. 2023 (pages); Shah et al. 2024 (FA3); Dao et al. 2023
(Flash-Decoding: split keys).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from kernels.hopper.consumer import consume
from kernels.hopper.extend.producer import produce_pages
from kernels.hopper.pipeline import rings
from kernels.hopper.schedule import schedule


@jit
def wait_for_launch_before():
    """Until what the launch before wrote can be read. From here on the next one may start, and wait in its turn."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def consume_rows(given, W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr):
    """The role of consumer W. One name for what all of them are given makes each a line."""
    consume(*given, W, STORE, VARIANT)


@jit(do_not_specialize=["stride_table", "k_rows", "v_rows", "num_heads", "group", "heads_per_group", "window"])
def hallmark_gluon_extend(
    q_desc, k_desc, v_desc, out, stride_row, stride_head, parts, logs, table, stride_table, k_rows, v_rows, plan, sinks,
    spans, num_heads, group, heads_per_group, scale, softcap_scale, window,
    STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Rings and roles of one program.

    parts, logs      scratch of split keys, see `store_part`
    k_rows, v_rows   rows of the tensor map from one page to the next
    num_heads        heads of tiles; group: those that share a KV head; heads_per_group: those of an L2 group
    """
    tiles, queries, keys, values = rings(q_desc.dtype, VARIANT)
    result = (out, stride_row, stride_head, parts, logs, num_heads)
    given = (result, sinks, spans, scale, softcap_scale, window, tiles, queries, keys, values)
    maps = (q_desc, k_desc, v_desc)
    pages = (table, stride_table, k_rows, v_rows)
    wait_for_launch_before()
    if VARIANT.tiling.consumers == 2:
        gl.warp_specialize([
            (consume_rows, (given, 0, STORE, VARIANT)),
            (consume_rows, (given, 1, STORE, VARIANT)),
            (produce_pages, (maps, pages, group, tiles, queries, keys, values, VARIANT)),
            (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
        ], [4, 1, 1], [240, 32, 32])  # fmt: skip
    else:  # all 65,536 registers
        gl.warp_specialize([
            (consume_rows, (given, 0, STORE, VARIANT)),
            (consume_rows, (given, 1, STORE, VARIANT)),
            (consume_rows, (given, 2, STORE, VARIANT)),
            (produce_pages, (maps, pages, group, tiles, queries, keys, values, VARIANT)),
            (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
        ], [4, 4, 1, 1], [160, 160, 32, 32])  # fmt: skip
