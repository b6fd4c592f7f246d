"""The kernels of `draw.py`: the likeliest token, bounds of top-k and top-p, the draw and its last decision."""

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
    """Return the bin of each score, of width 1 / BINS_PER_UNIT below 0; the last one has no end, and takes NaN."""
    place = tl.where(scores * BINS_PER_UNIT > 1.0 - NUM_BINS, scores * -BINS_PER_UNIT, NUM_BINS - 1.0)
    return place.to(tl.int32)


@jit
def sub_bins_of(scores, top, width, SUB_BINS: tl.constexpr):
    """Return which of SUB_BINS equal parts of `width` below `top` holds each score; the last takes all beyond."""
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
    """Compute log2 by the GPU's one instruction, right to 22 bits; Triton's own takes thirty instructions."""
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


LIMITS_UNALIGNED = ["temperature_ptr", "top_k_ptr", "top_p_ptr"]
# Sums of weights are fp32 and in any order: right to 1e-6 or so, and taken to be within this factor.
MARGIN = tl.constexpr(1e-5)


@jit
def _is_limited(row, best, heat, top_k_ptr, top_p_ptr, vocab):
    """Return whether top-k or top-p may exclude a token of a row that is drawn at all."""
    is_ranked = (tl.load(top_k_ptr + row) < vocab) | (tl.load(top_p_ptr + row) < 1)
    return is_ranked & (heat > 0) & is_number(best)


@jit
def _weights_of_bins(tops, width, has_end):
    """The least and the most that exp(score) may be in bins of this width below `tops`; one without end goes to 0."""
    lightest = tl.where(has_end, tl.exp(tops - width) * (1 - MARGIN), 0.0)
    return lightest, tl.exp(tops) * (1 + MARGIN)


@jit
def _sum_before(values, is_before):
    """Return for each bin the sum of the bins before it. Not a running sum less its own, for that may cancel."""
    return tl.sum(tl.where(is_before, values[None, :], 0.0), axis=1)


@jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=LIMITS_UNALIGNED)
def count_kernel(
    logits_ptr, best_ptr, best_id_ptr, counts_ptr, masses_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    stride_row, vocab, chunk, num_splits,
    MAX_SPLITS: tl.constexpr, NUM_BINS: tl.constexpr, BINS_PER_UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds a chunk of a row to the row's histogram, and to masses[0] its sum of exp(score)."""
    row, split = tl.program_id(0), tl.program_id(1)
    heat = heat_of(temperature_ptr, row)
    best, _ = best_of_parts(best_ptr, best_id_ptr, row, num_splits, MAX_SPLITS)
    if _is_limited(row, best, heat, top_k_ptr, top_p_ptr, vocab):
        counts = tl.zeros([NUM_BINS], tl.int32)
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(split * chunk, tl.minimum(split * chunk + chunk, vocab), BLOCK):
            cols = start + tl.arange(0, BLOCK)
            scores = scores_of(row, logits_ptr, stride_row, cols, vocab, best, heat)
            mass += tl.exp(scores)
            counts += tl.histogram(bins_of(scores, NUM_BINS, BINS_PER_UNIT), NUM_BINS, mask=cols < vocab)
        tl.atomic_add(counts_ptr + row * NUM_BINS + tl.arange(0, NUM_BINS), counts, mask=counts > 0, sem="relaxed")
        tl.atomic_add(masses_ptr + row * 3, tl.sum(mass, axis=0), sem="relaxed")


@jit(do_not_specialize_on_alignment=LIMITS_UNALIGNED)
def bracket_kernel(
    counts_ptr, masses_ptr, bracket_ptr, top_k_ptr, top_p_ptr, vocab,
    NUM_BINS: tl.constexpr, BINS_PER_UNIT: tl.constexpr,
):  # fmt: skip
    """Find a row's bins [first, last] that may stay in part, and that of the k-th token, NUM_BINS without top-k.

    A token stays if fewer than k tokens are above it and if these have less than p of the weight of the first k.
    """
    row = tl.program_id(0)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    bins = tl.arange(0, NUM_BINS)
    counts = tl.load(counts_ptr + row * NUM_BINS + bins)
    up_to = tl.cumsum(counts, axis=0)
    before = up_to - counts
    tops = bins.to(tl.float32) / -BINS_PER_UNIT
    lightest, heaviest = _weights_of_bins(tops, 1.0 / BINS_PER_UNIT, bins < NUM_BINS - 1)
    num_ranked = tl.minimum(tl.maximum(top_k - before, 0), counts).to(tl.float32)
    total = tl.load(masses_ptr + row * 3)
    least = tl.where(top_k < vocab, tl.sum(num_ranked * lightest, axis=0), total) * (1 - MARGIN)
    most = tl.where(top_k < vocab, tl.sum(num_ranked * heaviest, axis=0), total) * (1 + MARGIN)
    least_needed = tl.where(top_p < 1, top_p * least, float("inf"))
    most_needed = tl.where(top_p < 1, top_p * most, float("inf"))
    is_before = bins[None, :] < bins[:, None]
    most_above = _sum_before(counts * heaviest, is_before) + (counts - 1) * heaviest  # the last token of the bin
    least_above = _sum_before(counts * lightest, is_before)  # its first one
    is_kept = ((up_to <= top_k) & (most_above * (1 + MARGIN) < least_needed)) | (counts == 0)
    is_gone = (before >= top_k) | (least_above * (1 - MARGIN) >= most_needed)
    gone = tl.min(tl.where(is_gone, bins, NUM_BINS), axis=0)
    first = tl.minimum(tl.min(tl.where(is_kept, NUM_BINS, bins), axis=0), gone)
    kth = tl.min(tl.where((up_to >= top_k) & (top_k < vocab), bins, NUM_BINS), axis=0)
    tl.store(bracket_ptr + row * 3, first)
    tl.store(bracket_ptr + row * 3 + 1, gone - 1)
    tl.store(bracket_ptr + row * 3 + 2, kth)


@jit
def _regions(bracket_ptr, row, BINS_PER_UNIT: tl.constexpr):
    """Return the regions of the second histogram: bins [first, end), and the bin of the k-th token, outside of them.

    Returns first, last, end, kth, and the top and the width of the first region's scores.
    """
    first = tl.load(bracket_ptr + row * 3)
    last = tl.load(bracket_ptr + row * 3 + 1)
    kth = tl.load(bracket_ptr + row * 3 + 2)
    end = tl.maximum(tl.minimum(last + 1, kth), first)
    return first, last, end, kth, first / -BINS_PER_UNIT, tl.maximum(end - first, 1) / BINS_PER_UNIT


@jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=LIMITS_UNALIGNED)
def refine_kernel(
    logits_ptr, best_ptr, best_id_ptr, bracket_ptr, sub_counts_ptr, masses_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    stride_row, vocab, chunk, num_splits,
    MAX_SPLITS: tl.constexpr, NUM_BINS: tl.constexpr, BINS_PER_UNIT: tl.constexpr, SUB_BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds a chunk of a row to the histograms of its regions; to masses[1] and [2] the weight above each of them."""
    row, split = tl.program_id(0), tl.program_id(1)
    heat = heat_of(temperature_ptr, row)
    best, _ = best_of_parts(best_ptr, best_id_ptr, row, num_splits, MAX_SPLITS)
    if _is_limited(row, best, heat, top_k_ptr, top_p_ptr, vocab):
        first, _, end, kth, top, width = _regions(bracket_ptr, row, BINS_PER_UNIT)
        counts = tl.zeros([2 * SUB_BINS], tl.int32)
        above_first = tl.zeros([BLOCK], tl.float32)
        above_kth = tl.zeros([BLOCK], tl.float32)
        for start in range(split * chunk, tl.minimum(split * chunk + chunk, vocab), BLOCK):
            cols = start + tl.arange(0, BLOCK)
            scores = scores_of(row, logits_ptr, stride_row, cols, vocab, best, heat)
            bins = bins_of(scores, NUM_BINS, BINS_PER_UNIT)
            weights = tl.exp(scores)
            above_first += tl.where(bins < first, weights, 0.0)
            above_kth += tl.where(bins < kth, weights, 0.0)
            of_first = sub_bins_of(scores, top, width, SUB_BINS)
            of_kth = sub_bins_of(scores, kth / -BINS_PER_UNIT, 1.0 / BINS_PER_UNIT, SUB_BINS) + SUB_BINS
            is_counted = (cols < vocab) & (((bins >= first) & (bins < end)) | (bins == kth))
            counts += tl.histogram(tl.where(bins == kth, of_kth, of_first), 2 * SUB_BINS, mask=is_counted)
        at = sub_counts_ptr + row * (2 * SUB_BINS) + tl.arange(0, 2 * SUB_BINS)
        tl.atomic_add(at, counts, mask=counts > 0, sem="relaxed")
        tl.atomic_add(masses_ptr + row * 3 + 1, tl.sum(above_first, axis=0), sem="relaxed")
        tl.atomic_add(masses_ptr + row * 3 + 2, tl.sum(above_kth, axis=0), sem="relaxed")


@jit(do_not_specialize_on_alignment=LIMITS_UNALIGNED)
def narrow_kernel(
    counts_ptr, sub_counts_ptr, masses_ptr, bracket_ptr, bounds_ptr, top_k_ptr, top_p_ptr, vocab,
    NUM_BINS: tl.constexpr, BINS_PER_UNIT: tl.constexpr, SUB_BINS: tl.constexpr,
):  # fmt: skip
    """Find bounds: scores >= bounds[0] stay, < bounds[1] go; bounds[2] <= p * weight of the first k <= bounds[3].

    As `bracket_kernel`, over the sub-bins of both regions, one after the other: they descend, with a gap between.
    """
    row = tl.program_id(0)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    first, last, end, kth, top, width = _regions(bracket_ptr, row, BINS_PER_UNIT)
    subs = tl.arange(0, 2 * SUB_BINS)
    of_kth = subs >= SUB_BINS
    step = tl.where(of_kth, 1.0 / BINS_PER_UNIT, width) / SUB_BINS
    tops = tl.where(of_kth, kth / -BINS_PER_UNIT, top) - (subs % SUB_BINS).to(tl.float32) * step
    region_end = tl.where(of_kth, kth + 1, end)
    has_end = (subs % SUB_BINS < SUB_BINS - 1) | (region_end < NUM_BINS)
    lightest, heaviest = _weights_of_bins(tops, step, has_end)
    counts = tl.load(sub_counts_ptr + row * (2 * SUB_BINS) + subs)
    bins = tl.arange(0, NUM_BINS)
    whole = tl.load(counts_ptr + row * NUM_BINS + bins)
    num_above_kth = tl.sum(tl.where(bins < kth, whole, 0), axis=0)
    num_above_first = tl.sum(tl.where(bins < first, whole, 0), axis=0)

    inside = tl.cumsum(counts, axis=0) - tl.where(of_kth, tl.sum(tl.where(of_kth, 0, counts), axis=0), 0)
    up_to = tl.where(of_kth, num_above_kth, num_above_first) + inside
    before = up_to - counts
    mass_above = tl.where(of_kth, tl.load(masses_ptr + row * 3 + 2), tl.load(masses_ptr + row * 3 + 1))
    is_same = (subs // SUB_BINS)[None, :] == (subs // SUB_BINS)[:, None]
    is_before = (subs[None, :] < subs[:, None]) & is_same

    # The weight of the first k: all above the k-th token's bin, and the first ones of that bin.
    ranked = tl.where(of_kth, tl.minimum(tl.maximum(top_k - before, 0), counts), 0).to(tl.float32)
    base = tl.load(masses_ptr + row * 3 + tl.where(top_k < vocab, 2, 0))
    least = base * (1 - MARGIN) + tl.where(top_k < vocab, tl.sum(ranked * lightest, axis=0), 0.0)
    most = base * (1 + MARGIN) + tl.where(top_k < vocab, tl.sum(ranked * heaviest, axis=0), 0.0)
    least_needed = tl.where(top_p < 1, top_p * least, float("inf"))
    most_needed = tl.where(top_p < 1, top_p * most, float("inf"))
    most_inside = _sum_before(counts * heaviest, is_before) + (counts - 1) * heaviest
    most_above = (mass_above + most_inside) * (1 + MARGIN)
    least_above = (mass_above + _sum_before(counts * lightest, is_before)) * (1 - MARGIN)
    is_kept = ((up_to <= top_k) & (most_above < least_needed)) | (counts == 0)
    is_gone = (before >= top_k) | (least_above >= most_needed)

    # Only the regions that are uncertain count: bins [first, end), and the k-th token's where `last` is that one.
    starts = tl.where(end > first, 0, SUB_BINS)
    stops = tl.where((last >= kth) & (kth >= first), 2 * SUB_BINS, SUB_BINS)
    is_in = (subs >= starts) & (subs < stops)
    gone = tl.min(tl.where(is_gone & is_in, subs, stops), axis=0)
    unsure = tl.minimum(tl.min(tl.where(is_kept | ~is_in, stops, subs), axis=0), gone)
    bottom = tl.where(last + 1 < NUM_BINS, (last + 1) / -BINS_PER_UNIT, float("-inf"))
    high = tl.where(unsure < stops, tl.sum(tl.where(subs == unsure, tops, 0.0), axis=0), bottom)
    low = tl.where(gone < stops, tl.sum(tl.where(subs == gone, tops, 0.0), axis=0), bottom)
    tl.store(bounds_ptr + row * 4, high + MARGIN)
    tl.store(bounds_ptr + row * 4 + 1, low - MARGIN)
    tl.store(bounds_ptr + row * 4 + 2, least_needed)
    tl.store(bounds_ptr + row * 4 + 3, most_needed)


DRAW_UNALIGNED = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "log_min_p_ptr", "seeds_ptr", "positions_ptr"]


@jit
def _bounds_of(bounds_ptr, row, top_k, top_p, vocab):
    """Scores from the first bound on stay, those below the second go; -inf where a row has neither top-k nor top-p."""
    is_ranked = (top_k < vocab) | (top_p < 1)
    high = tl.where(is_ranked, tl.load(bounds_ptr + row * 4), float("-inf"))
    return high, tl.where(is_ranked, tl.load(bounds_ptr + row * 4 + 1), float("-inf"))


@jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=DRAW_UNALIGNED)
def draw_kernel(
    logits_ptr, best_ptr, best_id_ptr, bounds_ptr, certain_ptr, certain_id_ptr, other_ptr, other_id_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, seeds_ptr, positions_ptr,
    stride_row, vocab, chunk, num_splits, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The best score plus noise of a chunk of a row: among tokens that surely stay, and among the uncertain ones."""
    row, split = tl.program_id(0), tl.program_id(1)
    heat = heat_of(temperature_ptr, row)
    best, _ = best_of_parts(best_ptr, best_id_ptr, row, num_splits, MAX_SPLITS)
    if (heat > 0) & is_number(best):
        high, low = _bounds_of(bounds_ptr, row, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), vocab)
        log_min_p = tl.load(log_min_p_ptr + row)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        certain = tl.full([BLOCK], float("-inf"), tl.float32)
        certain_id = tl.zeros([BLOCK], tl.int32) + split * chunk
        other = certain
        other_id = certain_id
        for start in range(split * chunk, tl.minimum(split * chunk + chunk, vocab), BLOCK):
            cols = start + tl.arange(0, BLOCK)
            scores = scores_of(row, logits_ptr, stride_row, cols, vocab, best, heat)
            noisy = tl.where(scores >= log_min_p, scores + noise_of(seed, position, cols, FAST), float("-inf"))
            uncertain = tl.where((scores < high) & (scores >= low), noisy, float("-inf"))
            noisy = tl.where(scores >= high, noisy, float("-inf"))
            other_id = tl.where(uncertain > other, cols, other_id)
            other = tl.maximum(uncertain, other)
            certain_id = tl.where(noisy > certain, cols, certain_id)
            certain = tl.maximum(noisy, certain)
        at = row * num_splits + split
        value, token = first_best(certain, certain_id)
        tl.store(certain_ptr + at, value)
        tl.store(certain_id_ptr + at, token)
        value, token = first_best(other, other_id)
        tl.store(other_ptr + at, value)
        tl.store(other_id_ptr + at, token)


