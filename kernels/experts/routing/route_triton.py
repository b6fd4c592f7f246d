"""Routing on the device in one launch: scores, the best groups, the best experts, their weights."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.kinds import RoutingConfig, Scores
from kernels.experts.routing.dependent import begin, launches_ahead
from kernels.experts.tiles import padded
from kernels.fused.backend import Aligned, Loaded, prepare
from kernels.fused.sigmoid import sigmoid

_LEAST_SUM = tl.constexpr(1e-20)  # added to the sum of sigmoid scores, as in DeepSeek V3
_TAKEN = tl.constexpr(-(2**31))  # below the key of every number


@triton.jit
def order_key(x):
    """int32 keys in the order of the fp32 numbers x; both zeros have one key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def first_largest(keys, lanes, COUNT: tl.constexpr):
    """The lowest lane with the largest key; below COUNT, whatever the keys are."""
    return tl.minimum(tl.min(tl.where(keys == tl.max(keys), lanes, COUNT)), COUNT - 1)


@triton.jit
def hallmark_experts_route(
    logits_ptr, bias_ptr, scales_ptr, weights_ptr, experts_ptr, stride_logits, scale,
    NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, NUM_ACTIVE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_ACTIVE_GROUPS: tl.constexpr, IS_SOFTMAX: tl.constexpr, RENORMALIZES: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program: one token. Of equal experts, and of equal groups, the lower index goes first."""
    begin(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_E)
    is_expert = lanes < NUM_EXPERTS
    logits = tl.load(logits_ptr + token * stride_logits + lanes, mask=is_expert, other=float("-inf")).to(tl.float32)
    NUM_PLACES: tl.constexpr = NUM_ACTIVE + HAS_GATE
    if HAS_GATE:
        gate = tl.load(logits_ptr + token * stride_logits + NUM_EXPERTS).to(tl.float32)
        tl.store(weights_ptr + token * NUM_PLACES + NUM_ACTIVE, sigmoid(gate))
        tl.store(experts_ptr + token * NUM_PLACES + NUM_ACTIVE, NUM_EXPERTS)
    if IS_SOFTMAX:
        powers = tl.exp(logits - tl.max(logits))
        scores = powers / tl.sum(powers)
    else:
        scores = sigmoid(logits)
    # Where nothing but their order counts, logits: scores that are nearly 0 or 1 are equal when rounded.
    choice = logits
    if HAS_BIAS:
        choice = scores + tl.load(bias_ptr + lanes, mask=is_expert, other=0.0).to(tl.float32)
    elif NUM_GROUPS > 1:
        choice = scores
    keys = tl.where(is_expert, order_key(choice), _TAKEN)
    if NUM_GROUPS > 1:
        GROUP: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
        group = lanes // GROUP
        of_group = tl.zeros([BLOCK_E], tl.float32)
        for g in range(NUM_GROUPS):
            members = tl.where(group == g, keys, _TAKEN)
            one = first_largest(members, lanes, NUM_EXPERTS)
            other = first_largest(tl.where(lanes == one, _TAKEN, members), lanes, NUM_EXPERTS)
            best_two = tl.sum(tl.where((lanes == one) | (lanes == other), choice, 0.0))
            of_group = tl.where(group == g, best_two, of_group)
        group_keys = tl.where(is_expert, order_key(of_group), _TAKEN)
        is_open = lanes < 0
        for _ in range(NUM_ACTIVE_GROUPS):
            best = first_largest(group_keys, lanes, NUM_EXPERTS) // GROUP
            is_open = is_open | (group == best)
            group_keys = tl.where(group == best, _TAKEN, group_keys)
        keys = tl.where(is_open, keys, _TAKEN)
    rank = tl.full([BLOCK_E], NUM_ACTIVE, tl.int32)
    for place in range(NUM_ACTIVE):
        best = first_largest(keys, lanes, NUM_EXPERTS)
        rank = tl.where(lanes == best, place, rank)
        keys = tl.where(lanes == best, _TAKEN, keys)
        tl.store(experts_ptr + token * NUM_PLACES + place, best)
    is_chosen = rank < NUM_ACTIVE
    if IS_SOFTMAX and RENORMALIZES:
        chosen = tl.where(is_chosen, logits, float("-inf"))
        weights = tl.exp(chosen - tl.max(chosen))
        weights = weights / tl.sum(weights)
    elif RENORMALIZES:
        weights = scores / (tl.sum(tl.where(is_chosen, scores, 0.0)) + _LEAST_SUM)
    else:
        weights = scores
    weights = weights * scale
    if scales_ptr is not None:
        weights = weights * tl.load(scales_ptr + lanes, mask=is_expert, other=0.0)
    tl.store(weights_ptr + token * NUM_PLACES + rank, weights, mask=is_chosen)


def run_route(
    logits: Tensor,
    config: RoutingConfig,
    correction_bias: Tensor | None = None,
    expert_scales: Tensor | None = None,
    *,
    has_gate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weights [T, k] fp32 and experts [T, k] int32 of each token, as `route` of route_torch.py defines them.

    logits           [T, num_experts or more], last dim contiguous, computed with in fp32
    correction_bias  [num_experts] or None
    expert_scales    [num_experts] fp32, what the weight of an expert is multiplied by in the end, or None
    One launch of T programs; does not wait for the device.
    """
    num_tokens = logits.shape[0]
    weights = torch.empty(num_tokens, config.num_active + has_gate, dtype=torch.float32, device=logits.device)
    experts = torch.empty_like(weights, dtype=torch.int32)
    if num_tokens == 0:
        return weights, experts
    device, stride, tensors = logits.device, logits.stride()[0], (logits, correction_bias, expert_scales)
    at = [None if x is None else x.data_ptr() for x in tensors]
    if logits.is_cuda and not any(address and address % 16 for address in at):
        dtypes = tuple([None if x is None else x.dtype for x in tensors])
        kernel = _prepared(device, dtypes, stride, config, has_gate=has_gate)
        arguments = (*at, weights.data_ptr(), experts.data_ptr(), stride, config.scale)
        kernel((num_tokens, 1, 1), arguments)
    else:
        options = _options(device, config, has_bias=correction_bias is not None, has_gate=has_gate)
        hallmark_experts_route[(num_tokens,)](*tensors, weights, experts, stride, config.scale, **options)
    return weights, experts


# A pure function of what is compiled in: the cache holds no state.
@lru_cache(maxsize=64)
def _prepared(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], stride: int, config: RoutingConfig, *, has_gate: bool
) -> Loaded:
    """The kernel for aligned logits, bias and scales of these dtypes; None of what there is not."""
    given = [None if dtype is None else Aligned(dtype) for dtype in dtypes]
    results = Aligned(torch.float32), Aligned(torch.int32)
    options = _options(device, config, has_bias=dtypes[1] is not None, has_gate=has_gate)
    return prepare(hallmark_experts_route, device, *given, *results, stride, config.scale, **options)


def _options(device: torch.device, config: RoutingConfig, *, has_bias: bool, has_gate: bool) -> dict[str, int]:
    block, ahead = padded(config.num_experts), launches_ahead(device)
    return {
        "NUM_EXPERTS": config.num_experts,
        "BLOCK_E": block,
        "NUM_ACTIVE": config.num_active,
        "NUM_GROUPS": config.num_groups,
        "NUM_ACTIVE_GROUPS": config.num_active_groups,
        "IS_SOFTMAX": config.scores is Scores.SOFTMAX,
        "RENORMALIZES": config.renormalizes,
        "HAS_BIAS": has_bias,
        "HAS_GATE": has_gate,
        "num_warps": 1 if block <= 256 else 4,
        "IS_DEPENDENT": ahead,
        "launch_pdl": ahead,
    }
