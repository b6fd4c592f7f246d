"""Parts of the programs that multiply by weights of 8 and of 4 bits: which tile is whose, the gated activation."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl

_NEIGHBOURS = tl.constexpr(8)  # tiles of weights that programs beside each other multiply with the same rows


@triton.jit
def tile_of(program, size_out, num_rows, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """(tile of weights, tile of rows) of a program."""
    num_n, num_m = tl.cdiv(size_out, BLOCK_N), tl.cdiv(num_rows, BLOCK_M)
    group = program // (_NEIGHBOURS * num_m)
    first = group * _NEIGHBOURS
    height = tl.minimum(num_n - first, _NEIGHBOURS)
    place = program % (_NEIGHBOURS * num_m)
    return first + place % height, place // height


@triton.jit
def silu_times(gate, up):
    """Return SiLU(gate) * up, of fp32."""
    decay = tl.exp(-tl.abs(gate))  # never overflows
    return gate * (tl.where(gate >= 0, 1.0, decay) / (1.0 + decay)) * up
