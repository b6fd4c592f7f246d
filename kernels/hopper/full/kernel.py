"""`gluon.prefill.unmasked.hopper`: attention of packed sequences without a mask, on sm_90, in Gluon for Triton 3.6.0.

The roles, rings and the scheduler are those of `kernels/hopper/prefill/kernel.py`; the consumers are of their own
(consumer.py), and so is the plan: each tile sees all keys of its sequence. Sources: Shah et al. 2024 (FA3).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from kernels.hopper.full.consumer import consume_full
from kernels.hopper.pipeline import produce, rings
from kernels.hopper.schedule import schedule


@triton.jit(do_not_specialize=["num_seqs"])
def hallmark_gluon_full_plan(
    plan_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_seqs,
    PLAN_HEADER: tl.constexpr, PLAN_ITEM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr,
    SEQS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCKS row blocks of one sequence, listed behind those of the sequences before.

    The plan is laid out as `kernels/hopper/schedule.py` says.
    """
    sequence = tl.program_id(0)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    is_first = (sequence == 0) & (tl.program_id(1) == 0)
    first_row = tl.load(cu_seqlens_q_ptr + sequence)
    num_rows = tl.load(cu_seqlens_q_ptr + sequence + 1) - first_row
    first_key = tl.load(cu_seqlens_k_ptr + sequence)
    num_keys = tl.load(cu_seqlens_k_ptr + sequence + 1) - first_key
    if (tl.program_id(1) * BLOCKS * BLOCK_M >= num_rows) & (is_first == 0):
        return
    before = 0
    num_blocks = 0
    for start in range(0, num_seqs, SEQS):
        others = start + tl.arange(0, SEQS)
        inside = others < num_seqs
        starts = tl.load(cu_seqlens_q_ptr + others, mask=inside, other=0)
        ends = tl.load(cu_seqlens_q_ptr + others + 1, mask=inside, other=0)
        counts = (ends - starts + BLOCK_M - 1) // BLOCK_M
        num_blocks += tl.sum(counts)
        before += tl.sum(tl.where(others < sequence, counts, 0))
    if is_first:
        tl.store(plan_ptr, 0)
        tl.store(plan_ptr + 2, num_blocks)
    start_row = blocks * BLOCK_M
    listed = start_row < num_rows
    none = tl.zeros_like(start_row)
    item_ptr = plan_ptr + PLAN_HEADER + (before + blocks) * PLAN_ITEM
    tl.store(item_ptr, first_row + start_row, mask=listed)
    tl.store(item_ptr + 1, tl.minimum(num_rows - start_row, BLOCK_M), mask=listed)
    tl.store(item_ptr + 2, none, mask=listed)
    tl.store(item_ptr + 3, none + num_keys, mask=listed)
    tl.store(item_ptr + 4, none + first_key, mask=listed)
    tl.store(item_ptr + 5, none, mask=listed)
    tl.store(item_ptr + 6, none + tl.maximum(num_keys, 1), mask=listed)  # without a key: one block, all of it masked


@jit(do_not_specialize=["num_heads", "group", "heads_per_group"])
def hallmark_gluon_full(
    q_desc, k_desc, v_desc, out, stride_row, stride_head, plan, num_heads, group, heads_per_group, scale,
    STORE: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """Rings, barriers and roles of one program. group: query heads a KV head; heads_per_group: those of an L2 group."""
    tiles, queries, keys, values = rings(q_desc.dtype, VARIANT)
    gl.warp_specialize([
        (consume_full, ((out, stride_row, stride_head), scale, tiles, queries, keys, values, 0, STORE, VARIANT)),
        (consume_full, ((out, stride_row, stride_head), scale, tiles, queries, keys, values, 1, STORE, VARIANT)),
        (produce, (q_desc, k_desc, v_desc, group, tiles, queries, keys, values, VARIANT)),
        (schedule, (plan, num_heads, heads_per_group, tiles, VARIANT)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip
