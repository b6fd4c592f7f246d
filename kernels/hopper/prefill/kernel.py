"""`gluon.prefill.hopper`: attention of packed prompts on sm_90, written in Gluon for Triton 3.6.0.

One persistent program per multiprocessor, in roles:

  scheduler  1 warp        takes tiles from the plan by an atomic counter and posts them in a small shared ring
  producer   1 warp        copies queries, keys and values by TMA into shared rings, ahead of the consumers
  consumers  4 warps each  64 query rows each: both matmuls by wgmma, the softmax in registers

How it is launched: launch.py. Sources: Shah et al. 2024 (FA3); Dao 2023 (FA2).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from kernels.hopper.consumer import consume
from kernels.hopper.pipeline import produce, rings
from kernels.hopper.schedule import schedule


@jit(do_not_specialize=["num_heads", "group", "heads_per_group", "window"])
def hallmark_gluon_prefill(
    q_desc, k_desc, v_desc, out, stride_row, stride_head, plan, sinks, spans, num_heads, group, heads_per_group,
    scale, softcap_scale, window, STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Rings, barriers and roles of one program. group: query heads a KV head; heads_per_group: those of an L2 group."""
    tiles, queries, keys, values = rings(q_desc.dtype, VARIANT)
    if VARIANT.tiling.consumers == 2:
        gl.warp_specialize([
            (consume, ((out, stride_row, stride_head), sinks, spans, scale, softcap_scale, window,
                       tiles, queries, keys, values, 0, STORE, VARIANT)),
            (consume, ((out, stride_row, stride_head), sinks, spans, scale, softcap_scale, window,
                       tiles, queries, keys, values, 1, STORE, VARIANT)),
            (produce, (q_desc, k_desc, v_desc, group, tiles, queries, keys, values, VARIANT)),
            (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:  # all 65,536 registers
        gl.warp_specialize([
            (consume, ((out, stride_row, stride_head), sinks, spans, scale, softcap_scale, window,
                       tiles, queries, keys, values, 0, STORE, VARIANT)),
            (consume, ((out, stride_row, stride_head), sinks, spans, scale, softcap_scale, window,
                       tiles, queries, keys, values, 1, STORE, VARIANT)),
            (consume, ((out, stride_row, stride_head), sinks, spans, scale, softcap_scale, window,
                       tiles, queries, keys, values, 2, STORE, VARIANT)),
            (produce, (q_desc, k_desc, v_desc, group, tiles, queries, keys, values, VARIANT)),
            (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
        ], [4, 4, 1, 1], [160, 160, 32, 32])  # fmt: skip
