"""Paths whose bits depend on the batch, which the check of an order must refuse: right numbers, in a changing order.

Sums of parts are exact in fp64 (the inputs are rounded to few bits first) and then rounded to fp32, so that nothing but
the order of the fold and the borders of the parts is in the bits, on any processor.
"""

from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from typing import TypedDict

import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.calls.rows import keys_of, sequences_of, visible
from kernels.collective.peers import AddNorm
from kernels.collective.shape import CollectiveShape, Follows
from kernels.convolution.calls import ConvolutionState, ConvolutionWeights, RunConvolution
from kernels.convolution.eager_path import run_convolution_eager
from kernels.convolution.shape import ConvolutionShape
from kernels.convolution.sizes import ConvolutionSizes
from kernels.experts.few_bits.weights import AnyExperts
from kernels.experts.kinds import ExpertActivation, ExpertFormat
from kernels.experts.paths import RunExperts
from kernels.experts.shape import ExpertsShape
from kernels.fused.activation_kind import Activation
from kernels.linear.epilogue import Epilogue
from kernels.linear.paths import RunLinear
from kernels.linear.shape import LinearShape
from kernels.linear.weights import LinearWeight
from kernels.recurrence.calls import RecurrenceRows, RecurrenceState, RecurrenceWeights, RunRecurrence
from kernels.recurrence.eager_path import run_recurrence_eager
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import CHUNK, RecurrenceSizes
from kernels.reference.experts import activated_fp64
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import RunAttention
from kernels.vocabulary.recurrence_operator import CONVOLUTION, RECURRENCE
from kernels.vocabulary.row_buckets import LinearRows, TokenRows
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase
from kernels.vocabulary.value_shape import Values, values_of, with_values
from qualification.evidence.evidence import Invariance
from qualification.measure.checks.checked import one_thread
from qualification.measure.inputs.collective_inputs import CollectiveCase
from qualification.measure.orders.attention_order import check_attention_order
from qualification.measure.orders.collective_order import check_collective_order
from qualification.measure.orders.convolution_order import check_convolution_order
from qualification.measure.orders.experts_order import check_experts_order
from qualification.measure.orders.linear_order import check_linear_order
from qualification.measure.orders.recurrence_order import check_recurrence_order

TRIED = "tried"  # the order that these paths claim
_STEP = 16  # numbers of a part of an inner dim
_KEYS = 16  # of a part of a context
_TILE = 16  # rows
_ONE_COUNT = 5  # rows, or sequences of decode, that the other algorithm computes
_MANY_QUERIES = 300  # rows of a batch of prompts from which the other algorithm computes
_FIXED = 2.0**20  # inputs are multiples of 1 / _FIXED, at most _MOST: parts of sums are then exact in fp64
_MOST = 8.0
_SCALES = 2.0**6  # steps of a row's largest number in which it is rounded, where a scale is read


class OrderFault(Enum):
    """A way in which the bits of a row come to depend on the batch; the comment says how a real kernel comes by it."""

    NONE = "none"  # the check must pass this one: refusing everything proves nothing either
    PARTS_OF_BATCH = "parts are cut by the batch's total"  # splits for so many programs as the GPU has
    AS_THEY_ARRIVE = "parts are added as they arrive"  # atomics
    OTHER_AT_ONE_COUNT = "one number of rows is summed by another algorithm"  # a heuristic of a library
    NEIGHBOUR_SCALE = "a row is rounded by its neighbour's scale"  # one scale of a tile, or an index that is off by one
    PLACE_IN_TILE = "a row's place in its tile changes its sum"  # lanes that fold otherwise
    OTHER_FOLD = "parts are folded in another order"  # right by itself, but not the order of the other paths


@dataclass(frozen=True, slots=True)
class OrderPassedWrongly:
    """A fault that the check of an order passed, or a right path that it refused."""

    fault: OrderFault
    shape: object


class _How(TypedDict):
    seed: int
    order: str
    ends_early: bool


def can_show_in(fault: OrderFault, operator: Operator) -> bool:
    """Return whether paths of the operator can have the fault: a sum over ranks has a part a rank, and no scales."""
    without = {OrderFault.PARTS_OF_BATCH, OrderFault.NEIGHBOUR_SCALE}
    return operator is not Operator.COLLECTIVE or fault not in without


