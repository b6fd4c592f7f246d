"""Wrong experts that must be refused: each computes in fp32, with one fault of a kind that real kernels have had."""

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from itertools import count

import torch
from torch import Tensor

from kernels.experts.few_bits.weights import AnyExperts
from kernels.experts.kinds import ClampedSwiglu, ExpertFormat
from kernels.experts.paths import RunExperts
from kernels.experts.shape import AnyExpertActivation, ExpertsShape
from kernels.fused.activation_kind import Activation
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.ungated_kind import Ungated
from kernels.reference.experts import activated_fp64, gate_and_up
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype

_TILE = 32  # rows, and columns of a step


class ExpertsFault(Enum):
    """A fault of a wrong kernel; the comment says how a real kernel comes by it."""

    NONE = "none"  # the checker must pass this one: refusing everything proves nothing either
    EXPERTS_SWAPPED = "two experts are swapped"  # the tile table is off by one behind an expert without rows
    WEIGHT_LEFT_OUT = "a router's weight is left out"  # of the last visit
    TOKENS_DROPPED = (
        "an expert's rows beyond one tile are dropped"  # a capacity, or a grid too small, at extreme shares
    )
    TAIL_ROWS_ZERO = "rows of a tile that is not full are read as zero"  # a mask by whole tiles
    TAIL_COLUMNS_ZERO = "the inner dim's last step, where not full, is read as zero"  # a loop bound rounded down
    TF32 = "products are of inputs rounded to 10 bits"  # TF32 for fp32
    GATE_AND_UP_SWAPPED = "gate and up are swapped"  # the other layout of the checkpoint
    BIAS_IGNORED = "the biases are ignored"
    CLAMP_IGNORED = "the clamp is ignored"
    SQUARE_LEFT_OUT = "the activation without a gate is not squared"  # relu for relu2
    RELU_LEFT_OUT = "the activation without a gate squares what is negative, too"  # a square for relu2
    LOW_PRECISION_SUM = "the sum over a token's experts is kept in 16 bits"  # atomics on the output
    UNSTABLE = "the order of sums differs from run to run"  # atomics
    UNVISITED_READ = "experts that no token visits are weighted with 0"  # 0 * NaN
    STALE_OUTPUT = "the last token's row is not written"  # grid too small
    STRAY_WRITE = "one row past the output is written"  # store without a mask


def trial_shapes(dtype: Dtype) -> tuple[ExpertsShape, ...]:
    """Mixtures of odd sizes on which every fault can show, as small as that allows."""
    rows = TokenRows.LE_128
    return (
        ExpertsShape(dtype, ExpertFormat.PLAIN, 5, 2, 48, 40, Activation.SILU, False, rows),
        ExpertsShape(dtype, ExpertFormat.MXFP4, 7, 3, 96, 32, ClampedSwiglu(), True, rows),
        ExpertsShape(dtype, ExpertFormat.PLAIN, 5, 2, 40, 24, Ungated.RELU2, False, rows),
    )


def can_show_in(fault: ExpertsFault, mixture: ExpertsShape) -> bool:
    """True when experts with this fault compute the mixture wrongly, and so much that its dtype shows it."""
    is_ungated = isinstance(mixture.activation, Ungated)
    needs = {
        ExpertsFault.EXPERTS_SWAPPED: mixture.num_experts > 1,
        ExpertsFault.TAIL_COLUMNS_ZERO: mixture.hidden % _TILE != 0 or mixture.width % _TILE != 0,
        ExpertsFault.TF32: mixture.dtype is Dtype.FP32,
        ExpertsFault.GATE_AND_UP_SWAPPED: not is_ungated,
        ExpertsFault.SQUARE_LEFT_OUT: is_ungated,
        ExpertsFault.RELU_LEFT_OUT: is_ungated,
        ExpertsFault.BIAS_IGNORED: mixture.has_bias,
        ExpertsFault.CLAMP_IGNORED: isinstance(mixture.activation, ClampedSwiglu | CappedSilu),
        # In 16 bits a right path rounds about as much as a sum of a few.
        ExpertsFault.LOW_PRECISION_SUM: mixture.dtype is Dtype.FP32,
        ExpertsFault.UNVISITED_READ: mixture.num_active < mixture.num_experts,
    }
    return needs.get(fault, True)


