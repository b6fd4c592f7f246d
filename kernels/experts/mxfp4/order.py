"""The order of columns in which the Gluon products of mxfp4 weights multiply, and the kernel that brings x in it.

Of 128 columns 32 neighbours are one lane's, which have one scale. Of a word of 8 of these column i + 4 stands behind
column i (i < 4), the four lanes side by side: see `places`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.experts.mxfp4.tilings import STEP
from kernels.experts.routing.dependent import launches_ahead
from kernels.experts.tiles import MOST_COMPARED

_COLUMNS_AT_ONCE, _MORE_COLUMNS = 1024, 4096  # of few slots, whose programs are few too, and of more
_SIZE = STEP  # of a block, in which columns change places


@triton.jit
def hallmark_experts_gather(
    x_ptr, order_ptr, out_ptr, tail_ptr, stride_x, hidden, stride_out, stride_tail,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, HAS_TAIL: tl.constexpr, NUM_ACTIVE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of a sorted slot's x in the order of `places`, 0 behind the last column.

    Where it HAS_TAIL, the first program of a row also sets the last SIZE numbers of that row of `tail` to 0.
    """
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # not before: what is launched reads the sorted slots' table at once
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    token = (tl.load(order_ptr + row) // NUM_ACTIVE).to(tl.int64)
    x = tl.load(x_ptr + token * stride_x + columns, mask=columns < hidden, other=0.0)
    # [block, lane, word, half of a word, column of a half] to [block, word, column, lane, half]
    parts = tl.reshape(x, [COLUMNS // SIZE, 4, SIZE // 32, 2, 4])
    ordered = tl.reshape(tl.permute(parts, [0, 2, 4, 1, 3]), [COLUMNS])
    tl.store(out_ptr + row * stride_out + columns, ordered, mask=columns < stride_out)
    if HAS_TAIL and first == 0:
        at = tail_ptr + row * stride_tail + stride_tail - SIZE + tl.arange(0, SIZE)
        tl.store(at, tl.zeros([SIZE], tail_ptr.dtype.element_ty))


def places() -> list[int]:
    """Return the column, of a block of 128, that stands at each place."""
    four = range(4)
    return [lane * 32 + word * 8 + half * 4 + i for word in four for i in four for lane in four for half in (0, 1)]


def ordered_size(num_columns: int) -> int:
    """Return how many columns a row of so many takes in the order of `places`."""
    return -(-num_columns // _SIZE) * _SIZE


def gather(hidden: Tensor, order: Tensor, inner: Tensor, width: int) -> Tensor:
    """Return each sorted slot's row of hidden [T, H] in the order of `places`, 0 behind the last column. One launch.

    inner [slots, ordered_size(width)]: its last block becomes 0 where width is no whole number of blocks.
    order: of routing/sorting.py.
    """
    num_slots, num_columns = order.numel(), hidden.shape[1]
    ahead = launches_ahead(hidden.device)
    out = hidden.new_empty(num_slots, ordered_size(num_columns))
    columns = _COLUMNS_AT_ONCE if num_slots <= MOST_COMPARED else _MORE_COLUMNS
    hallmark_experts_gather[(num_slots, triton.cdiv(out.shape[1], columns))](
        hidden, order, out, inner, hidden.stride(0), num_columns, out.shape[1], inner.shape[1], SIZE=_SIZE,
        COLUMNS=columns, HAS_TAIL=width % _SIZE > 0, NUM_ACTIVE=num_slots // hidden.shape[0],
        IS_DEPENDENT=ahead, launch_pdl=ahead,
    )  # fmt: skip
    return out
