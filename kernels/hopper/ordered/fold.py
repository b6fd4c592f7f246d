"""Parts of a row's keys put together: the arithmetic that every phase shares, and where what is folded so far lies.

A part is what an online softmax over its keys leaves of a row: `m`, the log2 of its unit, `l`, the sum of its weights,
and `a`, their sum times values. Parts are folded from the last keys to the first:

    M' = max(M, m)    T' = fma(l, w, T d)    A' = fma(a, w, A d)    with d = 2**(M - M'), w = 2**(m - M')

from M = -1e30, T = 0 and A = 0 on. A part of which a row sees no key has m = -1e30, l = 0 and a = 0: d is 1, and fma
gives back T and A to the bit. So a row's result does not depend on which other parts its tile has.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton import constexpr_function
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from kernels.hopper.blocks import LOG2E
from kernels.hopper.pipeline import ROWS
from kernels.hopper.softmax import reciprocal, scaled_rows
from kernels.hopper.store import wide

UNSEEN = gl.constexpr(-1e30)  # the log2 of the unit of a row that has seen no key: below every score


@jit
def totals_memory(FORM: gl.constexpr, CONSUMERS: gl.constexpr):
    """Shared memory for A of each consumer's rows: a tensor for each part of O."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    memory = (gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, FORM.columns[0]], LAYOUT),)
    if len(FORM.columns) == 2:
        memory = (memory[0], gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, FORM.columns[1]], LAYOUT))  # type: ignore[assignment]
    return memory


@constexpr_function
def _fold_in_memory(count: int) -> str:
    """PTX: fma(a, w, A d) of one thread's `count` accumulators, A being in memory that only this thread uses.

    A thread's accumulators are of two rows, two columns in turn: w and d of 0 and 2 stand for all. Addresses are
    immediates: as tensors they would be kept in registers from step to step.
    """
    first = {name: count * at for at, name in enumerate(("a", "w", "d", "flags", "base"), start=1)}
    flags, base = f"${first['flags']}", f"${first['base']}"
    lines = ["{ .reg .f32 old<4>; .reg .pred has, keep; .reg .b32 bits, lane; .reg .b64 at, by;"]
    lines += [f"and.b32 bits, {flags}, 1;", "setp.ne.s32 has, bits, 0;"]
    lines += [f"and.b32 bits, {flags}, 2;", "setp.ne.s32 keep, bits, 0;"]
    lines += ["mov.u32 lane, %tid.x;", "and.b32 lane, lane, 127;", "mul.wide.u32 by, lane, 16;"]
    lines += [f"add.s64 at, {base}, by;"]
    for i in range(0, count, 4):
        address = f"[at + {i // 4 * 128 * 16}]"
        lines += [f"mov.f32 old{j}, 0f00000000;" for j in range(4)]
        lines += [f"@has ld.global.v4.f32 {{old0, old1, old2, old3}}, {address};"]
        for j in range(4):
            row = j // 2 * 2
            lines += [f"mul.rn.f32 old{j}, old{j}, ${first['d'] + row};"]
            lines += [f"fma.rn.f32 ${i + j}, ${first['a'] + i + j}, ${first['w'] + row}, old{j};"]
        lines += [f"@keep st.global.v4.f32 {address}, {{${i}, ${i + 1}, ${i + 2}, ${i + 3}}};"]
    return " ".join([*lines, "}"])


@constexpr_function
def _fold_constraints(count: int) -> str:
    return ",".join(["=&f"] * count + ["f"] * (3 * count) + ["r"] * count + ["l"] * count)


@jit
def fold_in_memory(acc, weight, decay, has_total, keeps: gl.constexpr, base):
    """A' of columns whose A is in the GPU's memory, from the address `base` on: 16 bytes a thread side by side."""
    COUNT: gl.constexpr = acc.shape[1] // 2
    LAYOUT: gl.constexpr = acc.type.layout
    weight, acc = gl.broadcast(weight[:, None], acc)
    decay, acc = gl.broadcast(decay[:, None], acc)
    flags = gl.full(acc.shape, 0, gl.int32, LAYOUT) + (has_total + (2 if keeps else 0))
    address = gl.full(acc.shape, 0, gl.int64, LAYOUT) + base
    return gl.inline_asm_elementwise(
        _fold_in_memory(COUNT), _fold_constraints(COUNT), [acc, weight, decay, flags, address], dtype=gl.float32,
        is_pure=False, pack=COUNT,
    )  # fmt: skip


