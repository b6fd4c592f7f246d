"""A step that decodes, for sm_90, in Gluon: one launch in which each row has at most one token.

A program computes some value columns of a head of a row, from the convolution on: the sums of the portable kernels, by
chains of products in the same order. It first asks for all that it reads, the state last, by copies to shared memory,
and computes what needs no state while that is on its way: programs that share a multiprocessor have their states in
flight without holding registers for them. Value columns are rows of the matrix units. A right factor's first column is
the token's key, or what makes up what it misses; its second one is its query, or what makes up its result.
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
HEADS = gl.constexpr(8)  # rows of a tile whose first ones are key, query and value
NORM_EPS = gl.constexpr(1e-6)
LEAST_DECAY = gl.constexpr(-1e30)  # its logarithm, as of portable/prepare.py
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
KEPT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # rows of 128 bytes or more, of 16 bits


@constexpr_function
def sums_layout(warps):
    """Layout of [n, 8] fp32, an accumulator of `mma`."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@constexpr_function
def heads_layout(warps):
    """Layout of [HEADS, 128], whose rows are summed up as by portable/prepare.py."""
    return gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])


@constexpr_function
def rows_of_step(columns, num_bytes, warps):
    """Rows of so many columns that are copied by 16 bytes a thread; at least 8, behind which banks repeat."""
    return max(32 * warps // (columns * num_bytes // 16), 8)


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
def copy_out(
    tile, ptr, border, num, NUM: gl.constexpr, STRIDE: gl.constexpr, RING: gl.constexpr, OWN: gl.constexpr,
    BYTES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Write the first `num` of NUM rows from shared memory."""
    STEP: gl.constexpr = rows_of_step(OWN, BYTES, WARPS)
    pointers, is_given = row_pointers(ptr, border, num, NUM, STRIDE, RING, OWN, BYTES, WARPS)
    of = tile._reinterpret(tile.dtype, [NUM // STEP, STEP, OWN], shared_layout(OWN, BYTES, 3))
    gl.store(pointers, of.load(steps_layout(NUM, OWN, BYTES, WARPS)), mask=is_given)


@jit
def column(sums, COLUMN: gl.constexpr, SUMS: gl.constexpr):
    """One column of [n, 8]."""
    columns = gl.arange(0, 8, gl.SliceLayout(0, SUMS))[None, :]
    return gl.sum(gl.where(columns == COLUMN, sums, 0.0), axis=1)


@jit
def right_column(numbers, COLUMN: gl.constexpr, NUM: gl.constexpr, RIGHT: gl.constexpr):
    """[NUM, 8] with a vector as one of its columns, a right factor."""
    columns = gl.arange(0, 8, gl.SliceLayout(0, RIGHT))[None, :]
    return gl.where(columns == COLUMN, numbers[:, None], gl.zeros([NUM, 8], numbers.dtype, RIGHT))


@jit
def channels_of(heads, head, key_head, KEY_HEADS: gl.constexpr):
    """The first channel of key, query and value, by the rows of a tile."""
    value_channel = (2 * KEY_HEADS + head) * SIZE
    return gl.where(
        heads == 0, (KEY_HEADS + key_head) * SIZE, gl.where(heads == 1, key_head * SIZE, value_channel + heads * 0)
    )


@jit
def loaded_factors(conv_ptr, head, key_head, KEY_HEADS: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Factors of the convolution of each tap, the oldest first: each [HEADS, 128]."""
    LOADED: gl.constexpr = heads_layout(WARPS)
    if WIDTH == 4:  # as they lie in memory
        WIDE: gl.constexpr = gl.BlockedLayout([1, 32], [2, 16], [WARPS, 1], [1, 0])
        heads = gl.arange(0, HEADS, gl.SliceLayout(1, WIDE))
        numbers = gl.arange(0, 4 * SIZE, gl.SliceLayout(0, WIDE))
        at = channels_of(heads, head, key_head, KEY_HEADS)[:, None] * 4 + numbers[None, :]
        taps = gl.load(conv_ptr + at, mask=(heads < 3)[:, None] & (numbers >= 0)[None, :], other=0.0)
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
        at = (channels_of(heads, head, key_head, KEY_HEADS)[:, None] + dims[None, :]) * WIDTH
        is_wanted = (heads < 3)[:, None] & (dims >= 0)[None, :]
        factors = (gl.load(conv_ptr + at, mask=is_wanted, other=0.0),)  # type: ignore[assignment]
        for tap in gl.static_range(1, WIDTH):
            factor = gl.load(conv_ptr + at + tap, mask=is_wanted, other=0.0)
            factors = factors + (factor,)  # type: ignore[assignment]  # noqa: RUF005 -- Triton unpacks none
    return factors


@jit
def has_row(token, starts_ptr, stops_ptr, num_rows, WARPS: gl.constexpr):
    """Return whether a row holds a token."""
    count = 0
    for begin in range(0, num_rows, 32):
        rows = begin + gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
        starts = gl.load(starts_ptr + rows, mask=rows < num_rows, other=0)
        stops = gl.load(stops_ptr + rows, mask=rows < num_rows, other=0)
        count += gl.sum(((starts <= token) & (token < stops)).to(gl.int32), axis=0)
    return count > 0


@jit(do_not_specialize=["num_tokens", "num_rows"])
def hallmark_recurrence_token(
    qkv_ptr, a_ptr, b_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, out_ptr, starts_ptr, stops_ptr, firsts_ptr, folded_ptr,
    sources_ptr, targets_ptr, states_ptr, inputs_ptr, keys_ring_ptr, values_ring_ptr, decays_ring_ptr, betas_ring_ptr,
    misses_ring_ptr, num_tokens, num_rows, stride_qkv, stride_a, stride_b, stride_out, stride_states, stride_inputs,
    stride_keys, stride_values, stride_decays, stride_betas, stride_misses, scale, KEY_HEADS: gl.constexpr,
    VALUE_HEADS: gl.constexpr, WIDTH: gl.constexpr, INPUT_RING: gl.constexpr, RING: gl.constexpr,
    MISSES_RING: gl.constexpr, APART: gl.constexpr, OWN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One program: OWN columns of a value head of the row of its index; and of the token of its index, if that has no
    row, zeros.

    APART  what divides the distance of rows of qkv, given in these
    Rows whose state is folded up to an earlier border are left to portable/chunks.py.
    """
    stride_qkv = stride_qkv * APART  # so that the compiler knows what divides it
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
    NUMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SCANNED: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])  # each warp has all 64
    head, part = gl.program_id(0) // PARTS, gl.program_id(0) % PARTS
    row = gl.program_id(1)
    key_head = head // GROUP
    is_row = row < num_rows
    start = gl.load(starts_ptr + row, mask=is_row, other=0)
    stop = gl.load(stops_ptr + row, mask=is_row, other=0)
    first = gl.load(firsts_ptr + row, mask=is_row, other=0)
    folded_to = gl.load(folded_ptr + row, mask=is_row, other=0)
    source = gl.load(sources_ptr + row, mask=is_row, other=0)
    target = gl.load(targets_ptr + row, mask=is_row, other=0)
    factors = loaded_factors(conv_ptr, head, key_head, KEY_HEADS, WIDTH, WARPS)
    dt_bias, a_log = gl.load(dt_bias_ptr + head), gl.load(a_log_ptr + head)
    if (stop > start) & (folded_to == first // CHUNK * CHUNK):
        border = first // CHUNK * CHUNK
        place = first - border
        block = place // BLOCK
        step = place % BLOCK
        own_column = head * SIZE + part * OWN
        is_first = (head % GROUP == 0) & (part == 0)  # of the programs that read a key head

        # All that is read is asked for at once, what is needed last at the end.
        heads, dims = gl.arange(0, HEADS, gl.SliceLayout(1, LOADED)), gl.arange(0, SIZE, gl.SliceLayout(0, LOADED))
        channels = channels_of(heads, head, key_head, KEY_HEADS)[:, None] + dims[None, :]
        is_head = (heads < 3)[:, None] & (dims >= 0)[None, :]
        of_inputs = inputs_ptr + source * stride_inputs
        newest = gl.load(qkv_ptr + start.to(gl.int64) * stride_qkv + channels, mask=is_head, other=0.0)
        inputs = (newest,)
        for behind in gl.static_range(1, WIDTH):
            of_ring = (first + INPUT_RING - behind) % INPUT_RING * CONV_DIM
            earlier = gl.load(of_inputs + of_ring + channels, mask=is_head & (first >= behind), other=0.0)
            inputs = inputs + (earlier,)  # type: ignore[assignment]  # noqa: RUF005 -- Triton unpacks none
        columns = gl.arange(0, OWN, gl.SliceLayout(1, LEFT))
        own = gl.arange(0, BLOCK, OF_LEFT)
        of_miss = own if MISSES_RING == BLOCK else (first - step + own) % MISSES_RING
        misses_at = of_miss[None, :] * (VALUE_HEADS * SIZE) + columns[:, None]
        of_misses = misses_ring_ptr + own_column
        is_known_miss = (own < step)[None, :] & (columns >= 0)[:, None]
        misses = gl.load(of_misses + source * stride_misses + misses_at, mask=is_known_miss, other=0.0)

        tokens = gl.arange(0, CHUNK, NUMBERS)
        of_gates = place_in(border, tokens, RING) * VALUE_HEADS + head
        decays_tile = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT)
        of_decays = decays_ring_ptr + source * stride_decays + of_gates
        async_copy.async_copy_global_to_shared(decays_tile, of_decays, mask=tokens < place)
        betas_tile = gl.allocate_shared_memory(gl.float32, [CHUNK // BLOCK, BLOCK], FLAT)
        of_betas = betas_ring_ptr + source * stride_betas + of_gates
        betas_to = betas_tile._reinterpret(gl.float32, [CHUNK], FLAT)
        async_copy.async_copy_global_to_shared(betas_to, of_betas, mask=tokens < place)
        keys_tiles = gl.allocate_shared_memory(dtype, [CHUNK // BLOCK, BLOCK, SIZE], KEPT)
        keys_tile = keys_tiles._reinterpret(dtype, [CHUNK, SIZE], KEPT)
        of_keys = keys_ring_ptr + key_head * SIZE
        KEY_STRIDE: gl.constexpr = KEY_HEADS * SIZE
        copy_in(keys_tile, of_keys + source * stride_keys, border, place, CHUNK, KEY_STRIDE, RING, SIZE, 2, WARPS)
        async_copy.commit_group()
        ADDED: gl.constexpr = shared_layout(OWN, 2)
        added_tiles = gl.allocate_shared_memory(dtype, [CHUNK // BLOCK, BLOCK, OWN], ADDED)
        added_tile = added_tiles._reinterpret(dtype, [CHUNK, OWN], ADDED)
        of_values = values_ring_ptr + own_column
        VALUE_STRIDE: gl.constexpr = VALUE_HEADS * SIZE
        old_values = of_values + source * stride_values
        copy_in(added_tile, old_values, border, place, CHUNK, VALUE_STRIDE, RING, OWN, 2, WARPS)
        state_tile = gl.allocate_shared_memory(state_dtype, [SIZE, OWN], shared_layout(OWN, STATE_BYTES))
        of_states = states_ptr + head * (SIZE * SIZE) + part * OWN
        num_given = gl.where(first > 0, SIZE, 0)  # before the first token the state is zero, whatever the slot holds
        old_state = of_states + source * stride_states
        copy_in(state_tile, old_state, border, num_given, SIZE, SIZE, 0, OWN, STATE_BYTES, WARPS)
        async_copy.commit_group()
        gl.thread_barrier()  # or the compiler computes gates before it has asked for the state
        a = gl.load(a_ptr + start.to(gl.int64) * stride_a + head).to(gl.float32)
        b = gl.load(b_ptr + start.to(gl.int64) * stride_b + head).to(gl.float32)

        # Gates.
        biased = a + dt_bias
        softplus = log1p(gl.exp(0.0 - gl.abs(biased))) + gl.where(biased < 0, 0.0, biased)
        decay = (0.0 - gl.exp(a_log)) * softplus
        decay = gl.where(decay < LEAST_DECAY, LEAST_DECAY, decay)
        beta = 1.0 / (1.0 + gl.exp(0.0 - b))
        new_place = place_in(border, place, RING)
        new_gates = new_place * VALUE_HEADS + head
        gl.store(decays_ring_ptr + target * stride_decays + new_gates, decay, mask=part == 0)
        gl.store(betas_ring_ptr + target * stride_betas + new_gates, beta, mask=part == 0)

        # Decays of the chunk's tokens: from the border to the token, and from each to the token.
        async_copy.wait_group(1)
        gl.thread_barrier()
        places = gl.arange(0, CHUNK, SCANNED)
        decays = gl.where(places == place, decay, decays_tile.load(SCANNED))
        sums = gl.associative_scan(exact_logs(decays), 0, add)
        own_sum = gl.sum(gl.where(places == place, sums, 0.0), axis=0)
        from_border = gl.exp(own_sum.to(gl.float32))
        between = gl.exp(gl.where(places <= place, own_sum - sums, 0.0).to(gl.float32))
        sums_tile = gl.allocate_shared_memory(gl.float64, [CHUNK // BLOCK, BLOCK], FLAT)
        sums_tile._reinterpret(gl.float64, [CHUNK], FLAT).store(sums)
        between_tile = gl.allocate_shared_memory(gl.float32, [CHUNK], FLAT, between)

        # Convolution and norms.
        mixed = gl.zeros([HEADS, SIZE], gl.float32, LOADED)
        for tap in gl.static_range(WIDTH):
            mixed = gl.fma(inputs[WIDTH - 1 - tap].to(gl.float32), factors[tap].to(gl.float32), mixed)
        mixed = mixed / (1.0 + gl.exp(0.0 - mixed))
        norms = 1.0 / gl.sqrt(gl.sum(mixed * mixed, axis=1) + NORM_EPS)
        new_heads = gl.where((heads < 2)[:, None], mixed * norms[:, None], mixed).to(dtype)
        heads_tile = gl.allocate_shared_memory(dtype, [HEADS, SIZE], FLAT_ROWS, new_heads)
        factors_tile = gl.allocate_shared_memory(dtype, [BLOCK, SIZE], KEPT)
        factors_tile.slice(0, HEADS).store(
            gl.where((heads < 2)[:, None], new_heads, gl.zeros([HEADS, SIZE], dtype, LOADED))
        )
        is_kept = is_head & (is_first | (heads == 2)[:, None]) & (part == 0)
        kept_inputs = inputs_ptr + target * stride_inputs + channels
        gl.store(kept_inputs + first % INPUT_RING * CONV_DIM, newest, mask=is_kept)
        if source != target:
            for behind in gl.static_range(1, WIDTH):
                of_ring = (first + INPUT_RING - behind) % INPUT_RING * CONV_DIM
                gl.store(kept_inputs + of_ring, inputs[behind], mask=is_kept & (first >= behind))
        new_at = new_place * (KEY_HEADS * SIZE) + dims[None, :] + (heads * 0)[:, None]
        gl.store(
            of_keys + target * stride_keys + new_at,
            new_heads,
            mask=(heads == 0)[:, None] & is_first & (dims >= 0)[None, :],
        )

        # Products of the token's key and query with the chunk's keys.
        gl.thread_barrier()
        between = between_tile.load(ROWS)
        right = factors_tile.slice(0, HEADS).permute((1, 0)).load(RIGHT)
        value = heads_tile._reinterpret(dtype, [HEADS * PARTS, OWN], FLAT).index(2 * PARTS + part).load(ROWS)
        products = mma_v2(keys_tile.load(LEFT), right, gl.zeros([CHUNK, 8], gl.float32, SUMS))
        of_new = mma_v2(factors_tile.load(LEFT), right, gl.zeros([BLOCK, 8], gl.float32, SUMS))
        is_missing = (gl.arange(0, 8, COLUMNS) == 0)[None, :]
        rows = gl.arange(0, CHUNK, ROWS)
        products = gl.where(is_missing, (beta * between)[:, None], between[:, None]) * products
        of_others = gl.where(is_missing, 0.0 - products, products)
        of_others = gl.where((rows < place - step)[:, None], of_others, 0.0).to(dtype)
        others_tile = gl.allocate_shared_memory(dtype, [8, CHUNK], KEPT)
        others_tile.permute((1, 0)).store(of_others)
        own_tile = gl.allocate_shared_memory(gl.float32, [8, CHUNK], FLAT_ROWS)
        own_tile.permute((1, 0)).store(products)
        own_factors = own_tile._reinterpret(gl.float32, [8 * CHUNK // BLOCK, BLOCK], FLAT)

        # The token's row of its block's inverse, in the order of `pieces.inverse`.
        steps = gl.arange(0, BLOCK, OF_RIGHT)
        own_rows, others = gl.arange(0, BLOCK, ROWS), gl.arange(0, BLOCK, COLUMNS)
        block_tile = gl.allocate_shared_memory(gl.float32, [BLOCK, BLOCK], FLAT_ROWS)
        if step > 1:
            own_keys = keys_tiles.index(block)
            near = gl.zeros([BLOCK, BLOCK], gl.float32, SUMS)
            near = mma_v2(own_keys.load(LEFT), own_keys.permute((1, 0)).load(RIGHT), near)
            own_betas = gl.where(own_rows < step, betas_tile.index(block).load(ROWS), 0.0)
            own_sums, other_sums = sums_tile.index(block).load(ROWS), sums_tile.index(block).load(COLUMNS)
            is_near = own_rows[:, None] > others[None, :]
            within = gl.exp(gl.where(is_near, own_sums[:, None] - other_sums[None, :], 0.0).to(gl.float32))
            block_tile.store(gl.where(is_near, own_betas[:, None] * within * near, 0.0))
        gl.thread_barrier()
        inverse = 0.0 - gl.where(steps < step, own_factors.index(block).load(OF_RIGHT), 0.0)
        block_rows = block_tile._reinterpret(gl.float32, [BLOCK, BLOCK], FLAT)
        for behind in range(1, step):
            last = step - behind
            factor = 0.0 - gl.gather(inverse, gl.zeros([BLOCK], gl.int32, OF_RIGHT) + last, axis=0)
            inverse = gl.fma(factor, block_rows.index(last).load(OF_RIGHT), inverse)
        inverse = gl.where(steps == step, 1.0, inverse)
        large = inverse.to(dtype)
        small = (inverse - large.to(gl.float32)).to(dtype)
        large_inverse = right_column(large, 0, BLOCK, RIGHT)
        small_inverse = right_column(small, 0, BLOCK, RIGHT)
        is_new_product = (own_rows == 0)[:, None] & (gl.arange(0, 8, COLUMNS) == 1)[None, :]
        new_product = gl.sum(gl.sum(gl.where(is_new_product, of_new, 0.0), axis=1), axis=0)
        of_own = gl.where(steps < step, own_factors.index(CHUNK // BLOCK + block).load(OF_RIGHT), 0.0)
        of_own = gl.where(steps == step, new_product, of_own)
        of_own = right_column(of_own.to(dtype), 1, BLOCK, RIGHT)

        # The state, what the chunk's tokens have added, then the token's own block.
        async_copy.wait_group(0)
        gl.thread_barrier()
        right = factors_tile.slice(0, HEADS).permute((1, 0)).load(RIGHT)
        state = state_tile.permute((1, 0)).load(LEFT).to(gl.float32)
        large_state = rounded(state, dtype)
        small_state = rounded(state - large_state.to(gl.float32), dtype)
        found = mma_v2(large_state, right, gl.zeros([OWN, 8], gl.float32, SUMS))
        found = from_border * mma_v2(small_state, right, found)
        found = gl.where(is_missing, beta * (value.to(gl.float32)[:, None] - found), found)
        none = gl.zeros([OWN, BLOCK], dtype, LEFT)
        for other in gl.static_range(
            CHUNK // BLOCK - 1
        ):  # later blocks than the token's hold nothing, its own is not of these
            added = gl.where(other < block, added_tiles.index(other).permute((1, 0)).load(LEFT), none)
            of_other = others_tile.slice(other * BLOCK, BLOCK, dim=1).permute((1, 0)).load(RIGHT)
            found = mma_v2(added, of_other, found)
        missing = column(found, 0, SUMS)
        own_columns = gl.arange(0, OWN, ROWS)
        new_at = (first % MISSES_RING) * (VALUE_HEADS * SIZE) + own_columns
        gl.store(of_misses + target * stride_misses + new_at, missing)
        is_new = (own == step)[None, :]
        misses = gl.where(is_new, gl.convert_layout(missing, gl.SliceLayout(1, LEFT))[:, None], misses)
        most = misses.to(dtype)
        least = (misses - most.to(gl.float32)).to(dtype)
        new = mma_v2(least, large_inverse, gl.zeros([OWN, 8], gl.float32, SUMS))
        new = column(mma_v2(most, large_inverse, mma_v2(most, small_inverse, new)), 0, SUMS).to(dtype)
        gl.store(of_values + target * stride_values + new_place * (VALUE_HEADS * SIZE) + own_columns, new)
        left_new = gl.convert_layout(new, gl.SliceLayout(1, LEFT))[:, None]
        own_added = gl.where(is_new, left_new, added_tiles.index(block).permute((1, 0)).load(LEFT))
        found = column(mma_v2(own_added, of_own, found), 1, SUMS)
        to = out_ptr + start.to(gl.int64) * stride_out + own_column + own_columns
        gl.store(to, (found * scale).to(out_ptr.dtype.element_ty))

        # What is seldom: the state goes to another slot, or a full chunk is added to it.
        if source != target:
            new_values = of_values + target * stride_values
            copy_out(added_tile, new_values, border, place, CHUNK, VALUE_STRIDE, RING, OWN, 2, WARPS)
            gl.store(of_misses + target * stride_misses + misses_at, misses, mask=is_known_miss)
            if part == 0:
                of_decays = decays_ring_ptr + target * stride_decays + of_gates
                gl.store(of_decays, decays_tile.load(NUMBERS), mask=tokens < place)
                of_betas = betas_ring_ptr + target * stride_betas + of_gates
                gl.store(of_betas, betas_to.load(NUMBERS), mask=tokens < place)
            if is_first:
                new_keys = of_keys + target * stride_keys
                copy_out(keys_tile, new_keys, border, place, CHUNK, KEY_STRIDE, RING, SIZE, 2, WARPS)
        if place == CHUNK - 1:
            all_places, right_places = gl.arange(0, CHUNK, OF_LEFT), gl.arange(0, CHUNK, OF_RIGHT)
            turned = gl.where((all_places == place)[None, :], left_new, added_tile.permute((1, 0)).load(LEFT))
            turned = (turned.to(gl.float32) * between_tile.load(OF_LEFT)[None, :]).to(dtype)
            for quarter in gl.static_range(4):
                chunk_keys = keys_tile.slice(quarter * 32, 32, dim=1).load(RIGHT)
                new_part = (
                    heads_tile._reinterpret(dtype, [HEADS * 4, 32], FLAT).index(quarter).load(gl.SliceLayout(0, RIGHT))
                )
                chunk_keys = gl.where((right_places == place)[:, None], new_part[None, :], chunk_keys)
                folded = state_tile.slice(quarter * 32, 32, dim=0).permute((1, 0)).load(SUMS).to(gl.float32)
                folded = mma_v2(turned, chunk_keys, from_border * folded)
                folded_at = (quarter * 32 + gl.arange(0, 32, COLUMNS))[None, :] * SIZE + own_columns[:, None]
                gl.store(of_states + target * stride_states + folded_at, folded.to(state_dtype))
        elif (source != target) | (first == 0):
            new_state = of_states + target * stride_states
            copy_out(state_tile, new_state, border, SIZE, SIZE, SIZE, 0, OWN, STATE_BYTES, WARPS)
    if (row < num_tokens) & ((row < start) | (row >= stop)):  # noqa: SIM102 -- both are read otherwise
        if not has_row(row, starts_ptr, stops_ptr, num_rows, WARPS):
            own_columns = gl.arange(0, OWN, ROWS)
            free = out_ptr + row.to(gl.int64) * stride_out + head * SIZE + part * OWN + own_columns
            gl.store(free, gl.zeros([OWN], out_ptr.dtype.element_ty, ROWS))
