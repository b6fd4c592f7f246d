"""The mixture of a layer: a router, the products of the experts that each token visits, and what all tokens visit."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.calls.launch import triton_version
from kernels.calls.processors import shared_bytes
from kernels.experts.capped.eager import run_capped
from kernels.experts.few_bits.eager import run_few_bits
from kernels.experts.few_bits.weights import AnyExperts, FewBitExperts
from kernels.experts.kinds import RoutingConfig
from kernels.experts.paths import RunExperts
from kernels.experts.portable.eager import experts_eager
from kernels.experts.routing.route_torch import route
from kernels.experts.shape import AnyExpertActivation
from kernels.experts.tiles import token_counts
from kernels.experts.ungated.eager import run_ungated
from kernels.experts.weights import Mxfp4Weights
from kernels.fused.add_norms import Addend, add_norms
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.row_gate import add_gated_, add_scaled_
from kernels.fused.ungated_kind import Ungated
from qualification.model.config import ExpertsConfig
from server.model.linear import Product
from server.model.step import Step

# (hidden [T, H], experts [T, k] int32, weights [T, k] fp32) -> [T, H]
ExpertProducts = Callable[[Tensor, Tensor, Tensor], Tensor]
# Gives what computes the products of a layer's mixture with its weights.
ProductsOf = Callable[[ExpertsConfig, AnyExperts], ExpertProducts]


@dataclass(frozen=True, slots=True)
class Shared:
    """Dense feed-forward that all tokens visit. A row's bits depend on that row alone, if those of `feed_forward` do.

    gate   [hidden], whose product with a row has the sigmoid that the row's result is multiplied by; or None
    scale  what a result is multiplied by too
    """

    feed_forward: Callable[[Tensor, Step | None], Tensor]
    gate: Tensor | None = None
    scale: float = 1.0

    def add_to_(self, out: Tensor, x: Tensor, step: Step | None) -> Tensor:
        """Add what all tokens visit of x [T, hidden] to out [T, hidden], in place; return out."""
        found = self.feed_forward(x, step)
        if self.gate is None:
            return add_scaled_(out, found, self.scale)
        return add_gated_(out, found, x, self.gate, self.scale)


@dataclass(frozen=True, slots=True)
class Experts:
    """The weighted sum of a token's experts, and of what all tokens visit.

    router           x [T, hidden] -> [T, experts or more] fp32, without its bias: of fp32 on a CPU, else of the model's
                     dtype
    router_bias      [experts] or None
    correction_bias  [experts] fp32, or None
    expert_scales    [experts] fp32, what the weight of an expert is multiplied by, or None
    jitter           of a sparse mixer, or None where `routing` says how experts are weighed
    weighs_inputs    whether the weight of a token's one expert multiplies what that expert reads
    has_gate         whether what all tokens visit is one more expert, whose gate is the logit behind the others'
    to_latent        x [T, hidden] -> what experts read [T, latent], and from_latent what they add -> [T, hidden]; None
                     where they read x itself
    """

    router: Product
    routing: RoutingConfig
    products: ExpertProducts
    router_bias: Tensor | None = None
    correction_bias: Tensor | None = None
    shared: Shared | None = None
    expert_scales: Tensor | None = None
    weighs_inputs: bool = False
    has_gate: bool = False
    to_latent: Product | None = None
    from_latent: Product | None = None
    jitter: float | None = None

    def __call__(self, x: Tensor, step: Step | None) -> Tensor:
        weights, experts = self.routes(x, step)
        read = x if self.to_latent is None else self.to_latent(x, step)
        if self.weighs_inputs:
            out = self.products((read * weights).to(x.dtype), experts, torch.ones_like(weights))
        else:
            out = self.products(read, experts, weights)
        if self.from_latent is not None:
            out = self.from_latent(out, step)
        return out if self.shared is None else self.shared.add_to_(out, x, step)

    def compile(self, hidden_size: int, dtype: torch.dtype, device: torch.device, borders: Iterable[int] = ()) -> None:
        """Compile every kernel that a call may launch, by running one of each kind: then none is in service.

        borders  numbers of tokens from which another path may serve
        """
        if not is_captured(device):
            return
        routing, sizes = self.routing, (dtype.itemsize, shared_bytes(device))
        counts = routing.num_experts + self.has_gate, routing.num_active + self.has_gate
        for num_tokens in {*token_counts(*counts, *sizes), *borders}:
            x = torch.zeros(num_tokens, hidden_size, dtype=dtype, device=device)
            weights, experts = self.routes(x, None)
            self.products(x if self.to_latent is None else self.to_latent(x, None), experts, weights)

    def routes(self, x: Tensor, step: Step | None) -> tuple[Tensor, Tensor]:
        """Return the weights and experts of each token. Logits are never rounded to 16 bits: those are often equal."""
        logits = self.router(x if x.is_cuda else x.float(), step)
        if self.router_bias is not None:
            logits.add_(self.router_bias)
        if self.jitter is not None:
            return mixed_sparsely(logits, self.jitter)
        return routes(logits, self.routing, self.correction_bias, self.expert_scales, has_gate=self.has_gate)


@dataclass(frozen=True, slots=True)
class ReadApart:
    """A residual [T, hidden], and its norms for a router, experts, and what all tokens visit."""

    residual: Tensor
    router: Tensor
    experts: Tensor
    shared: Tensor


@dataclass(frozen=True, slots=True)
class AddNormsApart:
    """Add to the residual; a router, experts and what all tokens visit each read a norm of the sum.

    router, experts, shared  [hidden], weights of the norms
    """

    router: Tensor
    experts: Tensor
    shared: Tensor
    eps: float

    def __call__(self, hidden: Addend, residual: Tensor | None) -> tuple[ReadApart, Tensor]:
        assert residual is not None, "attention is in front"
        normed = add_norms(hidden, residual, (self.router, self.experts, self.shared), self.eps)
        return ReadApart(residual, *normed), residual


@dataclass(frozen=True, slots=True)
class ExpertsApart:
    """Experts, and what all tokens visit beside them, each of a norm of its own and normed before they are added.

    experts  without what all tokens visit
    after_experts, after_shared  [hidden], weights of the norms of what each adds
    sum      of the ranks' parts of a result
    """

    experts: Experts
    shared: Callable[[Tensor, Step | None], Tensor]
    after_experts: Tensor
    after_shared: Tensor
    eps: float
    sum: Callable[[Tensor], Tensor]

    def __call__(self, read: ReadApart, step: Step | None) -> Addend:
        weights, experts = self.experts.routes(read.router, step)
        found = self.experts.products(read.experts, experts, weights)
        fed = self.shared(read.shared, step)
        return Addend(((self.sum(fed), self.after_shared), (self.sum(found), self.after_experts)), self.eps)


def is_captured(device: torch.device) -> bool:
    """Return whether experts are Triton's here, which wait for nothing: a CUDA graph can hold them.

    Elsewhere they are computed one after the other, which waits for the device.
    """
    return device.type == "cuda" and triton_version() is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def device_of(weights: AnyExperts) -> torch.device:
    return (weights.down_blocks if isinstance(weights, Mxfp4Weights) else weights.down).device


def routes(
    logits: Tensor,
    routing: RoutingConfig,
    correction_bias: Tensor | None,
    expert_scales: Tensor | None = None,
    *,
    has_gate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weights [T, k] fp32 and experts [T, k] int32 of each token, as `route` defines them; on a GPU one kernel.

    expert_scales  [experts] fp32, what the weight of an expert is multiplied by, or None
    """
    if is_captured(logits.device):
        from kernels.experts.routing.route_triton import run_route

        return run_route(logits, routing, correction_bias, expert_scales, has_gate=has_gate)
    weights, experts = route(logits, routing, correction_bias, has_gate=has_gate)
    if expert_scales is not None:
        weights.mul_(expert_scales.index_select(0, experts.view(-1)).view_as(weights))
    return weights, experts


