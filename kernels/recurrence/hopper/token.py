"""A step that decodes or verifies, for sm_90, in Gluon: one launch in which each row has few tokens.

A program computes some value columns of a head of a row, from the convolution on: the sums of the portable kernels, by
chains of products in the same order. It first asks for all that it reads, the state last, by copies to shared memory,
and computes what needs no state while that is on its way: programs that share a multiprocessor have their states in
flight without holding registers for them. Value columns are rows of the matrix units. A right factor's first columns,
one of each token, are keys, or what makes up what the tokens miss; the next ones are queries, or what makes up results.
A row of two blocks takes a turn for each, with what the first one's tokens add; one whose state is a chunk behind, or
that crosses a border, a turn for each chunk.
Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import constexpr_function, jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

CHUNK = gl.constexpr(64)
BLOCK = gl.constexpr(16)
SIZE = gl.constexpr(128)  # numbers of a key, and of a value
NORM_EPS = gl.constexpr(1e-6)
LEAST_DECAY = gl.constexpr(-1e30)  # its logarithm, as of portable/prepare.py
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
KEPT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # rows of 128 bytes or more, of 16 bits


@constexpr_function
def heads_of(most):
    """Rows of a tile whose first ones are the keys, queries and values of so many tokens."""
    return 8 if most <= 2 else 16 if most <= 5 else 32


@constexpr_function
def columns_of(most):
    """Columns of a right factor: of the keys and of the queries of so many tokens."""
    return 8 if most <= 4 else 16


@constexpr_function
def sums_layout(warps):
    """Layout of [n, 8] fp32, an accumulator of `mma`."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@constexpr_function
def heads_layout(warps):
    """Layout of [n, 128], whose rows are summed up as by portable/prepare.py."""
    return gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])