def orders_passed_wrongly(
    operator: Operator, dtypes: frozenset[Dtype], device: torch.device, *, seed: int
) -> tuple[OrderPassedWrongly, ...]:
    """Try the check on every fault, and on none; empty when it judges all of them right."""
    found = []
    with one_thread():
        for dtype in (dtype for dtype in Dtype if dtype in dtypes):
            anchors: dict[tuple[Values | None, str], str] = {}
            for shape in trial_shapes(operator, dtype):
                is_first = not anchors
                right = seen_of(OrderFault.NONE, shape, device, seed=seed)
                of = values_of(shape) if isinstance(shape, AttentionShape) else None
                differs = any(anchors.setdefault((of, name), digest) != digest for name, digest in right.digests)
                if differs or not right.is_passed:
                    found.append(OrderPassedWrongly(OrderFault.NONE, shape))
                for fault in (fault for fault in OrderFault if can_show_in(fault, operator)):
                    # Another order shows in the digests alone, which takes all batches: it is tried on one phase.
                    if fault is OrderFault.NONE or (fault is OrderFault.OTHER_FOLD and not is_first):
                        continue
                    seen = seen_of(fault, shape, device, seed=seed, ends_early=True)
                    if seen.is_passed and seen.digests == right.digests:
                        found.append(OrderPassedWrongly(fault, shape))
    return tuple(found)


def trial_shapes(operator: Operator, dtype: Dtype) -> tuple[object, ...]:
    """Return shapes of one class, as small as lets every fault show: phases of attention, else one bucket of rows.

    Of attention one of latents is beside them, whose inputs are others.
    """
    if operator is Operator.ATTENTION:
        prefill = AttentionShape(Phase.PREFILL, dtype, dtype, 4, 2, 16, Bucket.LE_512, Bucket.LE_512)
        extend = replace(prefill, phase=Phase.EXTEND, query_bucket=Bucket.LE_128, page_size=16)
        decode = replace(extend, phase=Phase.DECODE, context_bucket=Bucket.LE_128)
        latent = replace(decode, num_kv_heads=1, head_dim=48)
        return prefill, extend, decode, with_values(latent, Values(40, is_latent=True))
    if operator is Operator.LINEAR:
        return (LinearShape(dtype, 320, 384, LinearRows.LE_8),)
    if operator is Operator.EXPERTS:
        return (ExpertsShape(dtype, ExpertFormat.PLAIN, 4, 3, 64, 48, Activation.SILU, False, TokenRows.LE_16),)
    if operator is RECURRENCE:
        sizes = RecurrenceSizes(1, 2, 8, 8, 4)
        return (
            RecurrenceShape.of(sizes, Phase.EXTEND, dtype, Dtype.FP32, TokenRows.LE_512),
            RecurrenceShape.of(sizes, Phase.DECODE, dtype, Dtype.FP32, TokenRows.LE_16),
        )
    if operator is CONVOLUTION:
        of_convolution = ConvolutionSizes(12, 4, has_bias=True)
        return (
            ConvolutionShape.of(of_convolution, Phase.EXTEND, dtype, TokenRows.LE_512),
            ConvolutionShape.of(of_convolution, Phase.DECODE, dtype, TokenRows.LE_16),
        )
    return (CollectiveShape(dtype, 96, 4, Follows.NOTHING, TokenRows.LE_16),)


def seen_of(
    fault: OrderFault, shape: object, device: torch.device, *, seed: int, ends_early: bool = False
) -> Invariance:
    """Return what the check of an order sees of a path with this fault. Raises TypeError for no shape of ours.

    ends_early  whether the first value that changes is enough
    """
    how: _How = {"seed": seed, "order": TRIED, "ends_early": ends_early}
    match shape:
        case AttentionShape():
            return check_attention_order(variant_attention(fault), shape, device, **how)
        case LinearShape():
            return check_linear_order([variant_linear(fault)], shape, device, takes_strides=True, **how)
        case ExpertsShape():
            return check_experts_order(variant_experts(fault), shape, device, **how)
        case CollectiveShape():
            return check_collective_order(VariantRanks(fault), shape, device, **how)
        case RecurrenceShape():
            return check_recurrence_order(variant_recurrence(fault), shape, device, is_trial=True, **how)
        case ConvolutionShape():
            return check_convolution_order(variant_convolution(fault), shape, device, **how)
    raise TypeError(f"{shape!r} is no shape of an operator")