@jit
def _weight_above(row, logits_ptr, stride_row, vocab, best, heat, score, BLOCK: tl.constexpr):
    """The sum of exp(score), fp64, over the tokens of a row above a score."""
    weight = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        scores = scores_of(row, logits_ptr, stride_row, start + tl.arange(0, BLOCK), vocab, best, heat)
        weight += tl.where(scores > score, tl.exp(scores.to(tl.float64)), 0.0)
    return tl.sum(weight, axis=0)


@jit
def _weight_of_top_k(row, logits_ptr, stride_row, vocab, best, heat, top_k, BLOCK: tl.constexpr):
    """The sum of exp(score), fp64, over the first k ranks of a row; over all tokens where k covers them."""
    kth_score = tl.full([], float("-inf"), tl.float32)
    left = top_k.to(tl.int32)  # ranks among the tokens that equal the k-th one
    if top_k < vocab:
        # The k-th smallest of the bits of -score, which order as the scores do: 8 bits a pass, from the top.
        kth = tl.full([], 0, tl.int32)
        for digit in range(4):
            shift = 24 - digit * 8
            counts = tl.zeros([256], tl.int32)
            for start in range(0, vocab, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                scores = scores_of(row, logits_ptr, stride_row, cols, vocab, best, heat)
                keys = (0.0 - scores).to(tl.int32, bitcast=True)
                # Two shifts: by 32 at once, in the first pass, is undefined.
                is_open = (cols < vocab) & ((keys >> shift >> 8) == (kth >> shift >> 8))
                counts += tl.histogram((keys >> shift) & 255, 256, mask=is_open)
            up_to = tl.cumsum(counts, axis=0)
            value = tl.sum((up_to < left).to(tl.int32), axis=0)
            left -= tl.sum(tl.where(tl.arange(0, 256) < value, counts, 0), axis=0)
            kth = kth | (value << shift)
        kth_score = -kth.to(tl.float32, bitcast=True)
    ties = tl.where(top_k < vocab, left * tl.exp(kth_score.to(tl.float64)), 0.0)
    return _weight_above(row, logits_ptr, stride_row, vocab, best, heat, kth_score, BLOCK) + ties


@jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=DRAW_UNALIGNED)
def finish_kernel(
    logits_ptr, best_ptr, best_id_ptr, bounds_ptr, certain_ptr, certain_id_ptr, other_ptr, other_id_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, seeds_ptr, positions_ptr, token_ptr, is_finite_ptr,
    stride_row, vocab, num_splits, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The row's token. An uncertain token that beats the certain ones is looked at: how much is above it?"""
    row = tl.program_id(0)
    best, token = best_of_parts(best_ptr, best_id_ptr, row, num_splits, MAX_SPLITS)
    is_finite = is_number(best)
    heat = heat_of(temperature_ptr, row)
    if (heat > 0) & is_finite:
        winner, token = best_of_parts(certain_ptr, certain_id_ptr, row, num_splits, MAX_SPLITS)
        other, other_id = best_of_parts(other_ptr, other_id_ptr, row, num_splits, MAX_SPLITS)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        high, low = _bounds_of(bounds_ptr, row, top_k, top_p, vocab)
        log_min_p = tl.load(log_min_p_ptr + row)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        is_open = (other > winner) | ((other == winner) & (other_id < token))
        while is_open:
            score = scores_of(row, logits_ptr, stride_row, other_id, vocab, best, heat)
            num_above = tl.zeros([BLOCK], tl.int32)
            weight = tl.zeros([BLOCK], tl.float32)
            following = tl.full([BLOCK], float("-inf"), tl.float32)
            following_id = tl.zeros([BLOCK], tl.int32)
            for start in tl.range(0, vocab, BLOCK, num_stages=3):
                cols = start + tl.arange(0, BLOCK)
                scores = scores_of(row, logits_ptr, stride_row, cols, vocab, best, heat)
                is_above = scores > score
                num_above += is_above.to(tl.int32)
                weight += tl.where(is_above, tl.exp(scores), 0.0)
                is_next = is_above & (scores < high) & (scores >= low) & (scores >= log_min_p)
                noisy = tl.where(is_next, scores + noise_of(seed, position, cols, FAST), float("-inf"))
                following_id = tl.where(noisy > following, cols, following_id)
                following = tl.maximum(noisy, following)
            above = tl.sum(weight, axis=0)
            stays = tl.sum(num_above, axis=0) < top_k
            if stays & (top_p < 1):  # noqa: SIM102 -- Triton has no lazy `and`
                if above * (1 + MARGIN) >= tl.load(bounds_ptr + row * 4 + 2):
                    stays = above * (1 - MARGIN) < tl.load(bounds_ptr + row * 4 + 3)
                    if stays:  # within the margins: exactly, then
                        total = _weight_of_top_k(row, logits_ptr, stride_row, vocab, best, heat, top_k, BLOCK)
                        exactly = _weight_above(row, logits_ptr, stride_row, vocab, best, heat, score, BLOCK)
                        stays = exactly < top_p.to(tl.float64) * total
            if stays:
                token = other_id
                is_open = other < winner
            else:
                other, other_id = first_best(following, following_id)
                is_open = (other > winner) | ((other == winner) & (other_id < token))
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(is_finite_ptr + row, is_finite)