@constexpr_function
def rows_of_step(columns, num_bytes, warps):
    """Rows of so many columns that are copied by 16 bytes a thread; at least 8, behind which banks repeat."""
    return max(32 * warps // (columns * num_bytes // 16), 8)


@constexpr_function
def rows_layout(columns, warps):
    """Layout of [16, columns]: a thread has 4 numbers of a row."""
    return gl.BlockedLayout([1, 4], [128 // columns, columns // 4], [warps, 1], [1, 0])


@constexpr_function
def steps_layout(num_rows, columns, num_bytes, warps):
    """Layout of [steps, rows, columns]: a thread has 16 bytes of each of its rows in each step."""
    threads, step = columns * num_bytes // 16, rows_of_step(columns, num_bytes, warps)
    of_thread = [num_rows // step, step * threads // (32 * warps), 16 // num_bytes]
    return gl.BlockedLayout(of_thread, [1, 32 // threads, threads], [1, warps, 1], [2, 1, 0])


@constexpr_function
def shared_layout(columns, num_bytes, rank=2):
    """Layout of [..., n, columns] in which threads that read a column's numbers meet in no bank; n: a multiple of 8."""
    of_bank = 16 // num_bytes
    groups = min(columns // of_bank, 8)
    return gl.SwizzledSharedLayout(of_bank, 8 // groups, groups, list(range(rank))[::-1])


@jit
def add(x, y):
    return x + y


@jit
def log1p(x):
    """log(1 + x) of 0 <= x <= 1, as portable/prepare.py computes it."""
    sum_ = 1.0 + x
    rest = sum_ - 1.0
    return gl.where(rest == 0.0, x, gl.log(sum_) * (x / gl.where(rest == 0.0, 1.0, rest)))


@jit
def exact_logs(decays):
    """Return logarithms of decays as multiples of 2^-30, fp64, as portable/pieces.py does."""
    logs = gl.maximum(decays, -256.0).to(gl.float64)
    return gl.floor(logs * 1073741824.0 + 0.5) * 9.313225746154785e-10


@jit
def rounded(numbers, dtype: gl.constexpr):
    """Numbers of fp32 in 16 bits, two by one instruction: behind a difference the compiler finds none."""
    if dtype == gl.bfloat16:
        found = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [numbers], dtype=gl.bfloat16, is_pure=True, pack=2
        )  # fmt: skip
    else:
        found = numbers.to(dtype)
    return found


@jit
def place_in(border, places, NUM: gl.constexpr):
    """Places in a ring of NUM of the tokens behind a border, a multiple of 64."""
    if NUM == CHUNK:
        found = places
    else:
        found = (border + places) % NUM
    return found


@jit
def row_pointers(
    ptr, border, num, NUM: gl.constexpr, STRIDE: gl.constexpr, RING: gl.constexpr, OWN: gl.constexpr,
    BYTES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """(pointers to NUM rows of a ring from a border on, by steps [steps, rows, OWN]; whether each is before row `num`).

    RING  0: rows of a matrix
    """
    STEP: gl.constexpr = rows_of_step(OWN, BYTES, WARPS)
    LAYOUT: gl.constexpr = steps_layout(NUM, OWN, BYTES, WARPS)
    steps = gl.arange(0, NUM // STEP, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    rows = gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    columns = gl.arange(0, OWN, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    if RING == 0 or RING == CHUNK:  # noqa: PLR1714 -- Triton knows no `in`; one address a thread serves all steps
        found = ptr + (rows * STRIDE + columns) + steps * (STEP * STRIDE)
    else:
        found = ptr + place_in(border, steps * STEP + rows, RING) * STRIDE + columns
    return found, (steps * STEP + rows < num) & (columns >= 0)


@jit
def copy_in(
    tile, ptr, border, num, NUM: gl.constexpr, STRIDE: gl.constexpr, RING: gl.constexpr, OWN: gl.constexpr,
    BYTES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Begin to copy the first `num` of NUM rows to shared memory; the others become zero."""
    STEP: gl.constexpr = rows_of_step(OWN, BYTES, WARPS)
    pointers, is_given = row_pointers(ptr, border, num, NUM, STRIDE, RING, OWN, BYTES, WARPS)
    to = tile._reinterpret(tile.dtype, [NUM // STEP, STEP, OWN], shared_layout(OWN, BYTES, 3))
    async_copy.async_copy_global_to_shared(to, pointers, mask=is_given)


@jit
def copy_gates(
    decays_tile, betas_tile, old_gates, border, num, VALUE_HEADS: gl.constexpr, RING: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Begin to copy decays and betas of the first `num` tokens behind a border to shared memory; others become zero."""
    tokens = gl.arange(0, CHUNK, gl.BlockedLayout([1], [32], [WARPS], [0]))
    at = place_in(border, tokens, RING) * VALUE_HEADS
    async_copy.async_copy_global_to_shared(decays_tile, old_gates[0] + at, mask=tokens < num)
    async_copy.async_copy_global_to_shared(betas_tile, old_gates[1] + at, mask=tokens < num)


@jit
def copy_out(tile, ptr, NUM: gl.constexpr, OWN: gl.constexpr, BYTES: gl.constexpr, WARPS: gl.constexpr):
    """Write the NUM rows of a matrix from shared memory."""
    STEP: gl.constexpr = rows_of_step(OWN, BYTES, WARPS)
    pointers, _ = row_pointers(ptr, 0, NUM, NUM, SIZE, 0, OWN, BYTES, WARPS)
    of = tile._reinterpret(tile.dtype, [NUM // STEP, STEP, OWN], shared_layout(OWN, BYTES, 3))
    gl.store(pointers, of.load(steps_layout(NUM, OWN, BYTES, WARPS)))


@jit
def copy_rows(
    to_ptr, of_ptr, border, num, num_given, STRIDE: gl.constexpr, RING: gl.constexpr, OWN: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Copy the first `num` rows of a ring from a border on to another slot; from num_given on they become zero.

    RING  0: rows of a matrix
    """
    LAYOUT: gl.constexpr = rows_layout(OWN, WARPS)
    for begin in range(0, num, BLOCK):
        rows = begin + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
        places = rows if RING == 0 else (border + rows) % RING
        at = (places * STRIDE)[:, None] + gl.arange(0, OWN, gl.SliceLayout(0, LAYOUT))[None, :]
        numbers = gl.load(of_ptr + at, mask=(rows < num_given)[:, None], other=0.0)
        gl.store(to_ptr + at, numbers, mask=(rows < num)[:, None])


@jit
def column(sums, COLUMN: gl.constexpr, NUM: gl.constexpr, SUMS: gl.constexpr):
    """One column of [n, NUM]."""
    columns = gl.arange(0, NUM, gl.SliceLayout(0, SUMS))[None, :]
    return gl.sum(gl.where(columns == COLUMN, sums, 0.0), axis=1)


@jit
def with_columns(tile, sums, places, MOST: gl.constexpr, NUM: gl.constexpr, SUMS: gl.constexpr, LEFT: gl.constexpr):
    """A left factor [n, 16] with the first MOST columns of [n, NUM] in it from `places` on, as far as they fit."""
    own = gl.arange(0, BLOCK, gl.SliceLayout(0, LEFT))[None, :]
    for token in gl.static_range(MOST):
        new = gl.convert_layout(column(sums, token, NUM, SUMS).to(tile.dtype), gl.SliceLayout(1, LEFT))
        tile = gl.where(own == places + token, new[:, None], tile)
    return tile


@jit
def number_of_each(tile, places, MOST: gl.constexpr, NUM: gl.constexpr, COLUMNS: gl.constexpr):
    """[NUM]: of a chunk's numbers [64, 1] those of MOST tokens from `places` on, by the columns of their factors."""
    columns = gl.arange(0, NUM, COLUMNS)
    found = gl.zeros([NUM], tile.dtype, COLUMNS)
    for token in gl.static_range(MOST):
        place = gl.minimum(gl.maximum(places + token, 0), CHUNK - 1)  # of a token of another chunk: any
        found = gl.where(columns % MOST == token, tile.index(place).load(COLUMNS), found)
    return found


@jit
def channels_of(kinds, head, key_head, KEY_HEADS: gl.constexpr):
    """The first channel of keys (kind 0), queries (1) and values, by the rows of a tile."""
    value_channel = (2 * KEY_HEADS + head) * SIZE
    return gl.where(
        kinds == 0, (KEY_HEADS + key_head) * SIZE, gl.where(kinds == 1, key_head * SIZE, value_channel + kinds * 0)
    )


@jit
def loaded_factors(
    conv_ptr, head, key_head, KEY_HEADS: gl.constexpr, WIDTH: gl.constexpr, MOST: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Factors of the convolution of each tap, the oldest first: each [HEADS, 128]."""
    LOADED: gl.constexpr = heads_layout(WARPS)
    HEADS: gl.constexpr = heads_of(MOST)
    if WIDTH == 4:  # as they lie in memory
        WIDE: gl.constexpr = gl.BlockedLayout([1, 32], [2, 16], [WARPS, 1], [1, 0])
        heads = gl.arange(0, HEADS, gl.SliceLayout(1, WIDE))
        numbers = gl.arange(0, 4 * SIZE, gl.SliceLayout(0, WIDE))
        at = channels_of(heads // MOST, head, key_head, KEY_HEADS)[:, None] * 4 + numbers[None, :]
        taps = gl.load(conv_ptr + at, mask=(heads < 3 * MOST)[:, None] & (numbers >= 0)[None, :], other=0.0)
        even, odd = gl.split(taps.reshape([HEADS, SIZE, 2, 2]))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        factors = (
            gl.convert_layout(first, LOADED),
            gl.convert_layout(second, LOADED),
            gl.convert_layout(third, LOADED),
            gl.convert_layout(fourth, LOADED),
        )
    else:
        heads, dims = gl.arange(0, HEADS, gl.SliceLayout(1, LOADED)), gl.arange(0, SIZE, gl.SliceLayout(0, LOADED))
        at = (channels_of(heads // MOST, head, key_head, KEY_HEADS)[:, None] + dims[None, :]) * WIDTH
        is_wanted = (heads < 3 * MOST)[:, None] & (dims >= 0)[None, :]
        factors = (gl.load(conv_ptr + at, mask=is_wanted, other=0.0),)  # type: ignore[assignment]
        for tap in gl.static_range(1, WIDTH):
            factor = gl.load(conv_ptr + at + tap, mask=is_wanted, other=0.0)
            factors = factors + (factor,)  # type: ignore[assignment]  # noqa: RUF005 -- Triton unpacks none
    return factors


@jit
def new_gates(
    a_ptr, b_ptr, head, dt_bias, a_log, positions, start, stop, first, stride_a, stride_b
):  # fmt: skip
    """(logarithms of the decays, betas) of the row's tokens at these positions; others mean nothing."""
    tokens = start + positions - first
    is_new = (tokens >= start) & (tokens < stop)
    a = gl.load(a_ptr + tokens.to(gl.int64) * stride_a + head, mask=is_new, other=0.0).to(gl.float32)
    b = gl.load(b_ptr + tokens.to(gl.int64) * stride_b + head, mask=is_new, other=0.0).to(gl.float32)
    biased = a + dt_bias
    softplus = log1p(gl.exp(0.0 - gl.abs(biased))) + gl.where(biased < 0, 0.0, biased)
    decays = (0.0 - gl.exp(a_log)) * softplus
    return gl.where(decays < LEAST_DECAY, LEAST_DECAY, decays), 1.0 / (1.0 + gl.exp(0.0 - b))


@jit
def is_free(token, starts_ptr, stops_ptr, num_rows, WARPS: gl.constexpr):
    """Return whether no row holds a token."""
    count = 0
    for begin in range(0, num_rows, 32):
        rows = begin + gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
        starts = gl.load(starts_ptr + rows, mask=rows < num_rows, other=0)
        stops = gl.load(stops_ptr + rows, mask=rows < num_rows, other=0)
        count += gl.sum(((starts <= token) & (token < stops)).to(gl.int32), axis=0)
    return count == 0


@jit(do_not_specialize=["num_tokens", "num_rows"])
def hallmark_recurrence_token(
    qkv_ptr, a_ptr, b_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, out_ptr, starts_ptr, stops_ptr, firsts_ptr, folded_ptr,
    sources_ptr, targets_ptr, states_ptr, inputs_ptr, keys_ring_ptr, values_ring_ptr, decays_ring_ptr, betas_ring_ptr,
    misses_ring_ptr, num_tokens, num_rows, stride_qkv, stride_a, stride_b, stride_out, stride_states, stride_inputs,
    stride_keys, stride_values, stride_decays, stride_betas, stride_misses, scale, KEY_HEADS: gl.constexpr,
    VALUE_HEADS: gl.constexpr, WIDTH: gl.constexpr, INPUT_RING: gl.constexpr, RING: gl.constexpr,
    MISSES_RING: gl.constexpr, FOLDS_ALL: gl.constexpr, MOST: gl.constexpr, APART: gl.constexpr, OWN: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """One program: OWN columns of a value head of a row; or, behind those of all heads, zeros of a token without a row.

    FOLDS_ALL  whether the state is folded up to the row's last border; else up to the border before its first token
    MOST       tokens of a row
    APART      what divides the distance of rows of qkv, given in these
    """
    PARTS: gl.constexpr = SIZE // OWN
    row = gl.program_id(1)
    if gl.program_id(0) < VALUE_HEADS * PARTS:
        compute_row(
            qkv_ptr, a_ptr, b_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, out_ptr, starts_ptr, stops_ptr, firsts_ptr,
            folded_ptr, sources_ptr, targets_ptr, states_ptr, inputs_ptr, keys_ring_ptr, values_ring_ptr,
            decays_ring_ptr, betas_ring_ptr, misses_ring_ptr, row, stride_qkv, stride_a, stride_b, stride_out,
            stride_states, stride_inputs, stride_keys, stride_values, stride_decays, stride_betas, stride_misses,
            scale, KEY_HEADS, VALUE_HEADS, WIDTH, INPUT_RING, RING, MISSES_RING, FOLDS_ALL, MOST, APART, OWN, WARPS,
        )  # fmt: skip
    else:
        token = (gl.program_id(0) - VALUE_HEADS * PARTS) * num_rows + row
        if (token < num_tokens) & is_free(token, starts_ptr, stops_ptr, num_rows, WARPS):
            numbers = gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [WARPS], [0]))
            zeros = gl.zeros([SIZE], out_ptr.dtype.element_ty, gl.BlockedLayout([1], [32], [WARPS], [0]))
            for head in range(VALUE_HEADS):
                gl.store(out_ptr + token.to(gl.int64) * stride_out + head * SIZE + numbers, zeros)


@jit
def compute_row(
    qkv_ptr, a_ptr, b_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, out_ptr, starts_ptr, stops_ptr, firsts_ptr, folded_ptr,
    sources_ptr, targets_ptr, states_ptr, inputs_ptr, keys_ring_ptr, values_ring_ptr, decays_ring_ptr, betas_ring_ptr,
    misses_ring_ptr, row, stride_qkv, stride_a, stride_b, stride_out, stride_states, stride_inputs, stride_keys,
    stride_values, stride_decays, stride_betas, stride_misses, scale, KEY_HEADS: gl.constexpr,
    VALUE_HEADS: gl.constexpr, WIDTH: gl.constexpr, INPUT_RING: gl.constexpr, RING: gl.constexpr,
    MISSES_RING: gl.constexpr, FOLDS_ALL: gl.constexpr, MOST: gl.constexpr, APART: gl.constexpr, OWN: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Compute the program's columns of a row."""
    stride_qkv = stride_qkv * APART  # so that the compiler knows what divides it
    HEADS: gl.constexpr = heads_of(MOST)
    NUM: gl.constexpr = columns_of(MOST)
    IS_ONE: gl.constexpr = MOST == 1 and MISSES_RING == BLOCK  # no row is of two blocks, no state a chunk behind
    GROUP: gl.constexpr = VALUE_HEADS // KEY_HEADS
    PARTS: gl.constexpr = SIZE // OWN
    CONV_DIM: gl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    state_dtype: gl.constexpr = states_ptr.dtype.element_ty
    STATE_BYTES: gl.constexpr = state_dtype.primitive_bitwidth // 8
    SUMS: gl.constexpr = sums_layout(WARPS)  # of an accumulator
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SUMS)
    OF_RIGHT: gl.constexpr = gl.SliceLayout(1, RIGHT)
    OF_LEFT: gl.constexpr = gl.SliceLayout(0, LEFT)
    LOADED: gl.constexpr = heads_layout(WARPS)
    SCANNED: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])  # each warp has all 64
    head, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    key_head = head // GROUP
    start, stop, first = gl.load(starts_ptr + row), gl.load(stops_ptr + row), gl.load(firsts_ptr + row)
    folded_to, source, target = gl.load(folded_ptr + row), gl.load(sources_ptr + row), gl.load(targets_ptr + row)
    factors = loaded_factors(conv_ptr, head, key_head, KEY_HEADS, WIDTH, MOST, WARPS)
    dt_bias, a_log = gl.load(dt_bias_ptr + head), gl.load(a_log_ptr + head)
    if stop > start:
        last = first + stop - start
        own_border = first // CHUNK * CHUNK
        begun = own_border if IS_ONE else folded_to
        fold_to = last // CHUNK * CHUNK if FOLDS_ALL else own_border
        own_column = head * SIZE + part * OWN
        is_first = (head % GROUP == 0) & (part == 0)  # of the programs that read a key head

        # All that is read is asked for at once, what is needed last at the end.
        heads, dims = gl.arange(0, HEADS, gl.SliceLayout(1, LOADED)), gl.arange(0, SIZE, gl.SliceLayout(0, LOADED))
        kinds, turns = heads // MOST, heads % MOST  # turns: the row's first token is 0
        channels = channels_of(kinds, head, key_head, KEY_HEADS)[:, None] + dims[None, :]
        is_head = (kinds < 3) & (start + turns < stop)
        of_inputs = inputs_ptr + source * stride_inputs
        of_new = qkv_ptr + start.to(gl.int64) * stride_qkv
        inputs = (gl.load(of_new + (turns * stride_qkv)[:, None] + channels, mask=is_head[:, None], other=0.0),)
        for behind in gl.static_range(1, WIDTH):
            of_ring = (first + turns + (INPUT_RING - behind)) % INPUT_RING * CONV_DIM
            is_before = is_head & (turns < behind) & (first + turns >= behind)
            earlier = gl.load(of_inputs + of_ring[:, None] + channels, mask=is_before[:, None], other=0.0)
            if behind < MOST:
                is_newer = is_head & (turns >= behind)
                at = ((turns - behind) * stride_qkv)[:, None] + channels
                newer = gl.load(of_new + at, mask=is_newer[:, None], other=0.0)
                earlier = gl.where(is_newer[:, None], newer, earlier)
            inputs = inputs + (earlier,)  # type: ignore[assignment]  # noqa: RUF005 -- Triton unpacks none
        columns = gl.arange(0, OWN, gl.SliceLayout(1, LEFT))
        own = gl.arange(0, BLOCK, OF_LEFT)
        of_miss = own if MISSES_RING == BLOCK else (first // BLOCK * BLOCK + own) % MISSES_RING
        known_misses_at = of_miss[None, :] * (VALUE_HEADS * SIZE) + columns[:, None]
        of_misses = misses_ring_ptr + own_column
        is_known_miss = (own < first % BLOCK)[None, :] & (columns >= 0)[:, None]
        misses = gl.load(of_misses + source * stride_misses + known_misses_at, mask=is_known_miss, other=0.0)

        KEY_STRIDE: gl.constexpr = KEY_HEADS * SIZE
        VALUE_STRIDE: gl.constexpr = VALUE_HEADS * SIZE
        ADDED: gl.constexpr = shared_layout(OWN, 2)
        decays_tile = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
        betas_tiles = gl.allocate_shared_memory(gl.float32, [CHUNK // BLOCK, BLOCK], FLAT)
        betas_tile = betas_tiles._reinterpret(gl.float32, [CHUNK], FLAT)
        keys_tiles = gl.allocate_shared_memory(dtype, [CHUNK // BLOCK, BLOCK, SIZE], KEPT)
        keys_tile = keys_tiles._reinterpret(dtype, [CHUNK, SIZE], KEPT)
        added_tiles = gl.allocate_shared_memory(dtype, [CHUNK // BLOCK, BLOCK, OWN], ADDED)
        added_tile = added_tiles._reinterpret(dtype, [CHUNK, OWN], ADDED)
        of_decays, of_betas = decays_ring_ptr + head, betas_ring_ptr + head
        of_keys, of_values = keys_ring_ptr + key_head * SIZE, values_ring_ptr + own_column
        old_gates = of_decays + source * stride_decays, of_betas + source * stride_betas
        old_keys, old_values = of_keys + source * stride_keys, of_values + source * stride_values
        num_known = gl.minimum(first - begun, CHUNK)
        copy_gates(decays_tile, betas_tile, old_gates, begun, num_known, VALUE_HEADS, RING, WARPS)
        copy_in(keys_tile, old_keys, begun, num_known, CHUNK, KEY_STRIDE, RING, SIZE, 2, WARPS)
        async_copy.commit_group()
        copy_in(added_tile, old_values, begun, num_known, CHUNK, VALUE_STRIDE, RING, OWN, 2, WARPS)
        state_tile = gl.allocate_shared_memory(state_dtype, [SIZE, OWN], shared_layout(OWN, STATE_BYTES))
        of_states = states_ptr + head * (SIZE * SIZE) + part * OWN
        num_given = gl.where(first > 0, SIZE, 0)  # before the first token the state is zero, whatever the slot holds
        old_state = of_states + source * stride_states
        copy_in(state_tile, old_state, begun, num_given, SIZE, SIZE, 0, OWN, STATE_BYTES, WARPS)
        async_copy.commit_group()
        gl.thread_barrier()  # or the compiler computes gates before it has asked for the state
        places = gl.arange(0, CHUNK, SCANNED)
        given_gates = a_ptr, b_ptr, head, dt_bias, a_log
        new_decays, new_betas = new_gates(*given_gates, begun + places, start, stop, first, stride_a, stride_b)

        # Convolution and norms.
        mixed = gl.zeros([HEADS, SIZE], gl.float32, LOADED)
        for tap in gl.static_range(WIDTH):
            mixed = gl.fma(inputs[WIDTH - 1 - tap].to(gl.float32), factors[tap].to(gl.float32), mixed)
        mixed = mixed / (1.0 + gl.exp(0.0 - mixed))
        norms = 1.0 / gl.sqrt(gl.sum(mixed * mixed, axis=1) + NORM_EPS)
        new_heads = gl.where((kinds < 2)[:, None], mixed * norms[:, None], mixed).to(dtype)
        heads_tile = gl.allocate_shared_memory(dtype, [HEADS, SIZE], FLAT_ROWS, new_heads)
        heads_rows = heads_tile._reinterpret(dtype, [HEADS, SIZE], FLAT)
        factors_tile = gl.allocate_shared_memory(dtype, [HEADS, SIZE], KEPT, new_heads)
        is_input = (is_head & (is_first | (kinds == 2)) & (part == 0))[:, None]
        kept_inputs = inputs_ptr + target * stride_inputs + channels
        gl.store(kept_inputs + ((first + turns) % INPUT_RING * CONV_DIM)[:, None], inputs[0], mask=is_input)
        if source != target:
            for behind in gl.static_range(1, WIDTH):
                earlier_at = (first + INPUT_RING - behind) % INPUT_RING * CONV_DIM
                is_earlier = is_input & (turns == 0)[:, None] & (first >= behind)
                gl.store(kept_inputs + earlier_at, inputs[behind], mask=is_earlier)
        keys_at = of_keys + target * stride_keys + ((first + turns) % RING * KEY_STRIDE)[:, None] + dims[None, :]
        gl.store(keys_at, new_heads, mask=(is_head & (kinds == 0) & is_first)[:, None])

        sums_tiles = gl.allocate_shared_memory(gl.float64, [CHUNK // BLOCK, BLOCK], FLAT)
        sums_tile = sums_tiles._reinterpret(gl.float64, [CHUNK], FLAT)
        others_tile = gl.allocate_shared_memory(dtype, [NUM, CHUNK], KEPT)
        own_tiles = gl.allocate_shared_memory(gl.float32, [CHUNK // BLOCK, BLOCK, NUM], FLAT_ROWS)
        block_tile = gl.allocate_shared_memory(gl.float32, [BLOCK, BLOCK], FLAT_ROWS)
        of_columns = gl.arange(0, NUM, COLUMNS)
        positions = first + of_columns % MOST
        is_missing = (of_columns < MOST)[None, :]
        rows, own_columns = gl.arange(0, CHUNK, ROWS), gl.arange(0, OWN, ROWS)
        own_rows, others = gl.arange(0, BLOCK, ROWS), gl.arange(0, BLOCK, COLUMNS)
        steps = gl.arange(0, BLOCK, OF_RIGHT)[:, None]
        right_turns = (gl.arange(0, NUM, gl.SliceLayout(0, RIGHT)) % MOST)[None, :]
        found_misses = gl.zeros([OWN, NUM], gl.float32, SUMS)
        found_added, results = found_misses, found_misses
        num_chunks = 1 if IS_ONE else (last - begun + CHUNK - 1) // CHUNK
        for chunk in range(num_chunks):
            border = begun + chunk * CHUNK
            num_known = gl.minimum(gl.maximum(first - border, 0), CHUNK)
            if not IS_ONE:  # noqa: SIM102 -- Triton fails on copies that it finds are never made
                if chunk > 0:
                    gl.thread_barrier()
                    copy_gates(decays_tile, betas_tile, old_gates, border, num_known, VALUE_HEADS, RING, WARPS)
                    copy_in(keys_tile, old_keys, border, num_known, CHUNK, KEY_STRIDE, RING, SIZE, 2, WARPS)
                    async_copy.commit_group()
                    copy_in(added_tile, old_values, border, num_known, CHUNK, VALUE_STRIDE, RING, OWN, 2, WARPS)
                    async_copy.commit_group()
                    new_decays, new_betas = new_gates(
                        *given_gates, border + places, start, stop, first, stride_a, stride_b
                    )

            # Decays of the chunk's tokens from the border to each.
            async_copy.wait_group(1)
            gl.thread_barrier()
            is_new = (border + places >= first) & (border + places < last)
            new_at = place_in(border, places, RING) * VALUE_HEADS
            is_written = is_new & (part == 0)
            gl.store(of_decays + target * stride_decays + new_at, new_decays, mask=is_written)
            gl.store(of_betas + target * stride_betas + new_at, new_betas, mask=is_written)
            sums = gl.where(is_new, new_decays, decays_tile.load(SCANNED))
            sums_tile.store(gl.associative_scan(exact_logs(sums), 0, add))
            betas_tile.store(gl.where(is_new, new_betas, betas_tile.load(SCANNED)))

            first_block = num_known // BLOCK
            num_blocks = 1 if IS_ONE else (gl.minimum(last - border, CHUNK) + BLOCK - 1) // BLOCK - first_block
            for block in range(first_block, first_block + num_blocks):
                begin = border + block * BLOCK
                num = gl.minimum(last - begin, BLOCK)  # of the block's tokens those that are known or new

                # Products of the new tokens' keys and queries with the chunk's keys.
                own_keys = keys_tiles.index(block)
                keys = own_keys.load(LOADED)
                of_block = begin - first + gl.arange(0, BLOCK, gl.SliceLayout(1, LOADED))
                for token in gl.static_range(MOST):
                    new_key = heads_rows.index(token).load(gl.SliceLayout(0, LOADED))
                    keys = gl.where((of_block == token)[:, None], new_key[None, :], keys)
                own_keys.store(keys)
                gl.thread_barrier()
                right = factors_tile.slice(0, NUM).permute((1, 0)).load(RIGHT)
                products = mma_v2(keys_tile.load(LEFT), right, gl.zeros([CHUNK, NUM], gl.float32, SUMS))
                all_sums = sums_tiles._reinterpret(gl.float64, [CHUNK, 1], FLAT)
                all_betas = betas_tiles._reinterpret(gl.float32, [CHUNK, 1], FLAT)
                new_sums = number_of_each(all_sums, first - border, MOST, NUM, COLUMNS)
                betas = number_of_each(all_betas, first - border, MOST, NUM, COLUMNS)[None, :]
                from_border = gl.exp(new_sums.to(gl.float32))[None, :]
                is_there = border + rows[:, None] <= positions[None, :]
                between = gl.where(is_there, new_sums[None, :] - sums_tile.load(ROWS)[:, None], 0.0)
                between = gl.exp(between.to(gl.float32))
                products = gl.where(is_missing, betas * between, between) * products
                of_others = gl.where(is_missing, 0.0 - products, products)
                of_others = gl.where((rows < block * BLOCK)[:, None], of_others, 0.0).to(dtype)
                others_tile.permute((1, 0)).store(of_others)
                own_tiles._reinterpret(gl.float32, [CHUNK, NUM], FLAT_ROWS).store(products)

                # The tokens' rows of their block's inverse, in the order of `pieces.inverse`.
                if num > 2:
                    near = gl.zeros([BLOCK, BLOCK], gl.float32, SUMS)
                    near = mma_v2(own_keys.load(LEFT), own_keys.permute((1, 0)).load(RIGHT), near)
                    block_sums, block_betas = sums_tiles.index(block), betas_tiles.index(block)
                    is_near = own_rows[:, None] > others[None, :]
                    within = block_sums.load(ROWS)[:, None] - block_sums.load(COLUMNS)[None, :]
                    within = gl.exp(gl.where(is_near, within, 0.0).to(gl.float32))
                    block_tile.store(gl.where(is_near, block_betas.load(ROWS)[:, None] * within * near, 0.0))
                gl.thread_barrier()
                own_products = own_tiles.index(block).load(RIGHT)
                own_steps = first - begin + right_turns
                inverse = 0.0 - gl.where(steps < own_steps, own_products, 0.0)
                block_rows = block_tile._reinterpret(gl.float32, [BLOCK, BLOCK], FLAT)
                for turn in range(2, num):
                    factor = 0.0 - gl.sum(gl.where(steps == num - turn, inverse, 0.0), axis=0)
                    near_row = block_rows.index(num - turn).load(OF_RIGHT)
                    inverse = gl.fma(factor[None, :] + steps * 0, near_row[:, None] + right_turns * 0, inverse)
                inverse = gl.where(steps == own_steps, 1.0, inverse)
                large_inverse = inverse.to(dtype)
                small_inverse = (inverse - large_inverse.to(gl.float32)).to(dtype)
                of_own = gl.where(steps <= own_steps, own_products, 0.0).to(dtype)

                # The state, what the chunk's tokens have added, then the tokens' own block.
                async_copy.wait_group(0)
                gl.thread_barrier()
                right = factors_tile.slice(0, NUM).permute((1, 0)).load(RIGHT)
                state = state_tile.permute((1, 0)).load(LEFT).to(gl.float32)
                large_state = rounded(state, dtype)
                small_state = rounded(state - large_state.to(gl.float32), dtype)
                found = mma_v2(large_state, right, gl.zeros([OWN, NUM], gl.float32, SUMS))
                found = from_border * mma_v2(small_state, right, found)
                values = gl.zeros([OWN, NUM], gl.float32, SUMS)
                of_part = heads_tile._reinterpret(dtype, [HEADS * PARTS, OWN], FLAT)
                for token in gl.static_range(MOST):
                    value = of_part.index((2 * MOST + token) * PARTS + part).load(ROWS).to(gl.float32)
                    values = gl.where((of_columns == token)[None, :], value[:, None], values)
                found = gl.where(is_missing, betas * (values - found), found)
                none = gl.zeros([OWN, BLOCK], dtype, LEFT)
                # Later blocks than the tokens' hold nothing, their own is not of these.
                for other in gl.static_range(CHUNK // BLOCK - 1):
                    added = gl.where(other < block, added_tiles.index(other).permute((1, 0)).load(LEFT), none)
                    of_other = others_tile.slice(other * BLOCK, BLOCK, dim=1).permute((1, 0)).load(RIGHT)
                    found = mma_v2(added, of_other, found)
                is_own = ((positions >= begin) & (positions < begin + num))[None, :]
                found_misses = gl.where(is_own, found, found_misses)
                own_misses = gl.where((own < first - begin)[None, :], misses, 0.0)
                own_misses = with_columns(own_misses, found, first - begin, MOST, NUM, SUMS, LEFT)
                most = own_misses.to(dtype)
                least = (own_misses - most.to(gl.float32)).to(dtype)
                new = mma_v2(least, large_inverse, gl.zeros([OWN, NUM], gl.float32, SUMS))
                new = mma_v2(most, large_inverse, mma_v2(most, small_inverse, new))
                found_added = gl.where(is_own, new, found_added)
                own_added = added_tiles.index(block).permute((1, 0)).load(LEFT)
                own_added = with_columns(own_added, new, first - begin, MOST, NUM, SUMS, LEFT)
                found = mma_v2(own_added, of_own, found)
                results = gl.where(is_own, found, results)
                if begin + BLOCK <= last:  # the next block's tokens read it, or the chunk is full
                    added_tiles.index(block).permute((1, 0)).store(own_added)

            # A full chunk is added to the state.
            if (last > border + CHUNK) | (fold_to == border + CHUNK):
                async_copy.wait_group(0)
                gl.thread_barrier()
                total = sums_tiles._reinterpret(gl.float64, [CHUNK, 1], FLAT).index(CHUNK - 1).load(OF_LEFT)
                left = gl.exp((total - sums_tile.load(OF_LEFT)).to(gl.float32))
                turned = (added_tile.permute((1, 0)).load(LEFT).to(gl.float32) * left[None, :]).to(dtype)
                whole = gl.exp(gl.sum(total, axis=0).to(gl.float32))
                for quarter in gl.static_range(4):
                    chunk_keys = keys_tile.slice(quarter * 32, 32, dim=1).load(RIGHT)
                    of_quarter = state_tile.slice(quarter * 32, 32, dim=0).permute((1, 0))
                    folded = mma_v2(turned, chunk_keys, whole * of_quarter.load(SUMS).to(gl.float32))
                    of_quarter.store(folded.to(state_dtype))

        is_new_token = start + positions - first < stop
        is_kept = is_missing & is_new_token[None, :]
        misses_at = (positions % MISSES_RING * VALUE_STRIDE)[None, :] + own_columns[:, None]
        gl.store(of_misses + target * stride_misses + misses_at, found_misses, mask=is_kept)
        added_at = (positions % RING * VALUE_STRIDE)[None, :] + own_columns[:, None]
        gl.store(of_values + target * stride_values + added_at, found_added.to(dtype), mask=is_kept)
        is_result = (of_columns >= MOST) & (of_columns < 2 * MOST) & is_new_token
        to = (start + positions - first).to(gl.int64) * stride_out + own_column
        results = (results * scale).to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + to[None, :] + own_columns[:, None], results, mask=is_result[None, :])

        # What is seldom: a state has changed, is zero, or goes to another slot with what is behind its border.
        new_state = of_states + target * stride_states
        if fold_to > begun:
            gl.thread_barrier()
            copy_out(state_tile, new_state, SIZE, OWN, STATE_BYTES, WARPS)
        elif (source != target) | (first == 0):
            copy_rows(new_state, old_state, 0, SIZE, num_given, SIZE, 0, OWN, WARPS)
        if source != target:
            num_known = first - own_border
            new_values = of_values + target * stride_values
            copy_rows(new_values, old_values, own_border, num_known, num_known, VALUE_STRIDE, RING, OWN, WARPS)
            gl.store(of_misses + target * stride_misses + known_misses_at, misses, mask=is_known_miss)
            gates_at = place_in(own_border, places, RING) * VALUE_HEADS
            is_known = (places < num_known) & (part == 0)
            known_decays = gl.load(old_gates[0] + gates_at, mask=is_known, other=0.0)
            known_betas = gl.load(old_gates[1] + gates_at, mask=is_known, other=0.0)
            gl.store(of_decays + target * stride_decays + gates_at, known_decays, mask=is_known)
            gl.store(of_betas + target * stride_betas + gates_at, known_betas, mask=is_known)
            if is_first:
                new_keys = of_keys + target * stride_keys
                copy_rows(new_keys, old_keys, own_border, num_known, num_known, KEY_STRIDE, RING, SIZE, WARPS)
