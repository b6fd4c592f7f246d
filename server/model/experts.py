"""The mixture of a layer: a router, the products of the experts that each token visits, and what all tokens visit."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.experts.eager import experts_eager
from kernels.experts.kinds import ExpertActivation, RoutingConfig
from kernels.experts.routing import route
from kernels.experts.weights import AnyExpertWeights
from kernels.linear.matmul import linear_fp32
from server.model.linear import Dense, Product
from server.model.step import Step

# (hidden [T, H], experts [T, k] int32, weights [T, k] fp32) -> [T, H]
ExpertProducts = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Shared:
    """What all tokens visit: a dense feed-forward, multiplied by the sigmoid of `gate` [1, hidden] where it has one."""

    feed_forward: Product
    gate: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        out = self.feed_forward(x)
        if self.gate is None:
            return out
        return out.mul_(torch.sigmoid(torch.nn.functional.linear(x, self.gate)))


@dataclass(frozen=True, slots=True)
class Experts:
    """The weighted sum of a token's experts, and of what all tokens visit.

    router           [experts, hidden]
    correction_bias  [experts] fp32, or None
    """

    router: Dense
    routing: RoutingConfig
    products: ExpertProducts
    correction_bias: Tensor | None = None
    shared: Shared | None = None

    def __call__(self, x: Tensor, _step: Step) -> Tensor:
        weights, experts = route(router_logits(x, self.router), self.routing, self.correction_bias)
        out = self.products(x, experts, weights)
        return out if self.shared is None else out.add_(self.shared(x))


def router_logits(x: Tensor, router: Dense) -> Tensor:
    """[T, experts] fp32, never rounded to x's dtype: rounded logits are often equal."""
    if x.is_cuda:
        logits = linear_fp32(x, router.weight)
    else:
        logits = torch.nn.functional.linear(x.float(), router.weight.float())
    return logits if router.bias is None else logits.add_(router.bias)


def products_of(weights: AnyExpertWeights, activation: ExpertActivation) -> ExpertProducts:
    """What computes the products of these experts."""
    return partial(experts_eager, expert_weights=weights, activation=activation)
