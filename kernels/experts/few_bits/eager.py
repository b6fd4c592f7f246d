"""Products of experts in 8 or 4 bits one expert after the other, by PyTorch, on any device.

Inputs of both products are rounded as the format says, those of the second once they have been rounded to the dtype of
hidden states.
"""

import torch
from torch import Tensor

from kernels.experts.few_bits.weights import FewBitExperts
from kernels.experts.kinds import ExpertActivation
from kernels.experts.portable.eager import activated
from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.widened import multiply_widened


def run_few_bits(
    hidden: Tensor, experts: Tensor, weights: Tensor, expert_weights: FewBitExperts, activation: ExpertActivation,
    out: Tensor,
) -> None:  # fmt: skip
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(gate) * up).

    hidden [T, H]; experts [T, k], each below the number of experts; weights [T, k] fp32
    An expert's result is rounded to hidden's dtype; the sum over k is in fp32, in the order of k, rounded once. Waits
    for the device to learn which experts are visited.
    """
    num_tokens, num_active = experts.shape
    visited = experts.flatten()
    results = hidden.new_empty(num_tokens * num_active, hidden.shape[1])
    for expert in torch.unique(visited).tolist():
        places = (visited == expert).nonzero()[:, 0]
        gate_up, down = expert_weights.weights_of(expert)
        both = hidden.new_empty(places.shape[0], gate_up.size[0])
        multiply_widened(hidden[places // num_active], gate_up, None, Epilogue.NONE, both)
        result = hidden.new_empty(places.shape[0], down.size[0])
        multiply_widened(activated(both, activation), down, None, Epilogue.NONE, result)
        results[places] = result
    results = results.view(num_tokens, num_active, -1)
    total = results[:, 0].float() * weights[:, :1]
    for place in range(1, num_active):
        total.addcmul_(results[:, place].float(), weights[:, place, None])
    out.copy_(total)
