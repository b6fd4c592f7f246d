"""The kernels of `draw.py` that draw: the best score plus noise of each chunk, and a row's token from these."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from kernels.fused.backend import jit, tl
from kernels.sampling.draw_kernels import best_of_parts, first_best, heat_of, is_number, noise_of, scores_of

UNALIGNED = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "log_min_p_ptr", "seeds_ptr", "positions_ptr"]
MARGIN = tl.constexpr(1e-5)  # of a weight summed in fp32, see `draw_limits.py`


@jit
def _bounds_of(bounds_ptr, row, top_k, top_p, vocab):
    """Scores from the first bound on stay, those below the second go; -inf where a row has neither top-k nor top-p."""
    is_ranked = (top_k < vocab) | (top_p < 1)
    high = tl.where(is_ranked, tl.load(bounds_ptr + row * 4), float("-inf"))
    return high, tl.where(is_ranked, tl.load(bounds_ptr + row * 4 + 1), float("-inf"))


@jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=UNALIGNED)
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


@jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=UNALIGNED)
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
