"""The row of each token of a tile, in Triton: what kernels that take tokens by tiles, not by rows, begin with."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl


@triton.jit
def row_of_each(tokens, starts_ptr, stops_ptr, num_rows, BLOCK_R: tl.constexpr):
    """Return (row, whether there is one) of each token [n]; row 0 where there is none. BLOCK_R: rows read together."""
    found = tl.full(tokens.shape, 0, tl.int32)  # 1 more than the row of each token
    for begin in range(0, num_rows, BLOCK_R):
        rows = begin + tl.arange(0, BLOCK_R)
        begins = tl.load(starts_ptr + rows, mask=rows < num_rows, other=0)
        ends = tl.load(stops_ptr + rows, mask=rows < num_rows, other=0)
        is_own = (tokens[:, None] >= begins[None, :]) & (tokens[:, None] < ends[None, :])
        found += tl.sum(tl.where(is_own, rows[None, :] + 1, 0), axis=1)
    return tl.maximum(found - 1, 0), found > 0
