"""Routing against the routers of transformers, and what they leave open: equal scores, and groups out of order."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from kernels.experts.kinds import RoutingConfig, Scores
from kernels.experts.routing.route_torch import route

SOFTMAX = RoutingConfig(7, 3)
SIGMOID = RoutingConfig(12, 3, Scores.SIGMOID, renormalizes=True, num_groups=4, num_active_groups=2, scale=2.5)
CASES = {
    "qwen": (Qwen3MoeTopKRouter, SOFTMAX),
    "qwen, one": (Qwen3MoeTopKRouter, replace(SOFTMAX, num_active=1)),
    "qwen, renormalised": (Qwen3MoeTopKRouter, replace(SOFTMAX, renormalizes=True)),
    "qwen, all": (Qwen3MoeTopKRouter, replace(SOFTMAX, num_active=7, renormalizes=True)),
    "mixtral": (MixtralTopKRouter, replace(SOFTMAX, renormalizes=True)),
    "gpt-oss": (GptOssTopKRouter, replace(SOFTMAX, renormalizes=True)),
    "glm": (Glm4MoeTopkRouter, SIGMOID),
    "glm, one group": (Glm4MoeTopkRouter, replace(SIGMOID, num_groups=1, num_active_groups=1)),
    "glm, not renormalised": (Glm4MoeTopkRouter, replace(SIGMOID, renormalizes=False)),
    "glm, all of the best groups": (Glm4MoeTopkRouter, replace(SIGMOID, num_active=6)),
}


def reference(router_class: type, routing: RoutingConfig, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and experts by a router whose product passes the logits through."""
    size = routing.num_experts
    config = SimpleNamespace(
        num_experts=size,
        num_local_experts=size,
        hidden_size=size,
        num_experts_per_tok=routing.num_active,
        norm_topk_prob=routing.renormalizes,
        routed_scaling_factor=routing.scale,
        n_group=routing.num_groups,
        topk_group=routing.num_active_groups,
    )
    router = router_class(config)
    with torch.no_grad():
        router.weight.copy_(torch.eye(size))
        if routing.scores is Scores.SIGMOID:
            router.e_score_correction_bias.copy_(bias)
        _, weights, experts = router(logits)
    return weights, experts


def dense(weights: Tensor, experts: Tensor, size: int) -> Tensor:
    """Every expert's weight, 0 for those that a token does not visit: the order of k falls out."""
    return torch.zeros(weights.shape[0], size).scatter_(1, experts.long(), weights)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_experts_are_those_of_transformers(case: str) -> None:
    router_class, routing = CASES[case]
    size = routing.num_experts
    logits, bias = 3 * torch.randn(101, size), torch.randn(size)
    weights, experts = route(logits, routing, bias if routing.scores is Scores.SIGMOID else None)
    expected = dense(*reference(router_class, routing, logits, bias), size)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int32)
    assert torch.equal(dense(weights, experts, size) != 0, expected != 0)
    torch.testing.assert_close(dense(weights, experts, size), expected)


def test_the_best_expert_is_first_and_of_equals_the_lower() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, -3.0, 1.0]])
    assert route(logits, replace(SOFTMAX, num_active=4))[1].tolist() == [[1, 3, 2, 4]]


def test_saturated_sigmoids_are_ranked_by_their_logits() -> None:
    logits = torch.tensor([[30.0, 50.0, 40.0]])
    assert route(logits, RoutingConfig(3, 2, Scores.SIGMOID))[1].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_active": 0}, "experts of a token: expected 1 to 12, found 0"),
        ({"num_active": 13}, "experts of a token: expected 1 to 12, found 13"),
        ({"num_groups": 5}, "12 experts cannot be 5 groups"),
        ({"num_groups": 12}, "of two or more each"),
        ({"num_groups": 4, "num_active_groups": 5}, "active groups: expected 1 to 4, found 5"),
        ({"num_groups": 4, "num_active": 4}, "experts of a token: expected 1 to 3, found 4"),
    ],
)
def test_numbers_that_fit_no_routing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RoutingConfig(12, 3), **changes)
