"""The check of a path of experts that claims an order: a token's bits alone, beside others and at every place."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.experts.few_bits.weights import AnyExperts
from kernels.experts.paths import RunExperts
from kernels.experts.shape import ExpertsShape
from kernels.experts.weights import ExpertWeights
from kernels.system.device import torch_dtype
from qualification.evidence.evidence import Invariance
from qualification.measure.inputs.experts_inputs import expert_weights_of
from qualification.measure.inputs.linear_inputs import between_nan
from qualification.measure.orders.first_bits import FirstBits
from qualification.measure.orders.row_batches import NUM_HOSTILE, POOL_ROWS, hostile_rows, order_counts, row_batches

_SEED = 103
_REST = 2.0**-9  # of a gate
_RESTS = (0.0, 2.0**-11, 2.0**-8, 2.0**-5)  # of the sum over the width, by columns of the result in turn
_SMALL = 2.0**-10  # weight of an expert beside two that cancel


def check_experts_order(
    run: RunExperts, shape: ExpertsShape, device: torch.device, *, seed: int, order: str, ends_early: bool = False
) -> Invariance:
    """Return what was seen of a path. Errors of a call are not caught.

    Tokens, experts and weights are the same for every number of rows. Hostile tokens visit the experts of tokens of the
    pool, so that they share tiles with them; their weights are hostile too.
    """
    bits, names = FirstBits(ends_early=ends_early), []
    counts = order_counts(shape.rows.lo, shape.rows.hi, 4 * shape.flops(1), is_cpu=device.type == "cpu")
    for given in _inputs(shape, device, seed):
        names.append(given.name)
        for batch in row_batches(counts, device):
            if bits.is_ended:
                break
            tokens = between_nan(given.hidden[batch.source], is_strided=False)
            experts, shares = given.experts[batch.source], given.shares[batch.source]
            out = torch.empty_like(tokens)
            run(tokens, experts, shares, given.weights, shape.activation, out)
            judged = batch.judged
            bits.meet(given.name, POOL_ROWS, batch.source[judged], out[judged], batch.name)
    return bits.result(order, {name: torch.arange(POOL_ROWS, device=device) for name in names})


@dataclass(frozen=True, slots=True)
class _Input:
    """Rows of the pool with hostile ones behind them, and the weights of all experts."""

    name: str
    hidden: Tensor
    experts: Tensor
    shares: Tensor
    weights: AnyExperts


def _inputs(shape: ExpertsShape, device: torch.device, seed: int) -> Iterator[_Input]:
    """Yield inputs in which each of the sums of a mixture cancels, one sum an input; of packed weights the last alone.

    gate     gates, or ups without one: the second half of the hidden dim takes back what the first adds, but for a rest
    down     the second half of the width takes back what the first adds, but for a rest
    experts  of each token one expert takes back what another adds, and the others add little
    plain    random numbers
    """
    random = torch.Generator(device).manual_seed(seed + _SEED)
    dtype = torch_dtype(shape.dtype)
    weights = expert_weights_of(shape, random, device)
    pool = torch.randn(POOL_ROWS, shape.hidden, generator=random, device=device)
    hostile = hostile_rows(shape.hidden, dtype, random)
    draws = torch.rand(POOL_ROWS, shape.num_experts, generator=random, device=device)
    experts = draws.argsort(1)[:, : shape.num_active].to(torch.int32)
    shares = torch.rand(POOL_ROWS, shape.num_active, generator=random, device=device) + 0.05
    shares = shares / shares.sum(1, keepdim=True)
    wild = torch.tensor([1.0, torch.nan, 1e30], device=device)[torch.arange(NUM_HOSTILE, device=device) % 3]

    def given(name: str, hidden: Tensor, experts: Tensor, shares: Tensor, weights: AnyExperts) -> _Input:
        hidden = torch.cat([hidden.to(dtype), hostile])
        experts = torch.cat([experts, experts[:NUM_HOSTILE]])
        return _Input(name, hidden, experts, torch.cat([shares, shares[:NUM_HOSTILE] * wild[:, None]]), weights)

    if not isinstance(weights, ExpertWeights):
        yield given("plain", pool, experts, shares, weights)
        return
    biases = [None if it is None else torch.zeros_like(it) for it in (weights.gate_up_bias, weights.down_bias)]
    half, width, kind = shape.hidden // 2, shape.width, type(weights)
    if half:
        gate_up = weights.gate_up.clone()
        gate = gate_up[:, :width]
        gate[:, :, half : 2 * half] = gate[:, :, :half] + _REST * gate[:, :, half : 2 * half]
        hidden = pool.clone()
        hidden[:, half : 2 * half] = -hidden[:, :half]
        yield given("gate", hidden, experts, shares, kind(gate_up, weights.down, *biases))
    if half := width // 2:
        gate_up, down = weights.gate_up.clone(), weights.down.clone()
        for start in range(0, gate_up.shape[1], width):
            gate_up[:, start + half : start + 2 * half] = gate_up[:, start : start + half]
        rests = torch.tensor(_RESTS, device=device, dtype=dtype)[
            torch.arange(shape.hidden, device=device) % len(_RESTS)
        ]
        down[:, :, half : 2 * half] = rests[:, None] * down[:, :, half : 2 * half] - down[:, :, :half]
        yield given("down", pool, experts, shares, kind(gate_up, down, *biases))
    if shape.num_active > 2 and shape.num_experts > shape.num_active:
        pairs = shape.num_experts // 2
        gate_up, down = weights.gate_up.clone(), weights.down.clone()
        gate_up[1 : 2 * pairs : 2], down[1 : 2 * pairs : 2] = gate_up[0 : 2 * pairs : 2], -down[0 : 2 * pairs : 2]
        first = 2 * (torch.arange(POOL_ROWS, device=device) % pairs)[:, None]
        pair = torch.cat([first, first + 1], dim=1)
        others = draws.scatter(1, pair, torch.inf).argsort(1)[:, : shape.num_active - 2]
        mixed = torch.cat([pair, others], dim=1)
        parts = torch.full_like(shares, _SMALL)
        parts[:, :2] = 1.0
        places = torch.rand(*mixed.shape, generator=random, device=device).argsort(1)
        of_tokens = mixed.gather(1, places).to(torch.int32), parts.gather(1, places)
        yield given("experts", pool, *of_tokens, kind(gate_up, down, *biases))
    yield given("plain", pool, experts, shares, weights)
