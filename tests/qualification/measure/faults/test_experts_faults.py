"""The checker of experts passes torch's experts in every dtype; that of routes counts the wrong ones."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.experts.kinds import ExpertActivation, ExpertFormat, RoutingConfig, Scores
from kernels.experts.portable.eager import experts_eager
from kernels.experts.routing.route_torch import route
from kernels.experts.shape import ExpertForm, ExpertsShape
from kernels.experts.weights import AnyExpertWeights
from kernels.fused.activation_kind import Activation
from kernels.reference.experts import num_wrong_routes
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from qualification.measure.checks.experts_checks import check_experts
from qualification.measure.faults.experts_faults import trial_shapes
from qualification.measure.inputs.experts_inputs import experts_cases

CPU = torch.device("cpu")
ROWS = TokenRows.LE_128
MIXTURES = (
    *(it for it in trial_shapes(Dtype.FP32) if it.form is ExpertForm.GATED),
    ExpertsShape(Dtype.FP32, ExpertFormat.PLAIN, 3, 3, 40, 24, Activation.GELU_TANH, True, ROWS),
    ExpertsShape(Dtype.FP32, ExpertFormat.PLAIN, 6, 1, 33, 17, Activation.GELU, True, ROWS),
)
SIGMOID = RoutingConfig(12, 3, Scores.SIGMOID, renormalizes=True, num_groups=4, num_active_groups=2, scale=2.5)


def eager(
    hidden: Tensor, experts: Tensor, weights: Tensor, of: AnyExpertWeights, activation: ExpertActivation, out: Tensor
) -> None:
    out.copy_(experts_eager(hidden, experts, weights, of, activation))


@pytest.mark.parametrize("index", range(len(MIXTURES)))
def test_torchs_experts_pass_on_hostile_inputs(index: int) -> None:
    for dtype in Dtype if index == 0 else [(*Dtype,)[index % len(Dtype)]]:
        checks = check_experts(eager, experts_cases(replace(MIXTURES[index], dtype=dtype), CPU, seed=1))
        assert {check.name: check.where for check in checks if not check.is_passed} == {}


def test_wrong_routes_are_counted() -> None:
    random = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(40, 12, generator=random), torch.randn(12, generator=random)
    weights, experts = route(logits, SIGMOID, bias)
    assert num_wrong_routes(logits, SIGMOID, bias, weights, experts) == 0
    wrong = {
        "the bias is ignored": route(logits, SIGMOID),
        "groups are ignored": route(logits, replace(SIGMOID, num_groups=1, num_active_groups=1), bias),
        "weights are not renormalised": route(logits, replace(SIGMOID, renormalizes=False), bias),
        "the scale is ignored": route(logits, replace(SIGMOID, scale=1.0), bias),
        "scores are softmax": route(logits, replace(SIGMOID, scores=Scores.SOFTMAX), bias),
        "weights include the bias": ((torch.sigmoid(logits) + bias).gather(1, experts.long()), experts),
        "one expert twice": (weights, experts[:, :1].expand(-1, 3)),
        "another order": (weights.flip(1), experts.flip(1)),
        "an expert that does not exist": (weights, experts + 12),
        "NaN": (weights * torch.nan, experts),
    }
    assert {
        name: num_wrong_routes(logits, SIGMOID, bias, *found) > 0 for name, found in wrong.items()
    } == dict.fromkeys(wrong, True)


def test_one_weight_off_by_1e_5_is_wrong() -> None:
    logits = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    config = RoutingConfig(7, 3, renormalizes=True)
    weights, experts = route(logits, config)
    weights[3, 1] *= 1 + 1e-5
    assert num_wrong_routes(logits, config, None, weights, experts) == 1