def mixed_sparsely(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Weights [T, 2] fp32 and experts [T, 2] int32 of each token by a sparse mixer, of logits [T, experts] fp32.

    The second expert is chosen and weighed as if the first one were not there. By PyTorch, which waits for nothing.
    """
    left, weights, experts = logits, [], []
    for _ in range(2):
        best, expert = left.max(dim=1, keepdim=True)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(dim=1).gather(1, expert))
        experts.append(expert)
        left = left.scatter(1, expert, -torch.inf)
    return torch.cat(weights, dim=1), torch.cat(experts, dim=1).int()


def products_of(mixture: ExpertsConfig, weights: AnyExperts) -> ExpertProducts:
    """Return the path of these experts' products where nothing is decided, as outside of an engine."""
    activation = mixture.activation
    if isinstance(activation, CappedSilu):
        return _filling(_capped_on(device_of(weights)), weights, activation)
    if isinstance(activation, Ungated):
        return _filling(_ungated_on(device_of(weights), weights), weights, activation)
    if isinstance(weights, FewBitExperts):
        return _filling(run_few_bits, weights, activation)
    if not is_captured(device_of(weights)):
        return partial(experts_eager, expert_weights=weights, activation=activation)
    from kernels.experts.portable.launch import run_experts

    return _filling(run_experts, weights, activation)


def _capped_on(device: torch.device) -> RunExperts:
    """Return the path of experts with a bounded activation where nothing is decided."""
    if not is_captured(device):
        return run_capped
    from kernels.experts.capped.launch import run_capped_triton

    return run_capped_triton


def _ungated_on(device: torch.device, weights: AnyExperts) -> RunExperts:
    """Likewise of experts without a gate."""
    if not is_captured(device):
        return run_ungated
    if isinstance(weights, FewBitExperts):
        from kernels.experts.ungated.few_bits import run_ungated_few_bits_triton

        return run_ungated_few_bits_triton
    from kernels.experts.ungated.launch import run_ungated_triton

    return run_ungated_triton


def _filling(run: RunExperts, weights: AnyExperts, activation: AnyExpertActivation) -> ExpertProducts:
    def products(hidden: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        run(hidden, experts, shares, weights, activation, out)
        return out

    return products
