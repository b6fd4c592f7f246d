"""The kernels of `draw.py` that bound a row's top-k and top-p thresholds by two histograms of its scores."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from kernels.fused.backend import jit, tl
from kernels.sampling.draw_kernels import best_of_parts, bins_of, heat_of, is_number, scores_of, sub_bins_of

UNALIGNED = ["temperature_ptr", "top_k_ptr", "top_p_ptr"]
# Sums of weights are fp32 and in any order: right to 1e-6 or so, and taken to be within this factor.
MARGIN = tl.constexpr(1e-5)


@jit
def _is_limited(row, best, heat, top_k_ptr, top_p_ptr, vocab):
    """Whether top-k or top-p may leave out any token of a row that is drawn at all."""
    is_ranked = (tl.load(top_k_ptr + row) < vocab) | (tl.load(top_p_ptr + row) < 1)
    return is_ranked & (heat > 0) & is_number(best)


@jit
def _weights_of_bins(tops, width, has_end):
    """The least and the most that exp(score) may be in bins of this width below `tops`; one without end goes to 0."""
    lightest = tl.where(has_end, tl.exp(tops - width) * (1 - MARGIN), 0.0)
    return lightest, tl.exp(tops) * (1 + MARGIN)


@jit
def _sum_before(values, is_before):
    """For each bin the sum of those before it. Not a running sum less the bin's own, which may be all but equal."""
    return tl.sum(tl.where(is_before, values[None, :], 0.0), axis=1)


@jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=UNALIGNED)
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


@jit(do_not_specialize_on_alignment=UNALIGNED)
def bracket_kernel(
    counts_ptr, masses_ptr, bracket_ptr, top_k_ptr, top_p_ptr, vocab,
    NUM_BINS: tl.constexpr, BINS_PER_UNIT: tl.constexpr,
):  # fmt: skip
    """Of a row: the bins [first, last] that may be kept in part; that of the k-th token, NUM_BINS without top-k.

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
    """What the second histogram divides: bins [first, end), and the bin of the k-th token, which is not among them.

    Returns first, last, end, kth, and the top and the width of the first region's scores.
    """
    first = tl.load(bracket_ptr + row * 3)
    last = tl.load(bracket_ptr + row * 3 + 1)
    kth = tl.load(bracket_ptr + row * 3 + 2)
    end = tl.maximum(tl.minimum(last + 1, kth), first)
    return first, last, end, kth, first / -BINS_PER_UNIT, tl.maximum(end - first, 1) / BINS_PER_UNIT


@jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=UNALIGNED)
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


@jit(do_not_specialize_on_alignment=UNALIGNED)
def narrow_kernel(
    counts_ptr, sub_counts_ptr, masses_ptr, bracket_ptr, bounds_ptr, top_k_ptr, top_p_ptr, vocab,
    NUM_BINS: tl.constexpr, BINS_PER_UNIT: tl.constexpr, SUB_BINS: tl.constexpr,
):  # fmt: skip
    """Of a row: scores from bounds[0] on stay, those below bounds[1] go; bounds[2] <= p * weight of the first k <= [3].

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
