"""The arithmetic of one consumer between its two matmuls: masks, softcap and the online softmax, in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton import constexpr_function
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

LOG2E = 1.4426950408889634
# 2**x for -1/2 <= x <= 1/2 by powers of x, within 7.5e-5 of itself. Rounding to bf16 costs up to 50 times that.
EXP2 = (0.99992807, 0.69326099, 0.24261113, 0.05517167)


@jit
def tanh(x):
    """One MUFU instruction: relative error 2**-11, a quarter of what rounding a score to bf16 costs."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@constexpr_function
def _weights() -> str:
    """PTX: 2**x of 8 scores less their maxima, 6 by MUFU, 2 by a polynomial of what rounding to an integer leaves."""
    c0, c1, c2, c3 = EXP2
    polynomial = [
        "max.f32 x, $X, 0fC2FC0000;",  # -126: below are no normal numbers
        "add.f32 shifted, x, 0f4B400000;",  # 1.5 * 2**23: the integer is now in the last bits
        "sub.f32 whole, shifted, 0f4B400000;",
        "sub.f32 x, x, whole;",
        f"fma.rn.f32 p, x, {c3}, {c2};",
        f"fma.rn.f32 p, p, x, {c1};",
        f"fma.rn.f32 p, p, x, {c0};",
        "mov.b32 power, shifted;",
        "mov.b32 bits, p;",
        "shl.b32 power, power, 23;",
        "add.s32 bits, bits, power;",
        "mov.b32 $P, bits;",
    ]
    lines = ["{ .reg .f32 x, shifted, whole, p; .reg .b32 power, bits;"]
    for i in range(8):
        by = polynomial if i % 4 == 0 else ["ex2.approx.ftz.f32 $P, $X;"]
        lines += [line.replace("$X", f"${8 + i}").replace("$P", f"${i}") for line in by]
    return " ".join([*lines, "}"])


@constexpr_function
def _rescale(count: int) -> str:
    """PTX: `count` accumulators of one thread times their factors, unless no thread of the warp has one but 1.

    A thread's accumulators are of two rows, two columns in turn: factors 0 and 2 stand for all.
    """
    factors = [f"${2 * count + i}" for i in range(count)]
    any_other = [
        f"setp.neu.f32 one, {factors[0]}, 0f3F800000;",
        f"setp.neu.or.f32 one, {factors[2]}, 0f3F800000, one;",
        "vote.sync.any.pred some, one, 0xffffffff;",
    ]
    products = [f"mul.f32 ${i}, ${i}, {factors[i]};" for i in range(count)]
    return " ".join(["{ .reg .pred one, some;", *any_other, "@!some bra DONE;", *products, "DONE: }"])


@constexpr_function
def _constraints(count: int) -> str:
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@constexpr_function
def _hide(count: int) -> str:
    """PTX: of one thread's `count` scores, those become -inf whose column is not beyond the bound of their row.

    A thread's columns are 2 (lane % 4) + {0, 1, 8, 9, 16 ...}, each of two rows in turn: bounds 0 and 2 stand for all.
    As immediates the columns take no registers.
    """
    lines = ["mov.u32 lane, %laneid;", "and.b32 lane, lane, 3;", "shl.b32 lane, lane, 1;"]
    lines += [f"sub.s32 bound{row}, ${count + 2 * row}, lane;" for row in (0, 1)]
    for i in range(count):
        lines.append(f"setp.lt.s32 seen, bound{i // 2 % 2}, {i // 4 * 8 + i % 2};")
        lines.append(f"selp.f32 ${i}, ${2 * count + i}, 0fFF800000, seen;")
    return " ".join(["{ .reg .pred seen; .reg .b32 lane, bound0, bound1;", *lines, "}"])


@constexpr_function
def _hide_constraints(count: int) -> str:
    return ",".join(["=&f"] * count + ["r"] * count + ["f"] * count)


