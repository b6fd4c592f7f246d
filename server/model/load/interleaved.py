"""gpt-oss's experts in a checkpoint: all of a layer as one tensor, in which the rows of gate and up alternate.

    mlp.experts.gate_up_proj         [E, H, 2 * I]         gate and up alternate in the last dim
    mlp.experts.down_proj            [E, I, H]
    mlp.experts.gate_up_proj_blocks  [E, 2 * I, H / 32, 16] uint8, and gate_up_proj_scales [E, 2 * I, H / 32]: mxfp4
    mlp.experts.down_proj_blocks     [E, H, I / 32, 16] uint8, and down_proj_scales [E, H, I / 32]
    mlp.experts.gate_up_proj_bias    [E, 2 * I], down_proj_bias [E, H]

A rank has columns of every expert, hence a piece of each expert's part of a tensor.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.experts.few_bits.weights import AnyExperts, FewBitExperts
from kernels.experts.kinds import MXFP4_BLOCK, ExpertFormat
from kernels.experts.weights import Mxfp4Weights
from qualification.model.config import ExpertsConfig, ModelConfig
from qualification.model.families.family import ExpertLayout, TensorNames
from qualification.model.shard import Shard
from server.model.layers import MixtureWeights, Weights
from server.model.load.checkpoint import Piece, Wanted

_BLOCK_BYTES = MXFP4_BLOCK // 2


def interleaved_tensors(config: ModelConfig, names: TensorNames) -> dict[str, Wanted]:
    """The tensors of a checkpoint of the whole model, by name; none for a family with another layout."""
    found: dict[str, Wanted] = {}
    for index, layer in enumerate(config.layers):
        mixture, prefix = layer.feed_forward, _prefix(index, names)
        if prefix is None or not isinstance(mixture, ExpertsConfig):
            continue
        count, width, hidden = mixture.num_experts, mixture.width, config.hidden_size
        if mixture.format is ExpertFormat.MXFP4:
            for name, rows, size in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
                num_blocks = size // MXFP4_BLOCK
                found[f"{prefix}.{name}_blocks"] = Wanted((count, rows, num_blocks, _BLOCK_BYTES), torch.uint8)
                found[f"{prefix}.{name}_scales"] = Wanted((count, rows, num_blocks), torch.uint8)
        else:
            found[f"{prefix}.gate_up_proj"] = Wanted((count, hidden, 2 * width))
            found[f"{prefix}.down_proj"] = Wanted((count, width, hidden))
        if mixture.has_bias:
            found[f"{prefix}.gate_up_proj_bias"] = Wanted((count, 2 * width))
            found[f"{prefix}.down_proj_bias"] = Wanted((count, hidden))
    return found


def interleaved_pieces(weights: Weights, shard: Shard, names: TensorNames) -> list[Piece]:
    """The blocks that fill a rank's experts; none for a family with another layout.

    A bias that is added once, by rank 0, is made zero on the other ranks.
    """
    found: list[Piece] = []
    for index, (layer, part) in enumerate(zip(weights.layers, shard.layers, strict=True)):
        prefix, mixture = _prefix(index, names), part.whole.feed_forward
        if prefix is not None and isinstance(layer.feed_forward, MixtureWeights) and mixture is not None:
            is_first = shard.rank == 0
            found += _of_layer(layer.feed_forward.experts, prefix, part.width, mixture.width, is_first=is_first)
    return found


def _prefix(layer: int, names: TensorNames) -> str | None:
    if names.experts is None or names.experts.layout is not ExpertLayout.INTERLEAVED:
        return None
    return f"model.layers.{layer}.{names.experts.experts}"


def _of_layer(experts: AnyExperts, prefix: str, width: range, whole: int, *, is_first: bool) -> Iterator[Piece]:
    """width: the columns of a rank, of `whole`."""
    assert not isinstance(experts, FewBitExperts), "these experts have tensors of their own"
    for expert in range(experts.num_experts):
        if isinstance(experts, Mxfp4Weights):
            yield from _packed(experts, prefix, expert, width, whole)
        else:
            gate_up = experts.gate_up[expert]
            hidden = gate_up.shape[1]
            yield Piece(
                f"{prefix}.gate_up_proj",
                _alternating(gate_up).permute(2, 0, 1),
                first_row=expert * hidden,
                first_column=2 * width.start,
                row_size=2 * whole,
            )
            down = experts.down[expert].t()
            yield Piece(f"{prefix}.down_proj", down, first_row=expert * whole + width.start, row_size=hidden)
        if experts.gate_up_bias is not None:
            bias = _alternating(experts.gate_up_bias[expert])
            yield Piece(f"{prefix}.gate_up_proj_bias", bias, first_row=expert * whole + width.start, row_size=2)
    if experts.down_bias is not None and is_first:
        yield Piece(f"{prefix}.down_proj_bias", experts.down_bias)
    elif experts.down_bias is not None:
        experts.down_bias.zero_()


def _packed(experts: Mxfp4Weights, prefix: str, expert: int, width: range, whole: int) -> Iterator[Piece]:
    gate_up = (("blocks", experts.gate_up_blocks), ("scales", experts.gate_up_scales))
    for kind, tensor in gate_up:
        rows = _alternating(tensor[expert])
        name, row_size = f"{prefix}.gate_up_proj_{kind}", rows[0].numel()
        yield Piece(name, rows, first_row=expert * whole + width.start, row_size=row_size)
    for kind, tensor, size in (("blocks", experts.down_blocks, _BLOCK_BYTES), ("scales", experts.down_scales, 1)):
        yield Piece(
            f"{prefix}.down_proj_{kind}",
            tensor[expert],
            first_row=expert * tensor.shape[1],
            first_column=width.start // MXFP4_BLOCK * size,
            row_size=whole // MXFP4_BLOCK * size,
        )


def _alternating(gate_up: Tensor) -> Tensor:
    """[2 * I, ...], the rows of gate, then those of up, as a view [I, 2, ...]."""
    return gate_up.view(2, gate_up.shape[0] // 2, *gate_up.shape[1:]).transpose(0, 1)
