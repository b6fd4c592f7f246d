"""A step that decodes, for sm_90, in Gluon: one launch in which each row has at most one token.

A program computes a value head of a row, from the convolution on: the sums of the portable kernels, by chains of
products in the same order. It has the state in registers, as the left factor of `mma` wants it, so that no number of it
crosses shared memory; value columns are rows of the matrix units. A right factor's first column is the token's key, or
what makes up what it misses; its second one is its query, or what makes up its result. While the state is on its way,
all that needs none is computed.
Written in Gluon for Triton 3.6.0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

CHUNK = gl.constexpr(64)
BLOCK = gl.constexpr(16)
SIZE = gl.constexpr(128)  # numbers of a key, and of a value
NORM_EPS = gl.constexpr(1e-6)
LEAST_DECAY = gl.constexpr(-1e30)  # its logarithm, as of portable/prepare.py
SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))  # [n, 8] fp32
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUMS, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, SUMS, 2))
ROWS = gl.constexpr(gl.SliceLayout(1, SUMS))
COLUMNS = gl.constexpr(gl.SliceLayout(0, SUMS))
OF_RIGHT = gl.constexpr(gl.SliceLayout(1, RIGHT))
LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # a head as portable/prepare.py sums it up
HEAD = gl.constexpr(gl.SliceLayout(0, LOADED))
SCANNED = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # each warp has all 64
KEPT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


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
def pair(first, second, NUM: gl.constexpr):
    """[NUM, 8] with two vectors as its first columns, a right factor."""
    columns = gl.arange(0, 8, gl.SliceLayout(0, RIGHT))[None, :]
    none = gl.zeros([NUM, 8], first.dtype, RIGHT)
    return gl.where(columns == 0, first[:, None], gl.where(columns == 1, second[:, None], none))


@jit
def column(sums, COLUMN: gl.constexpr):
    """One column of [n, 8]."""
    columns = gl.arange(0, 8, COLUMNS)[None, :]
    return gl.sum(gl.where(columns == COLUMN, sums, 0.0), axis=1)


@jit
def loaded_input(
    qkv_ptr, inputs_ptr, channels, first, TAP: gl.constexpr, CONV_DIM: gl.constexpr, WIDTH: gl.constexpr,
    INPUT_RING: gl.constexpr,
):  # fmt: skip
    """Read a tap's inputs of some channels: of the token, or of one before it; zero before the first."""
    if TAP == WIDTH - 1:
        x = gl.load(qkv_ptr + channels)
    else:
        of_ring = (first + INPUT_RING - (WIDTH - 1 - TAP)) % INPUT_RING * CONV_DIM + channels
        x = gl.load(inputs_ptr + of_ring, mask=(channels >= 0) & (first >= WIDTH - 1 - TAP), other=0.0)
    return x


@jit
def loaded_head(
    qkv_ptr, conv_ptr, inputs_ptr, channel, first, CONV_DIM: gl.constexpr, WIDTH: gl.constexpr, INPUT_RING: gl.constexpr
):  # fmt: skip
    """(inputs of a head of the token and of those before it, the oldest first, their factors), each [128]."""
    channels = channel + gl.arange(0, SIZE, HEAD)
    inputs = (loaded_input(qkv_ptr, inputs_ptr, channels, first, 0, CONV_DIM, WIDTH, INPUT_RING),)
    factors = (gl.load(conv_ptr + channels * WIDTH),)
    for tap in gl.static_range(1, WIDTH):
        x = loaded_input(qkv_ptr, inputs_ptr, channels, first, tap, CONV_DIM, WIDTH, INPUT_RING)
        inputs = inputs + (x,)  # type: ignore[assignment]  # noqa: RUF005 -- Triton unpacks none
        factors = factors + (gl.load(conv_ptr + channels * WIDTH + tap),)  # type: ignore[assignment]  # noqa: RUF005
    return inputs, factors


@jit
def mixed_head(loaded, WIDTH: gl.constexpr):
    """A head behind convolution and SiLU, [128] fp32."""
    inputs, factors = loaded
    mixed = gl.zeros([SIZE], gl.float32, HEAD)
    for tap in gl.static_range(WIDTH):
        mixed = gl.fma(inputs[tap].to(gl.float32), factors[tap].to(gl.float32), mixed)
    return mixed / (1.0 + gl.exp(0.0 - mixed))