@jit
def hide_columns(s, bound):
    """Scores of columns 0 to `bound` of each row become -inf."""
    COUNT: gl.constexpr = s.shape[1] // 2
    bound, _ = gl.broadcast(bound[:, None], s)
    return gl.inline_asm_elementwise(
        _hide(COUNT), _hide_constraints(COUNT), [bound, s], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@jit
def rescale(acc, shrink, VARIANT: gl.constexpr):
    """O, each of its parts, times the factor of each row; lazily, in warps only where some factor is not 1."""
    if len(VARIANT.columns) == 1:
        o = (rescale_part(acc[0], shrink, VARIANT),)
    else:
        o = (rescale_part(acc[0], shrink, VARIANT), rescale_part(acc[1], shrink, VARIANT))  # type: ignore[assignment]
    return o


@jit
def rescale_part(acc, shrink, VARIANT: gl.constexpr):
    COUNT: gl.constexpr = acc.shape[1] // 2
    O_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    factor = gl.convert_layout(shrink, O_ROW)[:, None]
    if VARIANT.tiling.lazy_rescale:
        factor, _ = gl.broadcast(factor, acc)
        acc = gl.inline_asm_elementwise(
            _rescale(COUNT), _constraints(COUNT), [acc, factor], dtype=gl.float32, is_pure=True, pack=COUNT
        )
    else:
        acc = acc * factor
    return acc


@jit
def scaled_rows(acc, factor, VARIANT: gl.constexpr):
    """O, each of its parts, times the factor of each row."""
    main = acc[0] * gl.convert_layout(factor, gl.SliceLayout(1, acc[0].type.layout))[:, None]
    o = (main,)
    if len(VARIANT.columns) == 2:
        o = (main, acc[1] * gl.convert_layout(factor, gl.SliceLayout(1, acc[1].type.layout))[:, None])  # type: ignore[assignment]
    return o


@jit
def larger_max(m, found, VARIANT: gl.constexpr):
    """The new maxima; lazily the old ones, until they are 2**8 too small."""
    if VARIANT.tiling.lazy_rescale:
        m_new = gl.where(found > m + 8.0, found, m)
    else:
        m_new = gl.maximum(m, found)
    return m_new


@jit
def row_max(s, ROW: gl.constexpr):
    """Max by short chains: a thread holds 2 rows x block_n / 4 columns, and one chain a row is latency-bound."""
    s = gl.max(s.reshape([s.shape[0], s.shape[1] // 32, 4, 8]), axis=1)
    s = gl.max(s, axis=1)
    return gl.convert_layout(gl.max(s, axis=1), ROW)


@jit
def lane_sum(p):
    """Row sums kept apart by lane ([64, 8]): the shuffles wait until the tile ends."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), axis=1)


@jit
def weights(x, VARIANT: gl.constexpr):
    """2**x of a block without a mask."""
    if VARIANT.has_polynomials:
        constraints: gl.constexpr = "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f"
        p = gl.inline_asm_elementwise(_weights(), constraints, [x], dtype=gl.float32, is_pure=True, pack=8)
    else:
        p = gl.exp2(x)
    return p


@jit
def add_weights(sums, shrink, p):
    """Lane sums after one more block; shrink: the factor of what was summed before."""
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    return sums * gl.convert_layout(shrink, SUM_ROW)[:, None] + lane_sum(p)


@jit
def row_totals(sums, m, sink, part, VARIANT: gl.constexpr):
    """Return the sum of each row's weights; of split keys without the sink, which combining them adds once."""
    total = gl.sum(sums, axis=1)
    if VARIANT.sinks:
        share = gl.convert_layout(gl.exp2(sink - m), gl.SliceLayout(1, sums.type.layout))
        if VARIANT.parts:
            share = gl.where(part < 0, share, 0.0)
        total = total + share
    return total


@jit
def reciprocal(x):
    """One MUFU instruction, within one unit in the last place; true division takes ten, and spills."""
    return gl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def row_spans(visible):
    """[lo, hi) of each of a consumer's rows; empty past the tile. Read where needed: kept, they would spill."""
    spans, row, rows, num_keys, index = visible
    at = spans + (row + index).to(gl.int64) * 2
    lo = gl.load(at, mask=index < rows, other=0)
    hi = gl.minimum(gl.load(at + 1, mask=index < rows, other=0), num_keys)
    return lo, hi


@jit
def mask(s, position, visible, window, first_col, DIAGONAL: gl.constexpr, VARIANT: gl.constexpr):
    """Scores of keys [first_col, first_col + block_n) that a row at `position` does not see become -inf.

    visible   what `row_spans` takes
    DIAGONAL  a key may be after a row; if not, only the window and the spans are asked
    """
    if VARIANT.skips_low and not DIAGONAL:  # with bounds in registers three consumers would spill
        s = hide_columns(s, position - window - first_col)
    else:
        col = first_col + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        if VARIANT.window:
            seen = col[None, :] > (position - window)[:, None]
            if DIAGONAL:
                seen = seen & (position[:, None] >= col[None, :])
        else:
            seen = position[:, None] >= col[None, :]
        if VARIANT.spans:
            lo, hi = row_spans(visible)
            seen = seen | ((lo[:, None] <= col[None, :]) & (col[None, :] < hi[:, None]))
        s = gl.where(seen, s, float("-inf"))
    return s


@jit
def needs_mask(block, first_position, window, VARIANT: gl.constexpr):
    """Return whether any of 64 rows, the first at `first_position`, does not see some key of a block."""
    BLOCK_N: gl.constexpr = VARIANT.tiling.block_n
    found = block < 0
    if VARIANT.offset or VARIANT.spans:
        found = found | (block >= gl.maximum(first_position + 1, 0) // BLOCK_N)
    if VARIANT.window:
        found = found | (block * BLOCK_N <= first_position + 63 // VARIANT.pack - window)
    return found


@jit
def first_scores(
    s, scale, softcap_scale, position, visible, window, first_col, ROW: gl.constexpr, VARIANT: gl.constexpr
):
    """Scores of a tile's first block less the maxima of their rows (both in log2), and these maxima."""
    if VARIANT.softcap:
        s = tanh(s * softcap_scale)
    s = mask(s, position, visible, window, first_col, True, VARIANT)
    m = row_max(s, ROW) * scale
    if VARIANT.may_see_nothing:
        m = gl.maximum(m, -1e30)
    return s * scale - m[:, None], m


@jit
def next_scores(
    s, m, scale, softcap_scale, position, FIRST_ROW: gl.constexpr, index, visible, window, block,
    MASKED: gl.constexpr, VARIANT: gl.constexpr,
):  # fmt: skip
    """The same for one more block of a tile whose row `index` stands at `position + index`.

    MASKED  0 never, 1 where the block asks for it, 2 always
    """
    if VARIANT.softcap and not VARIANT.has_polynomials:
        s = tanh(s * softcap_scale)
    if MASKED == 2:
        s = mask(s, position + index, visible, window, block * VARIANT.tiling.block_n, True, VARIANT)
    if VARIANT.is_masked_inside and MASKED == 1:  # noqa: SIM102 -- the outer one is decided by the compiler
        if needs_mask(block, position + FIRST_ROW, window, VARIANT):
            first_col = block * VARIANT.tiling.block_n
            s = mask(s, position + index, visible, window, first_col, VARIANT.may_see_nothing, VARIANT)
    ROW: gl.constexpr = m.type.layout
    found = row_max(s, ROW)
    if VARIANT.has_polynomials:  # tanh is monotonic: maxima do not wait for it
        found = tanh(found * softcap_scale)
        s = tanh(s * softcap_scale)
    m_new = larger_max(m, found * scale, VARIANT)
    return s * scale - m_new[:, None], m_new
