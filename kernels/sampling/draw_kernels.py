"""What the kernels of `draw.py` share, and those that find the likeliest token."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from kernels.fused.backend import jit, tl


@jit
def scores_of(row, logits_ptr, stride_row, cols, vocab, best, heat):
    """(logit - best) * heat; -inf past the vocabulary. heat is the inverse of the temperature."""
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride_row + cols, mask=cols < vocab, other=float("-inf"))
    return (logits.to(tl.float32) - best) * heat


@jit
def heat_of(temperature_ptr, row):
    """The inverse of a row's temperature; 0 for a greedy row."""
    temperature = tl.load(temperature_ptr + row)
    return tl.where(temperature > 0, tl.div_rn(1.0, tl.where(temperature > 0, temperature, 1.0)), 0.0)


@jit
def bins_of(scores, NUM_BINS: tl.constexpr, BINS_PER_UNIT: tl.constexpr):
    """Which bin of width 1 / BINS_PER_UNIT below 0; the last one has no end, and takes NaN."""
    place = tl.where(scores * BINS_PER_UNIT > 1.0 - NUM_BINS, scores * -BINS_PER_UNIT, NUM_BINS - 1.0)
    return place.to(tl.int32)


@jit
def sub_bins_of(scores, top, width, SUB_BINS: tl.constexpr):
    """Which of the SUB_BINS that divide the `width` below `top`; what is beyond them counts to the last."""
    place = tl.maximum((top - scores) * (SUB_BINS / width), 0.0)
    return tl.minimum(place, SUB_BINS - 1.0).to(tl.int32)


@jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@jit
def _log2(x, FAST: tl.constexpr):
    """By the GPU's one instruction, which is right to 22 bits; Triton's own takes thirty."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@jit
def noise_of(seed, position, tokens, FAST: tl.constexpr):
    """`gumbel_noise` of one row, right to 6e-6."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    place = position.to(tl.uint32)
    first_key = _mix(_mix(_mix(low) ^ high) ^ place)
    second_key = _mix(_mix(_mix(high ^ 0x85EBCA6B) ^ low) ^ place)
    bits = _mix(_mix(tokens.to(tl.uint32) * 0x9E3779B9 + first_key) ^ second_key) & 0x7FFFFFFF
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 1 - 5.960464477539063e-08)
    # -log1p(-u), where 1 - u has lost the bits that matter by its series: the next term is below 1e-8 of the sum
    series = u * (1 + u * (0.5 + u * (0.33333333 + u * (0.25 + u * (0.2 + u * 0.16666667)))))
    exponential = tl.where(u < 0.0625, series, -0.6931471805599453 * _log2(1.0 - u, FAST))
    return -0.6931471805599453 * _log2(exponential, FAST)


@jit
def first_best(values, ids):
    """The largest value, and the smallest id that has it."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, 0x7FFFFFFF), axis=0)


@jit
def is_number(best):
    return (best > float("-inf")) & (best < float("inf"))


@jit
def best_of_parts(values_ptr, ids_ptr, row, num_splits, MAX_SPLITS: tl.constexpr):
    parts = tl.arange(0, MAX_SPLITS)
    at = row * num_splits + parts
    values = tl.load(values_ptr + at, mask=parts < num_splits, other=float("-inf"))
    return first_best(values, tl.load(ids_ptr + at, mask=parts < num_splits, other=0x7FFFFFFF))


@jit(do_not_specialize=["num_splits"])
def best_kernel(logits_ptr, best_ptr, best_id_ptr, stride_row, vocab, chunk, num_splits, BLOCK: tl.constexpr):
    """The likeliest token of a chunk of a row, a NaN counting as +inf."""
    row, split = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32) + split * chunk
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, vocab), BLOCK):
        cols = start + lanes
        at = logits_ptr + row.to(tl.int64) * stride_row + cols
        logits = tl.load(at, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        logits = tl.where(logits == logits, logits, float("inf"))  # noqa: PLR0124 -- false for a NaN
        best_id = tl.where(logits > best, cols, best_id)
        best = tl.maximum(logits, best)
    value, token = first_best(best, best_id)
    tl.store(best_ptr + row * num_splits + split, value)
    tl.store(best_id_ptr + row * num_splits + split, token)


@jit(do_not_specialize=["num_splits"])
def greedy_kernel(best_ptr, best_id_ptr, token_ptr, is_finite_ptr, num_splits, MAX_SPLITS: tl.constexpr):
    """The likeliest token of a row from those of its chunks."""
    row = tl.program_id(0)
    best, token = best_of_parts(best_ptr, best_id_ptr, row, num_splits, MAX_SPLITS)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(is_finite_ptr + row, is_number(best))