@jit
def keep_inputs(
    loaded, inputs_ptr, channel, first, is_wanted, is_moved, CONV_DIM: gl.constexpr, WIDTH: gl.constexpr,
    INPUT_RING: gl.constexpr,
):  # fmt: skip
    """Write a head's inputs to the ring of the target: the token's, and of a state that moves those before it."""
    channels = channel + gl.arange(0, SIZE, HEAD)
    inputs, _ = loaded
    for tap in gl.static_range(WIDTH):
        of_ring = (first + INPUT_RING - (WIDTH - 1 - tap)) % INPUT_RING * CONV_DIM + channels
        is_kept = (channels >= 0) & is_wanted & (first >= WIDTH - 1 - tap)
        if tap < WIDTH - 1:
            is_kept = is_kept & is_moved
        gl.store(inputs_ptr + of_ring, inputs[tap], mask=is_kept)


@jit
def normed(mixed, dtype: gl.constexpr):
    return (mixed * (1.0 / gl.sqrt(gl.sum(mixed * mixed, axis=0) + NORM_EPS))).to(dtype)


@jit
def has_row(token, starts_ptr, stops_ptr, num_rows):
    """Return whether a row holds a token."""
    count = 0
    for begin in range(0, num_rows, 32):
        rows = begin + gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))
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
    MISSES_RING: gl.constexpr,
):  # fmt: skip
    """One program: a value head of the row of its index; and of the token of its index, if that has no row, zeros.

    Rows whose state is folded up to an earlier border are left to portable/chunks.py.
    """
    GROUP: gl.constexpr = VALUE_HEADS // KEY_HEADS
    CONV_DIM: gl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    head, row = gl.program_id(0), gl.program_id(1)
    key_head = head // GROUP
    is_row = row < num_rows
    start = gl.load(starts_ptr + row, mask=is_row, other=0)
    stop = gl.load(stops_ptr + row, mask=is_row, other=0)
    first = gl.load(firsts_ptr + row, mask=is_row, other=0)
    folded_to = gl.load(folded_ptr + row, mask=is_row, other=0)
    if (stop > start) & (folded_to == first // CHUNK * CHUNK):
        source, target = gl.load(sources_ptr + row), gl.load(targets_ptr + row)
        border = first // CHUNK * CHUNK
        place = first - border
        step = place % BLOCK
        rows = gl.arange(0, SIZE, ROWS)
        columns, dims = gl.arange(0, SIZE, gl.SliceLayout(1, LEFT)), gl.arange(0, SIZE, gl.SliceLayout(0, LEFT))
        of_head = states_ptr + head * (SIZE * SIZE)
        of_state = of_head + source * stride_states + dims[None, :] * SIZE + columns[:, None]
        # All that the token's part of the work reads is asked for at once, then the state.
        kept = gl.allocate_shared_memory(dtype, [CHUNK, SIZE], KEPT)  # what earlier blocks of the chunk have added
        of_values = values_ring_ptr + source * stride_values + head * SIZE
        places = gl.arange(0, CHUNK, gl.SliceLayout(1, LOADED))
        kept_at = ((border + places) % RING)[:, None] * (VALUE_HEADS * SIZE)
        kept_at += gl.arange(0, SIZE, HEAD)[None, :]
        is_before = (places < place - step)[:, None] & (kept_at >= 0)
        async_copy.async_copy_global_to_shared(kept, of_values + kept_at, mask=is_before)
        async_copy.commit_group()
        is_first = head % GROUP == 0
        of_token = qkv_ptr + start.to(gl.int64) * stride_qkv
        of_inputs = inputs_ptr + source * stride_inputs
        query_channel, key_channel = key_head * SIZE, (KEY_HEADS + key_head) * SIZE
        value_channel = (2 * KEY_HEADS + head) * SIZE
        of_query = loaded_head(of_token, conv_ptr, of_inputs, query_channel, first, CONV_DIM, WIDTH, INPUT_RING)
        of_key = loaded_head(of_token, conv_ptr, of_inputs, key_channel, first, CONV_DIM, WIDTH, INPUT_RING)
        of_value = loaded_head(of_token, conv_ptr, of_inputs, value_channel, first, CONV_DIM, WIDTH, INPUT_RING)
        a = gl.load(a_ptr + start.to(gl.int64) * stride_a + head).to(gl.float32)
        b = gl.load(b_ptr + start.to(gl.int64) * stride_b + head).to(gl.float32)
        dt_bias, a_log = gl.load(dt_bias_ptr + head), gl.load(a_log_ptr + head)
        tokens = gl.arange(0, CHUNK, SCANNED)
        of_gates = ((border + tokens) % RING) * VALUE_HEADS + head
        decays = gl.load(decays_ring_ptr + source * stride_decays + of_gates, mask=tokens < place, other=0.0)
        own_rows = gl.arange(0, BLOCK, ROWS)
        of_gates = ((first - step + own_rows) % RING) * VALUE_HEADS + head
        own_betas = gl.load(betas_ring_ptr + source * stride_betas + of_gates, mask=own_rows < step, other=0.0)
        of_keys = keys_ring_ptr + key_head * SIZE
        own_places = gl.arange(0, BLOCK, gl.SliceLayout(1, LEFT))
        own_at = ((first - step + own_places) % RING)[:, None] * (KEY_HEADS * SIZE) + dims[None, :]
        is_own_key = (own_places < step)[:, None] & (dims >= 0)[None, :]
        own_keys = gl.load(of_keys + source * stride_keys + own_at, mask=is_own_key, other=0.0)
        numbers = gl.arange(0, SIZE, OF_RIGHT)
        turned_places = gl.arange(0, BLOCK, gl.SliceLayout(0, RIGHT))
        turned_keys_at = ((first - step + turned_places) % RING)[None, :] * (KEY_HEADS * SIZE) + numbers[:, None]
        is_turned_key = (turned_places < step)[None, :] & (numbers >= 0)[:, None]
        turned_keys = gl.load(of_keys + source * stride_keys + turned_keys_at, mask=is_turned_key, other=0.0)

        # Convolution, norms and gates.
        query, key = normed(mixed_head(of_query, WIDTH), dtype), normed(mixed_head(of_key, WIDTH), dtype)
        value = mixed_head(of_value, WIDTH).to(dtype)
        own_products = mma_v2(own_keys, turned_keys, gl.zeros([BLOCK, BLOCK], gl.float32, SUMS))
        key_places = gl.arange(0, CHUNK, gl.SliceLayout(1, LEFT))
        keys_at = ((border + key_places) % RING)[:, None] * (KEY_HEADS * SIZE) + dims[None, :]
        is_old_key = (key_places < place)[:, None] & (dims >= 0)[None, :]
        keys = gl.load(of_keys + source * stride_keys + keys_at, mask=is_old_key, other=0.0)
        own = gl.arange(0, BLOCK, gl.SliceLayout(0, LEFT))
        is_known = (own < step)[None, :] & (columns >= 0)[:, None]
        of_misses = misses_ring_ptr + head * SIZE
        misses_at = ((first - step + own) % MISSES_RING)[None, :] * (VALUE_HEADS * SIZE) + columns[:, None]
        misses = gl.load(of_misses + source * stride_misses + misses_at, mask=is_known, other=0.0)
        added_at = ((first - step + own) % RING)[None, :] * (VALUE_HEADS * SIZE) + columns[:, None]
        own_added = gl.load(of_values + added_at, mask=is_known, other=0.0)
        kept_inputs = inputs_ptr + target * stride_inputs
        is_moved = source != target
        keep_inputs(of_query, kept_inputs, query_channel, first, is_first, is_moved, CONV_DIM, WIDTH, INPUT_RING)
        keep_inputs(of_key, kept_inputs, key_channel, first, is_first, is_moved, CONV_DIM, WIDTH, INPUT_RING)
        keep_inputs(of_value, kept_inputs, value_channel, first, head >= 0, is_moved, CONV_DIM, WIDTH, INPUT_RING)
        new_at = (first % RING) * (KEY_HEADS * SIZE) + gl.arange(0, SIZE, HEAD)
        gl.store(of_keys + target * stride_keys + new_at, key, mask=(new_at >= 0) & is_first)
        biased = a + dt_bias
        softplus = log1p(gl.exp(0.0 - gl.abs(biased))) + gl.where(biased < 0, 0.0, biased)
        decay = (0.0 - gl.exp(a_log)) * softplus
        decay = gl.where(decay < LEAST_DECAY, LEAST_DECAY, decay)
        beta = 1.0 / (1.0 + gl.exp(0.0 - b))
        new_gates = (first % RING) * VALUE_HEADS + head
        gl.store(decays_ring_ptr + target * stride_decays + new_gates, decay)
        gl.store(betas_ring_ptr + target * stride_betas + new_gates, beta)

        # Decays of the chunk's tokens: from the border to the token, and from each to the token.
        sums = gl.associative_scan(exact_logs(gl.where(tokens == place, decay, decays)), 0, add)
        own_sum = gl.sum(gl.where(tokens == place, sums, 0.0), axis=0)
        from_border = gl.exp(own_sum.to(gl.float32))
        between = gl.exp(gl.where(tokens <= place, own_sum - sums, 0.0).to(gl.float32))
        between = gl.convert_layout(between, ROWS)

        # Products of the token's key and query with the chunk's keys.
        new_key = gl.convert_layout(key, gl.SliceLayout(0, LEFT))
        factors = pair(gl.convert_layout(key, OF_RIGHT), gl.convert_layout(query, OF_RIGHT), SIZE)
        keys = gl.where((key_places == place)[:, None], new_key[None, :], keys)
        products = mma_v2(keys, factors, gl.zeros([CHUNK, 8], gl.float32, SUMS))
        places = gl.arange(0, CHUNK, ROWS)
        near = beta * between * column(products, 0)
        of_result = gl.where(places <= place, between * column(products, 1), 0.0)
        of_missing = gl.where(places < place - step, 0.0 - near, 0.0).to(dtype)
        of_earlier = gl.where(places < place - step, of_result, 0.0).to(dtype)
        of_others = pair(gl.convert_layout(of_missing, OF_RIGHT), gl.convert_layout(of_earlier, OF_RIGHT), CHUNK)
        steps = gl.arange(0, BLOCK, COLUMNS)
        is_own = places[:, None] == (place - step + steps)[None, :]
        of_own = gl.sum(gl.where(is_own, of_result[:, None], 0.0), axis=0).to(dtype)
        row_near = gl.sum(gl.where(is_own & (places < place)[:, None], near[:, None], 0.0), axis=0)

        state = gl.load(of_state, mask=(columns >= 0)[:, None] & (first > 0), other=0.0)

        # The token's row of its block's inverse, in the order of `pieces.inverse`.
        is_near = own_rows[:, None] > steps[None, :]
        other_sums = gl.sum(gl.where(is_own, gl.convert_layout(sums, ROWS)[:, None], 0.0), axis=0)
        own_sums = gl.convert_layout(other_sums, ROWS)
        within = gl.exp(gl.where(is_near, own_sums[:, None] - other_sums[None, :], 0.0).to(gl.float32))
        block = gl.where(is_near, own_betas[:, None] * within * own_products, 0.0)
        inverse = 0.0 - row_near
        for behind in range(1, step):
            last = step - behind
            others = gl.sum(gl.where((own_rows == last)[:, None], block, 0.0), axis=0)
            factor = 0.0 - gl.sum(gl.where(steps == last, inverse, 0.0), axis=0)
            inverse = gl.fma(gl.zeros([BLOCK], gl.float32, COLUMNS) + factor, others, inverse)
        inverse = gl.where(steps == step, 1.0, inverse)
        large_inverse = inverse.to(dtype)
        small_inverse = gl.convert_layout((inverse - large_inverse.to(gl.float32)).to(dtype), OF_RIGHT)
        large_inverse = gl.convert_layout(large_inverse, OF_RIGHT)

        # The state, what the chunk's tokens have added, then the token's own block.
        state = state.to(gl.float32)
        large = state.to(dtype)
        small = (state - large.to(gl.float32)).to(dtype)
        found = mma_v2(large, factors, gl.zeros([SIZE, 8], gl.float32, SUMS))
        found = from_border * mma_v2(small, factors, found)
        is_missing = (gl.arange(0, 8, COLUMNS) == 0)[None, :]
        value = gl.convert_layout(value.to(gl.float32), ROWS)
        found = gl.where(is_missing, beta * (value[:, None] - found), found)
        async_copy.wait_group(0)
        gl.thread_barrier()
        found = mma_v2(kept.permute((1, 0)).load(LEFT), of_others, found)
        missing = column(found, 0)
        gl.store(of_misses + target * stride_misses + (first % MISSES_RING) * (VALUE_HEADS * SIZE) + rows, missing)
        is_new = (own == step)[None, :]
        misses = gl.where(is_new, gl.convert_layout(missing, gl.SliceLayout(1, LEFT))[:, None], misses)
        most = misses.to(dtype)
        least = (misses - most.to(gl.float32)).to(dtype)
        none = gl.zeros([BLOCK], dtype, OF_RIGHT)
        large_inverse, small_inverse = pair(large_inverse, none, BLOCK), pair(small_inverse, none, BLOCK)
        added = mma_v2(least, large_inverse, gl.zeros([SIZE, 8], gl.float32, SUMS))
        added = column(mma_v2(most, large_inverse, mma_v2(most, small_inverse, added)), 0).to(dtype)
        at = (first % RING) * (VALUE_HEADS * SIZE) + rows
        is_folded = place == CHUNK - 1
        gl.store(values_ring_ptr + target * stride_values + head * SIZE + at, added)
        own_added = gl.where(is_new, gl.convert_layout(added, gl.SliceLayout(1, LEFT))[:, None], own_added)
        found = column(mma_v2(own_added, pair(none, gl.convert_layout(of_own, OF_RIGHT), BLOCK), found), 1)
        to = out_ptr + start.to(gl.int64) * stride_out + head * SIZE + rows
        gl.store(to, (found * scale).to(out_ptr.dtype.element_ty))

        # What is seldom: the state goes to another slot, or a full chunk is added to it.
        if (source != target) | (first == 0) | is_folded:
            gl.thread_barrier()
            if source != target:
                for position in range(border, first):
                    old_at = (position % RING) * (VALUE_HEADS * SIZE) + rows
                    gl.store(
                        values_ring_ptr + target * stride_values + head * SIZE + old_at, gl.load(of_values + old_at)
                    )
                    old_gates = (position % RING) * VALUE_HEADS + head
                    old_decay = gl.load(decays_ring_ptr + source * stride_decays + old_gates)
                    gl.store(decays_ring_ptr + target * stride_decays + old_gates, old_decay)
                    old_beta = gl.load(betas_ring_ptr + source * stride_betas + old_gates)
                    gl.store(betas_ring_ptr + target * stride_betas + old_gates, old_beta)
                    if is_first:
                        old_at = (position % RING) * (KEY_HEADS * SIZE) + rows
                        gl.store(
                            of_keys + target * stride_keys + old_at, gl.load(of_keys + source * stride_keys + old_at)
                        )
                for position in range(first - step, first):
                    old_at = (position % MISSES_RING) * (VALUE_HEADS * SIZE) + rows
                    miss = gl.load(of_misses + source * stride_misses + old_at)
                    gl.store(of_misses + target * stride_misses + old_at, miss)
            new_keys = gl.allocate_shared_memory(dtype, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]), key)
            all_places = gl.arange(0, CHUNK, gl.SliceLayout(0, LEFT))
            turned_at = ((border + all_places) % RING)[None, :] * (VALUE_HEADS * SIZE) + columns[:, None]
            is_kept = (all_places < place)[None, :] & (columns >= 0)[:, None] & is_folded
            turned = gl.load(of_values + turned_at, mask=is_kept, other=0.0)
            new = gl.convert_layout(added, gl.SliceLayout(1, LEFT))
            turned = gl.where((all_places == place)[None, :], new[:, None], turned).to(gl.float32)
            turned = (turned * gl.convert_layout(between, gl.SliceLayout(0, LEFT))[None, :]).to(dtype)
            right_places = gl.arange(0, CHUNK, OF_RIGHT)
            for part in gl.static_range(4):
                part_numbers = part * 32 + gl.arange(0, 32, COLUMNS)
                state_at = part_numbers[None, :] * SIZE + rows[:, None]
                is_given = (rows >= 0)[:, None] & (first > 0)
                folded = gl.load(of_head + source * stride_states + state_at, mask=is_given, other=0.0).to(gl.float32)
                if is_folded:
                    key_numbers = part * 32 + gl.arange(0, 32, gl.SliceLayout(0, RIGHT))
                    of_ring = ((border + right_places) % RING)[:, None] * (KEY_HEADS * SIZE) + key_numbers[None, :]
                    is_old = (right_places < place)[:, None] & (key_numbers >= 0)[None, :]
                    chunk_keys = gl.load(of_keys + source * stride_keys + of_ring, mask=is_old, other=0.0)
                    new_part = new_keys.slice(part * 32, 32).load(gl.SliceLayout(0, RIGHT))
                    chunk_keys = gl.where((right_places == place)[:, None], new_part[None, :], chunk_keys)
                    folded = mma_v2(turned, chunk_keys, from_border * folded)
                gl.store(of_head + target * stride_states + state_at, folded.to(states_ptr.dtype.element_ty))
    if (row < num_tokens) & ((row < start) | (row >= stop)):  # noqa: SIM102 -- both are read otherwise
        if not has_row(row, starts_ptr, stops_ptr, num_rows):
            free = out_ptr + row.to(gl.int64) * stride_out + head * SIZE + gl.arange(0, SIZE, HEAD)
            gl.store(free, gl.zeros([SIZE], out_ptr.dtype.element_ty, HEAD))
