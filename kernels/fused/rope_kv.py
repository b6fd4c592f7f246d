"""Rotary embedding, optional norm of query and key heads, and the write into the KV cache, in one launch."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.fp8_cache import pages as fp8_pages
from kernels.fused.backend import Aligned, Loaded, jit, next_power_of_2, overlap, prepare, runs_on_triton, tl
from kernels.fused.norm import rms_norm_torch

LARGEST = tl.constexpr(fp8_pages.LARGEST)
LEAST_MAGNITUDE = tl.constexpr(fp8_pages.LEAST_MAGNITUDE)
_MAX_TILE = 1024  # elements of one part of the heads that a program holds: 8 a thread


@dataclass(frozen=True, slots=True)
class Turns:
    """Rotations of T tokens in the form that torch's operations want: cos, sin [T, 1, r] fp32.

    Both halves of a head have the same cosines; the sines of the first are negative.
    """

    cos: Tensor
    sin: Tensor


def turns_of(cos_sin: Tensor, positions: Tensor) -> Turns | None:
    """Return the rotations for all layers of a step at once; None where the kernel reads the table itself."""
    if runs_on_triton(cos_sin):
        return None
    return _turns(cos_sin, positions)


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    turns: Turns | None = None,
) -> None:
    """Rotate q and k in place, write k and v into their pages. Computed in fp32, rounded once.

    In e4m3 pages k and v are rounded, and become what those hold: who reads them beside the pages, as attention of a
    fresh prompt does, reads the same keys and values, and so a chunk's borders and a prefix hit change none.

    q          [T, heads, d], k, v [T, kv_heads, d], d even; the heads of a token stand side by side, as in views of
               one [T, (heads + 2 * kv_heads) * d] projection
    cos_sin    [max_position, r] fp32, the cosines of r / 2 angles, then their sines; r <= d, even: the dimensions of a
               head that are rotated, its first ones
    positions  [T] int32, below max_position
    k_pages, v_pages   [num_pages, page_size, kv_heads, d], contiguous, written at `slots`; may be of another dtype; in
               e4m3 pages as `kernels.fp8_cache.pages` makes them, whose scales are written too
    slots      [T] int64, page * page_size + offset: unique, in range, never negative (the caller proves it)
    q_norm, k_norm     [d] weights of an RMSNorm of each head before the rotation; both or neither
    turns      `turns_of(cos_sin, positions)`, where it is at hand: then it is computed by torch
    Pairs are (x[i], x[i + r / 2]), as in transformers. Source: Su et al. 2021.
    Raises RuntimeError when the pages are not contiguous.
    """
    if turns is not None or not runs_on_triton(q):
        rope_and_write_kv_torch(
            q, k, v, cos_sin, positions, k_pages, v_pages, slots, q_norm=q_norm, k_norm=k_norm, eps=eps, turns=turns
        )
        return
    page_size = _scaled_page_size(k_pages, v_pages)
    if not page_size and not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise RuntimeError(f"pages: expected contiguous ones, found strides {k_pages.stride()} and {v_pages.stride()}")
    norms = (q, k) if q_norm is None or k_norm is None else (q_norm, k_norm)
    tensors = (q, k, v, cos_sin, positions, k_pages, v_pages, slots, *norms)
    strides = (q.stride()[0], k.stride()[0], v.stride()[0])
    num_tokens, num_heads, head_dim = q.shape
    sizes, rest = (num_heads, k.shape[1], head_dim), head_dim - cos_sin.shape[1]
    at = [x.data_ptr() for x in tensors]
    aligned = at[0] | at[1] | at[2] | at[3] | at[5] | at[6] | at[8] | at[9]
    if q.is_cuda and aligned % 16 == 0:
        dtypes = tuple([x.dtype for x in tensors])
        kernel, num_blocks = _prepared(q.device, dtypes, sizes, strides, q_norm is not None, rest, page_size)
        kernel((num_tokens, num_blocks, 1), (*at, *strides, eps))
    else:
        num_q_blocks, num_kv_blocks, _, _ = _blocks(sizes, rest)
        options = _options(q.device, sizes, has_norm=q_norm is not None, rest=rest, page_size=page_size)
        _rope_and_write_kv_kernel[(num_tokens, num_q_blocks + num_kv_blocks)](*tensors, *strides, eps, **options)


def _scaled_page_size(k_pages: Tensor, v_pages: Tensor) -> int:
    """Return the tokens of a page with scales; 0 where pages hold the keys and values themselves.

    Raises ValueError for e4m3 without scales behind.
    """
    if k_pages.dtype is not fp8_pages.E4M3:
        return 0
    for pages in (k_pages, v_pages):
        fp8_pages.scales_of(pages)
    return k_pages.shape[1]


def rotate_queries(
    q: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    *,
    q_norm: Tensor | None = None,
    eps: float = 1e-6,
    turns: Turns | None = None,
) -> None:
    """Rotate q in place, as `rope_and_write_kv` does, where a layer writes no keys and values."""
    if turns is not None or not runs_on_triton(q):
        _rotate(q, q_norm, _turns(cos_sin, positions) if turns is None else turns, eps)
        return
    norm = q if q_norm is None else q_norm
    # The kernel's blocks of key heads are left out: what stands for keys, values and pages is neither read nor written.
    tensors = (q, q, q, cos_sin, positions, q, q, positions, norm, norm)
    num_tokens, num_heads, head_dim = q.shape
    strides, sizes, rest = (q.stride()[0],) * 3, (num_heads, 0, head_dim), head_dim - cos_sin.shape[1]
    at = [x.data_ptr() for x in tensors]
    if q.is_cuda and (at[0] | at[3] | at[8]) % 16 == 0:
        dtypes = tuple([x.dtype for x in tensors])
        kernel, num_blocks = _prepared(q.device, dtypes, sizes, strides, q_norm is not None, rest)
        kernel((num_tokens, num_blocks, 1), (*at, *strides, eps))
    else:
        options = _options(q.device, sizes, has_norm=q_norm is not None, rest=rest)
        _rope_and_write_kv_kernel[(num_tokens, _blocks(sizes, rest)[0])](*tensors, *strides, eps, **options)


def _blocks(sizes: tuple[int, int, int], rest: int) -> tuple[int, int, int, int]:
    """Blocks of query heads and of KV heads, heads of a block, and columns of a part of a head, padded."""
    num_heads, num_kv_heads, head_dim = sizes
    cols = next_power_of_2(max((head_dim - rest) // 2, rest))
    block_heads = min(next_power_of_2(max(num_heads, num_kv_heads)), max(_MAX_TILE // cols, 1))
    return -(-num_heads // block_heads), -(-num_kv_heads // block_heads), block_heads, cols


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=256)
def _prepared(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int],
    has_norm: bool,
    rest: int,
    page_size: int = 0,
) -> tuple[Loaded, int]:
    """The kernel for aligned tensors of these dtypes, and its programs of a token.

    Positions and slots may have any address.
    """
    num_q_blocks, num_kv_blocks, _, _ = _blocks(sizes, rest)
    options = _options(device, sizes, has_norm=has_norm, rest=rest, page_size=page_size)
    kernel = prepare(_rope_and_write_kv_kernel, device, *map(Aligned, dtypes), *strides, 0.0, **options)
    return kernel, num_q_blocks + num_kv_blocks


def _options(
    device: torch.device, sizes: tuple[int, int, int], *, has_norm: bool, rest: int = 0, page_size: int = 0
) -> dict[str, int]:
    """`rest`: the dimensions of a head that are not rotated. `page_size`: of pages with scales, else 0."""
    num_heads, num_kv_heads, head_dim = sizes
    num_q_blocks, _, block_heads, cols = _blocks(sizes, rest)
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "NUM_Q_BLOCKS": num_q_blocks,
        "BLOCK_HEADS": block_heads,
        "BLOCK_COLS": cols,
        "HAS_NORM": has_norm,
        "REST": rest,
        "SCALED_PAGE": page_size,
        **overlap(device),
    }


def rope_and_write_kv_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    turns: Turns | None = None,
) -> None:
    turns = _turns(cos_sin, positions) if turns is None else turns
    both = _side_by_side(q, k) if q_norm is None else None
    for heads, norm in ((q, q_norm), (k, k_norm)) if both is None else ((both, None),):
        _rotate(heads, norm, turns, eps)
    if _scaled_page_size(k_pages, v_pages):
        k.copy_(fp8_pages.write(k, k_pages, slots))
        v.copy_(fp8_pages.write(v, v_pages, slots))
        return
    k_pages.view(-1, *k.shape[1:]).index_copy_(0, slots, k.to(k_pages.dtype))
    v_pages.view(-1, *v.shape[1:]).index_copy_(0, slots, v.to(v_pages.dtype))


def _rotate(heads: Tensor, norm: Tensor | None, turns: Turns, eps: float) -> None:
    """Norm heads [T, n, d], where there is a norm, and rotate them, in place."""
    # No copy where they are fp32 and have no norm: then the rotation is really in place.
    precise = heads.float() if norm is None else rms_norm_torch(heads.float(), norm, eps)
    num_rotated = turns.cos.shape[-1]
    rotated = precise if num_rotated == precise.shape[-1] else precise[..., :num_rotated]
    swapped = rotated.roll(num_rotated // 2, dims=-1)  # the halves of each head
    rotated.mul_(turns.cos).addcmul_(swapped, turns.sin)
    if precise is not heads:
        heads.copy_(precise)


def _turns(cos_sin: Tensor, positions: Tensor) -> Turns:
    cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
    return Turns(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def _side_by_side(q: Tensor, k: Tensor) -> Tensor | None:
    """q and k as one tensor of all their heads, where k lies behind q in the same rows: then half the operations do."""
    num_tokens, num_heads, head_dim = q.shape
    if q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return None
    if q.stride() != k.stride() or k.data_ptr() - q.data_ptr() != num_heads * head_dim * q.element_size():
        return None
    return q.as_strided((num_tokens, num_heads + k.shape[1], head_dim), q.stride())


@jit
def angles_of(cos_sin_ptr, position, cols, HALF: tl.constexpr):
    """Load (cos, sin) of the angles `cols` of a position, of HALF that it has; 0 behind the last."""
    angle = cos_sin_ptr + position.to(tl.int64) * (2 * HALF) + cols
    return tl.load(angle, mask=cols < HALF, other=0.0), tl.load(angle + HALF, mask=cols < HALF, other=0.0)


@jit
def store_halves(row, left, right, mask, HALF: tl.constexpr):
    """Store two halves HALF numbers apart, in the dtype that `row` points at."""
    tl.store(row, left.to(row.dtype.element_ty), mask=mask)
    tl.store(row + HALF, right.to(row.dtype.element_ty), mask=mask)


@jit
def store_rotated(row, left, right, cos, sin, mask, HALF: tl.constexpr):
    """Rotate two halves against each other, store them as `store_halves` does; return them rounded as stored."""
    new_left = (left * cos - right * sin).to(row.dtype.element_ty)
    new_right = (right * cos + left * sin).to(row.dtype.element_ty)
    store_halves(row, new_left, new_right, mask, HALF)
    return new_left, new_right


@jit
def _largest(left, right):
    """The largest magnitude of each head, [heads], of both halves [heads, half]."""
    return tl.maximum(tl.max(tl.abs(left), axis=1), tl.max(tl.abs(right), axis=1))


@jit
def _store_scaled(target, source, x, scale, mask):
    """Store x [heads, n] over its scale [heads] as e4m3, ties to even; and at its source what that is times the scale.

    Conversion saturates (at most 448 * (1 + 2**-23) comes), and NaN stays NaN.
    """
    scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    numbers = scaled.to(tl.float8e4nv)
    tl.store(target, numbers, mask=mask)
    tl.store(source, (numbers.to(tl.float32) * scale[:, None]).to(source.dtype.element_ty), mask=mask)


# The alignment of positions and slots changes with the batch; a kernel for each would compile after ready.
@jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_and_write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    k_pages_ptr,
    v_pages_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    stride_qt,
    stride_kt,
    stride_vt,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_Q_BLOCKS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    REST: tl.constexpr = 0,
    SCALED_PAGE: tl.constexpr = 0,
    OVERLAPS: tl.constexpr = False,
):
    """One program a token and block of heads: query heads first, then key heads with their values.

    SCALED_PAGE: tokens of a page whose numbers have scales behind them (`kernels/fp8_cache/pages.py`); 0: no scales.

    A head is up to three tiles of one shape: both halves that are rotated, and the rest. What is the same for all heads
    is loaded as such a tile too: then all have one layout, and none is exchanged between warps.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    is_query = block < NUM_Q_BLOCKS
    HALF: tl.constexpr = (HEAD_DIM - REST) // 2
    cols = tl.broadcast_to(tl.arange(0, BLOCK_COLS)[None, :], (BLOCK_HEADS, BLOCK_COLS))
    heads = (block - tl.where(is_query, 0, NUM_Q_BLOCKS)) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = heads < tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    has_value = is_head & (block >= NUM_Q_BLOCKS)
    mask, rest_mask = is_head[:, None] & (cols < HALF), is_head[:, None] & (cols < REST)
    tile = heads[:, None] * HEAD_DIM + cols
    if is_query:
        row = q_ptr + token * stride_qt + tile
        norm = q_norm_ptr
    else:
        row = k_ptr + token * stride_kt + tile
        norm = k_norm_ptr
    if HAS_NORM:
        left_weight = tl.load(norm + cols, mask=cols < HALF, other=0.0).to(tl.float32)
        right_weight = tl.load(norm + HALF + cols, mask=cols < HALF, other=0.0).to(tl.float32)
        if REST > 0:
            rest_weight = tl.load(norm + 2 * HALF + cols, mask=cols < REST, other=0.0).to(tl.float32)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()

    left = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(row + HALF, mask=mask, other=0.0).to(tl.float32)
    if REST > 0:
        rest = tl.load(row + 2 * HALF, mask=rest_mask, other=0.0).to(tl.float32)
    # Values are loaded before anything is stored: a load does not pass a store.
    value_row = v_ptr + token * stride_vt + tile
    values_left = tl.load(value_row, mask=has_value[:, None] & (cols < HALF), other=0.0)
    values_right = tl.load(value_row + HALF, mask=has_value[:, None] & (cols < HALF), other=0.0)
    if REST > 0:
        value_rest = tl.load(value_row + 2 * HALF, mask=has_value[:, None] & (cols < REST), other=0.0)
    cos, sin = angles_of(cos_sin_ptr, tl.load(positions_ptr + token), cols, HALF)
    if HAS_NORM:
        squares = tl.sum(left * left + right * right, axis=1) / HEAD_DIM
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1) / HEAD_DIM
        scale = tl.rsqrt(squares + eps)[:, None]
        left *= scale * left_weight
        right *= scale * right_weight
        if REST > 0:
            rest *= scale * rest_weight
            tl.store(row + 2 * HALF, rest.to(q_ptr.dtype.element_ty), mask=rest_mask)
    rotated_left, rotated_right = store_rotated(row, left, right, cos, sin, mask, HALF)

    if SCALED_PAGE > 0:
        if not is_query:
            k_largest = _largest(rotated_left.to(tl.float32), rotated_right.to(tl.float32))
            v_largest = _largest(values_left.to(tl.float32), values_right.to(tl.float32))
            if REST > 0:
                rounded_rest = rest.to(q_ptr.dtype.element_ty).to(tl.float32)
                k_largest = tl.maximum(k_largest, tl.max(tl.abs(rounded_rest), axis=1))
                v_largest = tl.maximum(v_largest, tl.max(tl.abs(value_rest.to(tl.float32)), axis=1))
            slot = tl.load(slots_ptr + token).to(tl.int64)
            page, offset = slot // SCALED_PAGE, slot % SCALED_PAGE
            row_size: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
            page_start = page * (SCALED_PAGE * NUM_KV_HEADS * (HEAD_DIM + 4))
            numbers = page_start + offset * row_size
            scale_at = (page_start + SCALED_PAGE * row_size) // 4 + heads * SCALED_PAGE + offset
            k_scale = tl.div_rn(tl.maximum(k_largest, LEAST_MAGNITUDE), LARGEST)
            v_scale = tl.div_rn(tl.maximum(v_largest, LEAST_MAGNITUDE), LARGEST)
            tl.store(k_pages_ptr.to(tl.pointer_type(tl.float32)) + scale_at, k_scale, mask=is_head)
            tl.store(v_pages_ptr.to(tl.pointer_type(tl.float32)) + scale_at, v_scale, mask=is_head)
            k_row, v_row = k_pages_ptr + numbers + tile, v_pages_ptr + numbers + tile
            _store_scaled(k_row, row, rotated_left.to(tl.float32), k_scale, mask)
            _store_scaled(k_row + HALF, row + HALF, rotated_right.to(tl.float32), k_scale, mask)
            _store_scaled(v_row, value_row, values_left.to(tl.float32), v_scale, mask)
            _store_scaled(v_row + HALF, value_row + HALF, values_right.to(tl.float32), v_scale, mask)
            if REST > 0:
                _store_scaled(k_row + 2 * HALF, row + 2 * HALF, rounded_rest, k_scale, rest_mask)
                _store_scaled(v_row + 2 * HALF, value_row + 2 * HALF, value_rest.to(tl.float32), v_scale, rest_mask)
    elif not is_query:
        # int64: a cache of a few GB has more than 2^31 elements
        page_row = tl.load(slots_ptr + token).to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM) + tile
        store_halves(k_pages_ptr + page_row, rotated_left, rotated_right, mask, HALF)
        store_halves(v_pages_ptr + page_row, values_left, values_right, mask, HALF)
        if REST > 0:
            rounded = rest.to(q_ptr.dtype.element_ty).to(k_pages_ptr.dtype.element_ty)
            tl.store(k_pages_ptr + page_row + 2 * HALF, rounded, mask=rest_mask)
            tl.store(v_pages_ptr + page_row + 2 * HALF, value_rest.to(v_pages_ptr.dtype.element_ty), mask=rest_mask)