def wrong_experts(fault: ExpertsFault) -> RunExperts:
    """Experts with this fault. Not for service: they wait for the device."""
    calls = count()

    def run(
        hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: AnyExperts,
        activation: AnyExpertActivation, out: Tensor,
    ) -> None:  # fmt: skip
        if fault is ExpertsFault.WEIGHT_LEFT_OUT:
            weights = torch.cat([weights[:, :-1], torch.ones_like(weights[:, -1:])], dim=1)
        results = torch.zeros(*experts.shape, hidden.shape[1], device=hidden.device)
        for expert, of in _visits(experts, fault):
            tokens, places = (experts == expert).nonzero(as_tuple=True)
            x = hidden[tokens].float()
            if fault is ExpertsFault.TAIL_ROWS_ZERO:
                x[len(x) // _TILE * _TILE :] = 0
            result = _expert(x, of, expert_weights, activation, hidden.dtype, fault)
            if fault is ExpertsFault.TOKENS_DROPPED:
                result[_TILE:] = 0
            results[tokens, places] = result
        weighted = results * weights[:, :, None]
        total = weighted.sum(1)
        if fault is ExpertsFault.UNVISITED_READ:
            unvisited = set(range(expert_weights.num_experts)) - set(experts.flatten().tolist())
            for expert in unvisited:
                total += 0 * _expert(hidden.float(), expert, expert_weights, activation, hidden.dtype, fault)
        if fault is ExpertsFault.LOW_PRECISION_SUM:
            total = torch.zeros_like(total)
            for place in range(experts.shape[1]):
                total = (total + weighted[:, place]).bfloat16().float()
        if fault is ExpertsFault.UNSTABLE:
            total = total * (1 + next(calls) % 2 * 2 * torch.finfo(out.dtype).eps)
        num_rows = len(out) - (fault is ExpertsFault.STALE_OUTPUT)
        out[:num_rows] = total[:num_rows].to(out.dtype)
        if fault is ExpertsFault.STRAY_WRITE:
            out.as_strided((out.stride(0),), (1,), out.storage_offset() + out.numel()).zero_()

    return run


def _visits(experts: Tensor, fault: ExpertsFault) -> Iterator[tuple[int, int]]:
    """(expert that is visited, expert whose weights are taken), for each that is visited."""
    visited = sorted(set(experts.flatten().tolist()))
    if fault is ExpertsFault.EXPERTS_SWAPPED and len(visited) > 1:
        yield visited[0], visited[1]
        yield visited[1], visited[0]
        visited = visited[2:]
    yield from ((expert, expert) for expert in visited)


def _expert(
    x: Tensor,
    expert: int,
    weights: AnyExperts,
    activation: AnyExpertActivation,
    dtype: torch.dtype,
    fault: ExpertsFault,
) -> Tensor:
    """[n, H] fp32 of x [n, H] fp32."""
    gate_up, down = (part.float() for part in weights.of(expert, dtype))
    biases = [None if bias is None else bias[expert].float() for bias in (weights.gate_up_bias, weights.down_bias)]
    if fault is ExpertsFault.BIAS_IGNORED:
        biases = [None, None]
    products = _product(x, gate_up, fault)
    products = products if biases[0] is None else products + biases[0]
    gate, up = gate_and_up(products, activation)
    if fault is ExpertsFault.GATE_AND_UP_SWAPPED:
        gate, up = up, gate
    if fault is ExpertsFault.CLAMP_IGNORED and isinstance(activation, ClampedSwiglu | CappedSilu):
        activation = replace(activation, limit=float("inf"))
    inner = activated_fp64(gate, up, activation)
    if fault is ExpertsFault.SQUARE_LEFT_OUT:
        inner = gate.clamp(min=0)
    if fault is ExpertsFault.RELU_LEFT_OUT:
        inner = gate.square()
    result = _product(inner, down, fault)
    return result if biases[1] is None else result + biases[1]


def _product(x: Tensor, weight: Tensor, fault: ExpertsFault) -> Tensor:
    if fault is ExpertsFault.TAIL_COLUMNS_ZERO:
        size = x.shape[1] // _TILE * _TILE
        x, weight = x[:, :size], weight[:, :size]
    if fault is ExpertsFault.TF32:
        x, weight = _to_10_bits(x), _to_10_bits(weight)
    return x @ weight.T


def _to_10_bits(x: Tensor) -> Tensor:
    """fp32 rounded to TF32's mantissa."""
    return ((x.contiguous().view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)
