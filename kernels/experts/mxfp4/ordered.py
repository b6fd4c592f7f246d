"""`gluon.experts.mxfp4.ordered`: products with weights of 4 bits, each summed in one order for every number of tokens.

The order is "k16-codes": one fp32 accumulator for each number, to which wgmma adds 16 columns of the inner dim at a
time, in the order of order.py, whose blocks of 128 columns follow each other; a token's experts are summed in the order
in which it visits them. All tiles of sorted slots have it; Triton's products of few tokens do not, so that these are
sorted here, too.
"""

from torch import Tensor

from kernels.experts.kinds import ExpertActivation
from kernels.experts.mxfp4.launch import run_in_tiles
from kernels.experts.mxfp4.tilings import ALL_TILES, codes_tiles
from kernels.experts.weights import AnyExpertWeights, Mxfp4Weights


def run_codes_ordered(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert_weights: AnyExpertWeights,
    activation: ExpertActivation,
    out: Tensor,
) -> None:
    """Fill out [T, H] with the sum over a token's k experts of weight * down(activation(gate) * up).

    hidden, out [T, H] bf16, last dim contiguous; experts [T, k] int32, contiguous, each below the number of experts;
    weights [T, k] fp32, last dim contiguous; expert_weights in mxfp4. H and the experts' width multiples of 64. Does
    not wait for the device.
    """
    assert isinstance(expert_weights, Mxfp4Weights), "the path's limits say so"
    num_tokens, num_active = experts.shape
    tiles = codes_tiles(num_tokens, num_active, expert_weights.num_experts)
    fewest = ALL_TILES[0]
    run_in_tiles(hidden, experts, weights, expert_weights, activation, out, fewest if tiles is None else tiles)