@jit
def fold_columns(
    acc, weight, decay, has_total, keeps: gl.constexpr, memory, PART: gl.constexpr, W: gl.constexpr, FORM: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """A' of one part of O's columns; written back if `keeps`."""
    LAYOUT: gl.constexpr = acc.type.layout
    O_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    decay = gl.convert_layout(decay, O_ROW)
    weight = gl.convert_layout(weight, O_ROW)
    if SHARED:
        before = gl.full(acc.shape, 0.0, gl.float32, LAYOUT)
        if has_total:
            before = memory[PART].index(W).load(LAYOUT)
        before = before * decay[:, None]
        weight, acc = gl.broadcast(weight[:, None], acc)
        acc = gl.fma(acc, weight, before)
        if keeps:
            memory[PART].index(W).store(acc)
    else:
        FIRST: gl.constexpr = 0 if PART == 0 else FORM.columns[0]
        place = (gl.program_id(0) * FORM.tiling.consumers + W) * ROWS * FORM.tiling.part_d + FIRST * ROWS
        base = (memory + place).to(gl.int64)
        acc = fold_in_memory(acc, weight, decay, has_total.to(gl.int32), keeps, base)
    return acc


@jit
def fold(
    acc, m, sums, largest, total, has_total, keeps: gl.constexpr, memory, W: gl.constexpr, FORM: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """One more part: (A', M', T'). The layout of rows is that of m."""
    ROW: gl.constexpr = m.type.layout
    found = gl.convert_layout(gl.sum(sums, axis=1), ROW)
    new_largest = gl.maximum(largest, m)
    decay = gl.exp2(largest - new_largest)
    weight = gl.exp2(m - new_largest)
    total = gl.fma(found, weight, total * decay)
    o = (fold_columns(acc[0], weight, decay, has_total, keeps, memory, 0, W, FORM, SHARED),)
    if len(FORM.columns) == 2:
        o = (o[0], fold_columns(acc[1], weight, decay, has_total, keeps, memory, 1, W, FORM, SHARED))  # type: ignore[assignment]
    return o, new_largest, total


@jit
def final_factor(largest, total, sink, FORM: gl.constexpr):
    """The factor of A in O: a sink joins the sum once, here. 0 for a row that sees no key."""
    decay = gl.full(total.shape, 1.0, gl.float32, total.type.layout)
    if FORM.sinks:
        with_sink = gl.maximum(largest, sink)
        decay = gl.exp2(largest - with_sink)
        total = gl.fma(total, decay, gl.exp2(sink - with_sink))
    return gl.where(total > 0.0, reciprocal(total), 0.0) * decay


@jit
def packed_head(head, r, PACK: gl.constexpr, GROUP: gl.constexpr):
    """(query heads, whether there is one) of rows r of a tile of a KV head; of a tile of one head that head."""
    if PACK > 1:
        member = r % PACK
        heads, is_head = head * GROUP + member, member < GROUP
    else:
        heads, is_head = head + r * 0, r >= 0
    return heads, is_head


@jit
def sink_of(sinks, head, ROW: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr):
    """The sinks of rows in log2; 0 without sinks."""
    sink = gl.full([ROWS], 0.0, gl.float32, ROW)
    if FORM.sinks:
        heads, is_head = packed_head(head, gl.arange(0, ROWS, layout=ROW), FORM.pack, GROUP)
        sink = gl.load(sinks + heads, mask=is_head, other=0.0) * LOG2E
    return sink


@jit
def store_whole(
    result, row, rows, head, acc, largest, total, sink, W: gl.constexpr, STORE: gl.constexpr, VARIANT: gl.constexpr
):
    """Store a tile's rows, as store.py does, but for groups of query heads that are no power of two."""
    FORM: gl.constexpr = VARIANT.form
    dtype: gl.constexpr = result[0].dtype.element_ty
    o = scaled_rows(acc, final_factor(largest, total, sink, FORM), FORM)
    main = o[0].to(dtype)
    if not FORM.tiling.stored_as_is:
        main = gl.convert_layout(main, STORE)
    store_columns(result, row, rows, head, main, 0, W, VARIANT)
    if len(FORM.columns) == 2:
        store_columns(result, row, rows, head, o[1].to(dtype), FORM.columns[0], W, VARIANT)


@jit
def store_columns(result, row, rows, head, o, FIRST: gl.constexpr, W: gl.constexpr, VARIANT: gl.constexpr):
    """Columns of a tile's rows from FIRST on."""
    FORM: gl.constexpr = VARIANT.form
    out, stride_row, stride_head = result[0], result[1], result[2]
    LAYOUT: gl.constexpr = o.type.layout
    r = W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    c = FIRST + gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    heads, is_head = packed_head(head, r, FORM.pack, VARIANT.group)
    inside = (is_head & (r // FORM.pack < rows))[:, None]
    if FORM.head_dim != FORM.tiling.block_d:
        inside = inside & (c < FORM.head_dim)[None, :]
    row_ptr = out + wide(heads) * wide(stride_head) + wide(row + r // FORM.pack) * wide(stride_row)
    gl.store(row_ptr[:, None] + c[None, :], o, mask=inside)


@jit
def store_part(result, rows, head, part, acc, m, sums, W: gl.constexpr, FORM: gl.constexpr):
    """Store what a part leaves of the rows that hold queries: a, then (m, l), fp32."""
    parts, stats, num_heads, part_rows = result[3], result[4], result[5], result[6]
    first = (part * num_heads + head) * part_rows
    store_part_columns(parts, first, rows, acc[0], 0, W, FORM)
    if len(FORM.columns) == 2:
        store_part_columns(parts, first, rows, acc[1], FORM.columns[0], W, FORM)
    ROW: gl.constexpr = m.type.layout
    r = W * ROWS + gl.arange(0, ROWS, layout=ROW)
    at = stats + (first + r) * 2
    inside = r < rows * FORM.pack
    gl.store(at, m, mask=inside)
    gl.store(at + 1, gl.convert_layout(gl.sum(sums, axis=1), ROW), mask=inside)


@jit
def publish():
    """Let what the threads of the one consumer have stored be seen by whoever counts on their ticket."""
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; bar.sync 6, 128; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@jit
def acquire():
    """Let this thread see what others published before a ticket that was taken."""
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@jit
def fold_if_last(result, sinks, row, rows, head, part, VARIANT: gl.constexpr):
    """Fold the parts of a row block under a head, if the one just stored is the last to come.

    A ticket a row block and head counts those that are stored; whoever takes the last one folds them all, in their own
    order, and sets the count back for the next launch. So no bit depends on which one that is.
    """
    num_heads, owners, tickets = result[5], result[7], result[8]
    first = gl.load(owners + part * 2)
    count = gl.load(owners + part * 2 + 1)
    ticket_ptr = tickets + first * num_heads + head
    publish()
    ticket = gl.atomic_add(ticket_ptr, 1)
    if ticket == count - 1:
        acquire()
        gl.store(ticket_ptr, 0)
        for start in range(0, rows * VARIANT.form.pack, 4):
            fold_stored_rows(result, sinks, row, rows, head, first, count, start, VARIANT)


@jit
def fold_stored_rows(result, sinks, row, rows, head, first, count, start, VARIANT: gl.constexpr):
    """Four rows of a row block, from `start` on: the arithmetic of `fold`, over parts that lie in the scratch."""
    FORM: gl.constexpr = VARIANT.form
    BLOCK_D: gl.constexpr = FORM.tiling.part_d
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, BLOCK_D // 32], [1, 32], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    out, stride_row, stride_head, parts, stats = result[0], result[1], result[2], result[3], result[4]
    num_heads, part_rows = result[5], result[6]
    r = start + gl.arange(0, 4, layout=ROW)
    c = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, LAYOUT))
    is_row = r < rows * FORM.pack
    is_dim = (c < FORM.head_dim)[None, :]
    largest = gl.full([4], UNSEEN, gl.float32, ROW)
    total = gl.full([4], 0.0, gl.float32, ROW)
    acc = gl.full([4, BLOCK_D], 0.0, gl.float32, LAYOUT)
    for at_part in range(0, count, 8):
        for i in gl.static_range(8):
            is_read = is_row & (at_part + i < count)
            at = wide(((first + at_part + i) * num_heads + head) * part_rows + r)
            m = gl.load(stats + at * 2, mask=is_read, other=UNSEEN, cache_modifier=".cg")
            found = gl.load(stats + at * 2 + 1, mask=is_read, other=0.0, cache_modifier=".cg")
            value_ptr = parts + (at * BLOCK_D)[:, None] + c[None, :]
            value = gl.load(value_ptr, mask=is_read[:, None] & is_dim, other=0.0, cache_modifier=".cg")
            new_largest = gl.maximum(largest, m)
            decay = gl.exp2(largest - new_largest)
            weight, value = gl.broadcast(gl.exp2(m - new_largest)[:, None], value)
            total = gl.fma(found, gl.exp2(m - new_largest), total * decay)
            acc = gl.fma(value, weight, acc * decay[:, None])
            largest = new_largest
    heads, is_head = packed_head(head, r, FORM.pack, VARIANT.group)
    sink = gl.full([4], 0.0, gl.float32, ROW)
    if FORM.sinks:
        sink = gl.load(sinks + heads, mask=is_head & is_row, other=0.0) * LOG2E
    o = acc * final_factor(largest, total, sink, FORM)[:, None]
    row_ptr = out + wide(heads) * wide(stride_head) + wide(row + r // FORM.pack) * wide(stride_row)
    gl.store(row_ptr[:, None] + c[None, :], o.to(out.dtype.element_ty), mask=(is_row & is_head)[:, None] & is_dim)


@jit
def store_part_columns(parts, first, rows, o, FIRST: gl.constexpr, W: gl.constexpr, FORM: gl.constexpr):
    r = W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o.type.layout))
    c = FIRST + gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, o.type.layout))
    at = parts + (wide(first + r) * FORM.tiling.part_d)[:, None] + wide(c)[None, :]
    inside = (r < rows * FORM.pack)[:, None]
    if FORM.head_dim < FIRST + o.shape[1]:
        inside = inside & (c < FORM.head_dim)[None, :]
    gl.store(at, o, mask=inside)
