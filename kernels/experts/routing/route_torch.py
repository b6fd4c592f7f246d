"""Routing of tokens to experts and their weights: the specification, by torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.experts.kinds import RoutingConfig, Scores
from kernels.fused.alike import sigmoid_alike

_LEAST_SUM = 1e-20  # added to the sum of sigmoid scores, as in DeepSeek V3


def route(
    logits: Tensor, config: RoutingConfig, correction_bias: Tensor | None = None, *, has_gate: bool = False
) -> tuple[Tensor, Tensor]:
    """Weights [T, k] fp32 and experts [T, k] int32 of each token, its best expert first; of equals the lower index.

    logits           [T, num_experts], computed with in fp32
    correction_bias  [num_experts]: added to the scores for choosing experts, not for weighing them
    has_gate         whether every token visits one more expert, of number num_experts, in a last place: its weight is
                     the sigmoid of the logit behind the others, behind which there may be more that are not read
    Does not wait for the device. Sources: Shazeer et al. 2017; groups and bias DeepSeek V3, section 2.1.2.
    """
    if has_gate:
        weights, experts = route(logits[:, : config.num_experts], config, correction_bias)
        gates = sigmoid_alike(logits[:, config.num_experts, None].float())
        return torch.cat((weights, gates), 1), F.pad(experts, (0, 1), value=config.num_experts)
    logits = logits.float()
    scores = torch.softmax(logits, dim=1) if config.scores is Scores.SOFTMAX else sigmoid_alike(logits)
    # Where nothing but their order counts, logits: scores that are nearly 0 or 1 are equal when rounded.
    choice = logits if correction_bias is None and config.num_groups == 1 else scores
    if correction_bias is not None:
        choice = choice + correction_bias.float()
    if config.num_groups > 1:
        choice = _of_best_groups(choice, config)
    experts = _best(choice, config.num_active)
    if config.scores is Scores.SOFTMAX and config.renormalizes:
        weights = torch.softmax(logits.gather(1, experts), dim=1)
    else:
        weights = scores.gather(1, experts)
        if config.renormalizes:
            weights = weights / (weights.sum(dim=1, keepdim=True) + _LEAST_SUM)
    return weights * config.scale, experts.int()


def _of_best_groups(choice: Tensor, config: RoutingConfig) -> Tensor:
    """`choice`, with minus infinity for the experts of all groups but the best."""
    groups = choice.view(choice.shape[0], config.num_groups, -1)
    of_group = groups.topk(2, dim=2).values.sum(dim=2)
    is_best = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, _best(of_group, config.num_active_groups), True)
    return groups.masked_fill(~is_best[:, :, None], float("-inf")).view_as(choice)


def _best(values: Tensor, count: int) -> Tensor:
    """Columns of the `count` largest values of each row, the largest first; of equals the first column."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]