def variant_linear(fault: OrderFault) -> RunLinear:
    """Products with this fault, summed in parts of 16 along the inner dim. Not for service: it waits for the device."""
    calls = count()

    def run(x: Tensor, weight: LinearWeight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
        assert epilogue is not Epilogue.SWIGLU, "no trial needs it"
        sums = _product(x, weight.dequantized(), fault, next(calls), num_rows=x.shape[0])
        out.copy_(sums if bias is None else sums + bias.float())

    return run


def variant_recurrence(fault: OrderFault) -> RunRecurrence:
    """A recurrence with this fault, by which a result moves by one step of its dtype. Not for service."""
    calls = count()

    def run(
        qkv: Tensor, a: Tensor, b: Tensor, weights: RecurrenceWeights, rows: RecurrenceRows, state: RecurrenceState,
        out: Tensor,
    ) -> None:  # fmt: skip
        run_recurrence_eager(qkv, a, b, weights, rows, state, out)
        _move(fault, next(calls), rows, qkv, out)

    return run


def variant_convolution(fault: OrderFault) -> RunConvolution:
    """A convolution with this fault, by which a result moves by one step of its dtype. Not for service."""
    calls = count()

    def run(
        projected: Tensor, weights: ConvolutionWeights, rows: RecurrenceRows, state: ConvolutionState, out: Tensor
    ) -> None:
        run_convolution_eager(projected, weights, rows, state, out)
        _move(fault, next(calls), rows, projected, out)

    return run


def _move(fault: OrderFault, call: int, rows: RecurrenceRows, read: Tensor, out: Tensor) -> None:
    """Move results [T, ...] of a call, the `call`-th, by one step of their dtype where the fault has other bits."""
    places = torch.arange(out.shape[0], device=out.device)
    starts, stops, firsts = rows.starts.tolist(), rows.stops.tolist(), rows.firsts.tolist()
    cut = torch.zeros_like(places, dtype=torch.bool)  # rows whose chunks would begin elsewhere were they relative
    beside = torch.zeros_like(cut)
    for index, (start, stop, first) in enumerate(zip(starts, stops, firsts, strict=True)):
        cut[start:stop] = first % CHUNK != 0
        other = slice(starts[index - 1], stops[index - 1])
        beside[start:stop] = len(starts) > 4 and bool((read[other].abs() > 1).any())
    moved = {
        OrderFault.PARTS_OF_BATCH: cut,
        OrderFault.AS_THEY_ARRIVE: torch.full_like(cut, call % 3 == 1),
        OrderFault.OTHER_AT_ONE_COUNT: torch.full_like(cut, sum(map(int.__lt__, starts, stops)) == _ONE_COUNT),
        OrderFault.NEIGHBOUR_SCALE: beside,
        OrderFault.PLACE_IN_TILE: places % _TILE == 3,
        OrderFault.OTHER_FOLD: torch.ones_like(cut),
    }.get(fault, torch.zeros_like(cut))
    bits = out.view(torch.int32 if out.element_size() == 4 else torch.int16)
    bits += (moved.view(-1, *[1] * (out.dim() - 1)) & (out != 0)).to(bits.dtype)


def variant_experts(fault: OrderFault) -> RunExperts:
    """Experts with this fault, each expert's tokens in turn. Not for service: they wait for the device."""
    calls = count()

    def run(
        hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: AnyExperts,
        activation: ExpertActivation, out: Tensor,
    ) -> None:  # fmt: skip
        call, num_rows = next(calls), hidden.shape[0]
        results = torch.zeros(*experts.shape, hidden.shape[1], device=hidden.device)
        for expert in sorted(set(experts.flatten().tolist())):
            tokens, places = (experts == expert).nonzero(as_tuple=True)
            gate_up, down = expert_weights.of(expert, hidden.dtype)
            gate, up = _product(hidden[tokens], gate_up, fault, call, num_rows=num_rows).double().chunk(2, dim=-1)
            middle = activated_fp64(gate, up, activation)
            results[tokens, places] = _product(middle, down, fault, call, num_rows=num_rows)
        weighted = results * weights[:, :, None]
        order = list(range(experts.shape[1]))
        if fault is OrderFault.AS_THEY_ARRIVE:
            order = order[call % len(order) :] + order[: call % len(order)]
        if fault is OrderFault.OTHER_FOLD:
            order.reverse()
        total = weighted[:, order[0]]
        for place in order[1:]:
            total = total + weighted[:, place]
        out.copy_(total)

    return run


def variant_attention(fault: OrderFault) -> RunAttention:
    """Attention with this fault, in parts of 64 keys from the first on. Not for service: it waits for the device."""
    calls = count()
    weight_of = torch.exp(-torch.arange(2**13) / 2.0**8).double().mul(2**20).round().div(2**20)

    def run(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        call, table = next(calls), weight_of.to(q.device)
        sequences = [sequence for sequence in sequences_of(batch) if sequence.num_queries]
        part = _KEYS
        if fault is OrderFault.PARTS_OF_BATCH:
            part = max(8, sum(sequence.num_keys for sequence in sequences) // 16)
        is_other = batch.num_seqs == _ONE_COUNT if batch.max_seqlen_q == 1 else q.shape[0] > _MANY_QUERIES
        queries = _rounded(q, fault)
        for sequence in sequences:
            rows = torch.arange(sequence.start, sequence.end, device=q.device)
            keys, values = (_fixed(keys_of(it, batch, sequence)) for it in (k, v))
            group = q.shape[1] // keys.shape[1]
            keys, values = (it.repeat_interleave(group, dim=1).transpose(0, 1) for it in (keys, values))
            scores = queries[rows].transpose(0, 1) @ keys.transpose(1, 2) * flags.scale
            places = (8 - scores).mul(2**8).round().nan_to_num(2**13).clamp(0, 2**13 - 1).long()
            positions = sequence.num_keys - sequence.num_queries + torch.arange(len(rows), device=q.device)
            seen = visible(positions, torch.arange(sequence.num_keys, device=q.device), flags, None)
            weights = table[places] * seen
            ones = torch.ones(*values.shape[:2], 1, dtype=values.dtype, device=q.device)
            with_total = torch.cat([values.nan_to_num(0.0), ones], dim=2)
            parts = [
                (weights[:, :, start : start + part] @ with_total[:, start : start + part]).float()
                for start in range(0, sequence.num_keys, part)
            ]
            folded = _folded(torch.stack(parts, dim=2).transpose(0, 1), rows, fault, call, is_other=is_other)
            out[rows] = (folded[..., :-1] / folded[..., -1:].clamp(min=1e-30)).to(out.dtype)

    return run


class VariantRanks:
    """Sums over ranks with this fault, as `RunOnRanks`."""

    def __init__(self, fault: OrderFault) -> None:
        self._fault = fault
        self._calls = count()

    def __call__(self, case: CollectiveCase, _part: Tensor, _follows: AddNorm | None, out: Tensor) -> None:
        rows = torch.arange(out.shape[0], device=out.device)
        parts = case.parts.float().transpose(0, 1)[:, None]  # [rows, 1, ranks, columns]
        folded = _folded(parts, rows, self._fault, next(self._calls), is_other=out.shape[0] == _ONE_COUNT)
        out.copy_(folded[:, 0])

    def everywhere(self, own: Tensor) -> Tensor:
        return own[None]


def _product(x: Tensor, weight: Tensor, fault: OrderFault, call: int, *, num_rows: int) -> Tensor:
    """[rows, weight rows] fp32. num_rows: of the whole call."""
    step = _STEP
    if fault is OrderFault.PARTS_OF_BATCH:
        step = _STEP * (1 + (num_rows + 1) // 2 % 3)
    x, weight = _rounded(x, fault), _fixed(weight)
    starts = range(0, x.shape[1], step)
    parts = torch.stack([(x[:, it : it + step] @ weight[:, it : it + step].T).float() for it in starts], dim=1)
    rows = torch.arange(x.shape[0], device=x.device)
    return _folded(parts[:, None], rows, fault, call, is_other=num_rows == _ONE_COUNT)[:, 0]


def _folded(parts: Tensor, rows: Tensor, fault: OrderFault, call: int, *, is_other: bool) -> Tensor:
    """Return [rows, heads, columns] fp32 of parts [rows, heads, parts, columns], added one after the other.

    rows  [rows] their places in the batch
    """
    num_parts = parts.shape[2]
    order = torch.arange(num_parts, device=parts.device)
    if fault is OrderFault.AS_THEY_ARRIVE:
        order = order.roll(call % num_parts)
    if fault is OrderFault.OTHER_FOLD or (fault is OrderFault.OTHER_AT_ONE_COUNT and is_other):
        order = order.flip(0)
    total = _added(parts, order)
    if fault is OrderFault.PLACE_IN_TILE:
        backwards = _added(parts, order.flip(0))
        total = torch.where((rows % _TILE % 2 == 1)[:, None, None], backwards, total)
    return total


def _added(parts: Tensor, order: Tensor) -> Tensor:
    first, *others = order.tolist()
    total = parts[:, :, first]
    for place in others:
        total = total + parts[:, :, place]
    return total


def _fixed(values: Tensor) -> Tensor:
    """Round to multiples of 2^-20 in fp64; NaN stays NaN."""
    return values.double().clamp(-_MOST, _MOST).mul(_FIXED).round() / _FIXED


def _rounded(values: Tensor, fault: OrderFault) -> Tensor:
    """[rows, ...] in fp64. With NEIGHBOUR_SCALE in steps of the largest number of the next row of the pair."""
    fixed = _fixed(values)
    if fault is not OrderFault.NEIGHBOUR_SCALE:
        return fixed
    rows = torch.arange(values.shape[0], device=values.device)
    neighbour = (rows ^ 1).clamp(max=max(0, values.shape[0] - 1))
    largest = fixed.abs().flatten(1).amax(1)[neighbour].nan_to_num(1.0).clamp(min=1 / _FIXED)
    step = (2.0 ** largest.log2().ceil() / _SCALES).view(-1, *[1] * (values.dim() - 1))
    return (fixed / step).round() * step
