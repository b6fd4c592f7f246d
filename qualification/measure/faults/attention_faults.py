"""Kernels that must be refused. A checker that passes one of them proves nothing, so a qualification starts with them.

Each is plain attention in fp32 with one fault of a kind that real kernels have had.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.rows import SequenceRows, keys_of, sequences_of, visible
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.path import RunAttention
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Dtype, Mask, Phase
from kernels.vocabulary.value_shape import Values, values_of, with_values
from qualification.measure.checks.attention_checks import check_path
from qualification.measure.checks.checked import one_thread
from qualification.measure.checks.references import References
from qualification.measure.inputs.attention_inputs import Case, cases, many_case
from qualification.measure.inputs.far_pages import far_cases

_TILE = 64  # keys
_ROWS = 8  # of one head: what ONE_TILE spoils
_MANY_SEQS, _MANY_TOKENS, _MANY_HEADS = 420, 3 * _ROWS, 8  # 10,080 tiles, a third of them between the rows drawn


class Fault(Enum):
    """A fault of a wrong kernel; the comment says how a real kernel comes by it."""

    NONE = "none"  # the checker must pass this one: refusing everything proves nothing either
    FUTURE_KEY = "mask off by one, a query sees the next key"  # <= for <
    MISSING_KEY = "mask off by one, a query misses its own key"
    LAST_TILE_SKIPPED = "the last tile of keys is skipped"  # loop bound rounded down
    STALE_OUTPUT = "the last sequence's rows are not written"  # grid too small
    NAN_ROW = "one row is NaN"  # 0 / 0 in a row of a masked tile
    WRONG_KV_HEAD = "query heads read the wrong KV head"  # head % kv_heads for head // group
    WINDOW_OFF_BY_ONE = "the window is one key too wide"
    SOFTCAP_IGNORED = "the softcap is ignored"
    SINKS_IGNORED = "the sinks are ignored"
    SPANS_IGNORED = "an image's tokens see only those before them"
    TAIL_READ = "values past the end are weighted with 0"  # 0 * NaN: scores masked, values not
    LOW_PRECISION = "sums are kept in 16 bits, key by key"
    UNSTABLE = "the order of sums differs from run to run"  # atomics
    STRAY_WRITE = "one row past the output is written"  # store without a mask
    ONE_TILE = "one tile in 10,000 misses some keys"  # a race that is lost once
    ONE_ROW = "one row of one head is off by 1e-3, in 16 bits by 4 eps"  # a stale value of the row's sum
    SCALED = "the whole output is off by 1e-3"  # a reciprocal by an approximation that is too coarse
    SCALE_IGNORED = "scores are divided by the root of head_dim, whatever scale is given"  # models have other scales
    COARSE_SCORES = "scores are of inputs rounded to 10 bits"  # TF32 for fp32
    STRIDES_OF_KEYS = "values are read by the strides of keys"  # one set of strides for both
    SCALE_OF_VALUES = "scores are scaled by the size of a value"  # the last size of the wrong tensor
    PAGES_IN_32_BITS = "the offset of a page is computed in 32 bits"  # a page number and a stride are both int32


@dataclass(frozen=True, slots=True)
class PassedWrongly:
    """A fault that no check refused, or a right kernel that one did."""

    fault: Fault
    shape: AttentionShape


def wrong_kernel(fault: Fault, *, share: float = 1.0) -> RunAttention:
    """Attention with this fault. Not for service: it waits for the device and writes its scores out.

    share: of the size of a fault that has one, ONE_ROW and SCALED
    """
    calls = iter(range(10**9))
    size = 1e-3 * share

    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        sequences = [sequence for sequence in sequences_of(batch) if sequence.num_queries]
        if fault is Fault.STRIDES_OF_KEYS:
            v = _by_strides_of(k, v)
        elif fault is Fault.SCALE_OF_VALUES:
            flags = replace(flags, scale=v.shape[-1] ** -0.5)
        elif fault is Fault.PAGES_IN_32_BITS:
            k, v, batch = _in_32_bits(k, v, batch)
        for sequence in sequences[:-1] if fault is Fault.STALE_OUTPUT and len(sequences) > 1 else sequences:
            keys, values = keys_of(k, batch, sequence), keys_of(v, batch, sequence)
            if fault is Fault.TAIL_READ and sequence.num_keys % _TILE:
                keys, values = (_with_tail(part, value) for part, value in ((keys, 0.0), (values, torch.nan)))
            rows = slice(sequence.start, sequence.end)
            whole = Fault.NONE if fault is Fault.ONE_TILE else fault
            queries, keys = q[rows].float(), keys.float()
            if fault is Fault.COARSE_SCORES:
                queries, keys = _to_10_bits(queries), _to_10_bits(keys)
            of_call = replace(flags, scale=q.shape[-1] ** -0.5) if fault is Fault.SCALE_IGNORED else flags
            attended = _attend(queries, keys, values.float(), sequence, of_call, whole)
            out[rows] = (attended * (1 + size) if fault is Fault.SCALED else attended).to(out.dtype)
        _spoil(fault, out, next(calls), size)
        if fault is Fault.ONE_TILE:
            spoil_tile(q, k, v, batch, flags, out)

    return run


def spoil_tile(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
    """Compute 8 rows of one head of a right `out` [tokens, heads, head_dim] again, without every eighth key."""
    sequences = [sequence for sequence in sequences_of(batch) if sequence.num_queries]
    if not sequences:
        return
    sequence = sequences[len(sequences) // 2]
    keys, values = keys_of(k, batch, sequence).float(), keys_of(v, batch, sequence).float()
    rows = slice(min(sequence.start + _ROWS, sequence.end - 1), min(sequence.start + 2 * _ROWS, sequence.end))
    head = q.shape[1] // 2
    attended = _attend(q[sequence.start : sequence.end].float(), keys, values, sequence, flags, Fault.ONE_TILE)
    out[rows, head] = attended[rows.start - sequence.start : rows.stop - sequence.start, head].to(out.dtype)


def _with_tail(part: Tensor, value: float) -> Tensor:
    """One more key, as a kernel that does not mask its last tile loads it."""
    return torch.cat([part, torch.full_like(part[:1], value)])


def _by_strides_of(k: Tensor, v: Tensor) -> Tensor:
    """Return values as they lie where keys of the same places would, from the first one on again past the last one."""
    places = torch.arange(k.numel(), device=k.device).view(k.shape)[..., : v.shape[-1]]
    return v.flatten()[places % v.numel()]


def _in_32_bits(k: Tensor, v: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor, AttentionBatch]:
    """Return the pages that are found where offsets wrap, one for each entry of the page table, and that table."""
    assert batch.page_table is not None, "offsets are of pages"
    numbers, found = batch.page_table.flatten().long(), []
    for pages in (k, v):
        starts = numbers * pages.stride(0)
        starts = (starts + 2**31) % 2**32 - 2**31
        inside = torch.arange(pages.shape[1] * pages.stride(1), device=pages.device)
        content = pages.as_strided((pages.shape[0] * pages.stride(0),), (1,))[starts[:, None] + inside]
        found.append(content.as_strided((len(numbers), *pages.shape[1:]), (content.stride(0), *pages.stride()[1:])))
    table = torch.arange(len(numbers), dtype=torch.int32, device=k.device).view_as(batch.page_table)
    return found[0], found[1], replace(batch, page_table=table)


def _to_10_bits(x: Tensor) -> Tensor:
    """fp32 rounded to TF32's mantissa."""
    return ((x.contiguous().view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)


def _spoil(fault: Fault, out: Tensor, call: int, size: float) -> None:
    if fault is Fault.NAN_ROW:
        out[out.shape[0] // 2] = torch.nan
    elif fault is Fault.UNSTABLE:
        out[-1] *= 1 + (call % 2) * 2 * torch.finfo(out.dtype).eps
    elif fault is Fault.ONE_ROW and out.shape[0]:
        factor = 1 + (size if out.dtype is torch.float32 else size / 1e-3 * 4 * torch.finfo(out.dtype).eps)
        row = out[min(out.shape[0] // 2 + 3, out.shape[0] - 1), out.shape[1] // 2]
        row.copy_(row.double() * factor)
    elif fault is Fault.STRAY_WRITE:
        end = out.storage_offset() + out.numel()
        out.as_strided((out.stride(0),), (1,), end).zero_()


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, sequence: SequenceRows, flags: AttentionFlags, fault: Fault
) -> Tensor:
    """One sequence: [queries, heads, head_dim] fp32."""
    num_heads, num_kv_heads = q.shape[1], keys.shape[1]
    head = torch.arange(num_heads, device=q.device)
    source = head % num_kv_heads if fault is Fault.WRONG_KV_HEAD else head // (num_heads // num_kv_heads)
    keys, values = keys[:, source].transpose(0, 1), values[:, source].transpose(0, 1)
    scores = (q * flags.scale).transpose(0, 1) @ keys.transpose(1, 2)  # [heads, queries, keys]
    if flags.softcap is not None and fault is not Fault.SOFTCAP_IGNORED:
        scores = flags.softcap * torch.tanh(scores / flags.softcap)
    scores = scores.masked_fill(~_seen(sequence, keys.shape[1], flags, fault, q.device), -torch.inf)
    largest = scores.amax(dim=-1, keepdim=True).clamp(min=-1e30)
    weights = torch.exp(scores - largest)
    sinks = None if fault is Fault.SINKS_IGNORED else flags.sinks
    extra = torch.zeros_like(largest) if sinks is None else torch.exp(sinks[:, None, None] - largest)
    if fault is Fault.LOW_PRECISION:
        out = _low_precision_sums(weights, values, extra)
    else:
        total = weights.sum(dim=-1, keepdim=True) + extra
        out = (weights @ values) / total.clamp(min=1e-30)
    return out.transpose(0, 1)


def _seen(sequence: SequenceRows, num_keys: int, flags: AttentionFlags, fault: Fault, device: torch.device) -> Tensor:
    """The mask with its fault: bool [queries, num_keys]; keys past the sequence's own are never seen."""
    positions = sequence.num_keys - sequence.num_queries + torch.arange(sequence.num_queries, device=device)
    key_positions = torch.arange(num_keys, device=device)
    shift = {Fault.FUTURE_KEY: 1, Fault.MISSING_KEY: -1}.get(fault, 0)
    if fault is Fault.WINDOW_OFF_BY_ONE and flags.window is not None:
        flags = replace(flags, window=flags.window + 1)
    spans = None if flags.spans is None else flags.spans[sequence.start : sequence.end]
    if fault is Fault.SPANS_IGNORED:
        spans = None
    seen = visible(positions + shift, key_positions, flags, spans) & (key_positions < sequence.num_keys)
    if fault is Fault.LAST_TILE_SKIPPED and sequence.num_keys > _TILE:
        seen = seen & (key_positions < (sequence.num_keys - 1) // _TILE * _TILE)
    if fault is Fault.ONE_TILE:
        seen = seen & (key_positions % 8 != 0)
    return seen


def _low_precision_sums(weights: Tensor, values: Tensor, total: Tensor) -> Tensor:
    """Weights times values and the weights' sum, key by key in bf16."""
    sums = torch.zeros(*weights.shape[:2], values.shape[-1], dtype=torch.bfloat16, device=values.device)
    total = total.bfloat16()
    for key in range(weights.shape[-1]):
        weight = weights[:, :, key, None]
        sums = (sums.float() + weight * values[:, None, key]).bfloat16()
        total = (total.float() + weight).bfloat16()
    return sums.float() / total.float().clamp(min=1e-30)


def trial_shapes(dtype: Dtype) -> tuple[AttentionShape, ...]:
    """A shape of each phase on which every fault can show, as small as that allows; prompts with images among them."""
    return tuple(
        AttentionShape(
            phase=phase,
            dtype=dtype,
            kv_dtype=dtype,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            query_bucket=Bucket.LE_128,
            context_bucket=Bucket.LE_128 if phase is Phase.PREFILL else Bucket.LE_512,
            page_size=None if phase is Phase.PREFILL else 16,
            window=48,
            softcap=20.0,
            sinks=True,
            mask=Mask.CAUSAL if phase is Phase.DECODE else Mask.SPANS,
        )
        for phase in PLANNED_PHASES
    )


def narrow_trial_shapes(dtype: Dtype) -> tuple[AttentionShape, ...]:
    """The same of values that have fewer numbers than keys, packed and in pages."""
    return tuple(with_values(it, Values(48)) for it in trial_shapes(dtype) if it.phase is not Phase.EXTEND)


def can_show(fault: Fault, shape: AttentionShape) -> bool:
    """True when a kernel with this fault computes the shape wrongly, and so much that the shape's dtype shows it."""
    has_own_values = (values := values_of(shape)) is not None and not values.is_latent
    needs = {
        # The one query of a sequence in decode sees its last key: without a window there is no key after it.
        Fault.FUTURE_KEY: shape.phase is not Phase.DECODE or shape.window is not None,
        Fault.SPANS_IGNORED: shape.mask is Mask.SPANS,
        Fault.WINDOW_OFF_BY_ONE: shape.window is not None,
        Fault.SOFTCAP_IGNORED: shape.softcap is not None,
        Fault.SINKS_IGNORED: shape.sinks,
        Fault.WRONG_KV_HEAD: 1 < shape.num_kv_heads < shape.num_heads,
        Fault.COARSE_SCORES: shape.dtype is Dtype.FP32,
        Fault.STRIDES_OF_KEYS: has_own_values,
        Fault.SCALE_OF_VALUES: has_own_values,
        Fault.PAGES_IN_32_BITS: shape.page_size is not None,
    }
    return needs.get(fault, True)


def passed_wrongly(
    dtypes: frozenset[Dtype],
    device: torch.device,
    *,
    check: Callable[[RunAttention, list[Case]], bool] | None = None,
    seed: int = 0,
) -> tuple[PassedWrongly, ...]:
    """Try the checker on every fault, and on none. Empty when it refuses all that is wrong and passes what is right.

    `check` answers whether a kernel passes; by default it is the checker of a qualification.
    """
    found = []
    with one_thread():
        for shape in chain.from_iterable(trial_shapes(dtype) for dtype in Dtype if dtype in dtypes):
            found += _of_shape(shape, device, check, seed)
        for dtype in (dtype for dtype in Dtype if dtype in dtypes):
            many = trial_of_many_tiles(dtype, device, seed=seed)
            passes = check or partial(_passes, References())
            for fault in (Fault.NONE, Fault.ONE_TILE, Fault.ONE_ROW):
                if passes(wrong_kernel(fault), [many]) is not (fault is Fault.NONE):
                    found.append(PassedWrongly(fault, _many_shape(dtype)))
    return tuple(found)


def narrow_passed_wrongly(
    dtypes: frozenset[Dtype], device: torch.device, *, seed: int = 0
) -> tuple[PassedWrongly, ...]:
    """Try the checker likewise on values that have fewer numbers than keys."""
    with one_thread():
        shapes = chain.from_iterable(narrow_trial_shapes(dtype) for dtype in Dtype if dtype in dtypes)
        return tuple(it for shape in shapes for it in _of_shape(shape, device, None, seed))


def _of_shape(
    shape: AttentionShape, device: torch.device, check: Callable[[RunAttention, list[Case]], bool] | None, seed: int
) -> list[PassedWrongly]:
    inputs, far = list(cases(shape, device, seed=seed)), list(far_cases(shape, device, seed=seed + 7))
    tried = {Fault.NONE: inputs + far, Fault.PAGES_IN_32_BITS: far}  # which shows nowhere else
    passes = check or partial(_passes, References())
    faults = [it for it in Fault if can_show(it, shape) and tried.get(it, inputs)]
    return [
        PassedWrongly(it, shape)
        for it in faults
        if passes(wrong_kernel(it), tried.get(it, inputs)) is not (it is Fault.NONE)
    ]


def trial_of_many_tiles(dtype: Dtype, device: torch.device, *, seed: int = 0) -> Case:
    """Plain prompts of 10,080 tiles: what is tried on them is how much of an output is looked at."""
    return many_case(_many_shape(dtype), device, seed=seed, num_seqs=_MANY_SEQS, num_tokens=_MANY_TOKENS)


def _many_shape(dtype: Dtype) -> AttentionShape:
    prefill = trial_shapes(dtype)[0]
    return replace(prefill, num_heads=_MANY_HEADS, window=None, softcap=None, sinks=False, mask=Mask.CAUSAL)


def _passes(references: References, run: RunAttention, inputs: list[Case]) -> bool:
    return all(check.is_passed for case in inputs for check in check_path(run, [case], references))
