"""The tables of cosines and sines of rotary embeddings. Formulas as in transformers' modeling_rope_utils."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.fused.rope_kv import turns_of
from qualification.model.config import AttentionConfig, ModelConfig, QueryScaling, RopeConfig, RopeKind
from qualification.model.gated_delta import GatedDeltaConfig
from server.model.step import Step


def query_scales(scaling: QueryScaling, max_position: int, device: torch.device) -> Tensor:
    """Return what a query of each position is multiplied by, [max_position, 1, 1] fp32."""
    spans = (torch.arange(max_position) + scaling.first) // scaling.span
    return (1 + scaling.rate * torch.log1p(spans.double())).float()[:, None, None].to(device)


@dataclass(frozen=True, slots=True)
class _Table:
    """The rotations of layers that rotate alike.

    cos_sin  [max_position, r] fp32, as `cos_sin_table` gives it
    parts    [r] int64: by which part of a position each column is chosen; None where no layer has such parts
    """

    cos_sin: Tensor
    parts: Tensor | None

    def rows(self, positions: Tensor) -> Tensor:
        """Return the rotation of each token, [T, r], for positions [3, T]."""
        assert self.parts is not None
        return self.cos_sin.gather(0, positions.index_select(0, self.parts).t().long())


class RotaryTables:
    """The rotary tables of a model, one for all layers that rotate alike."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        kinds = dict.fromkeys((attention.rope, attention.rotary_dim) for attention in config.attentions)
        for layer in config.layers:
            if isinstance(layer.mixer, GatedDeltaConfig) and layer.mixer.fixed is not None:
                kinds[layer.mixer.fixed.rope, layer.mixer.sizes.key_dim] = None
        has_parts = config.has_three_positions
        self._index_of = {kind: index for index, kind in enumerate(kinds)}
        self._tables = tuple(
            _Table(
                cos_sin_table(rope, head_dim, config.max_position, device),
                _parts_of(rope, head_dim).to(device) if has_parts else None,
            )
            for rope, head_dim in kinds
        )
        scalings = dict.fromkeys(it.query_scaling for it in config.attentions if it.query_scaling is not None)
        assert len(scalings) <= 1, "all queries that grow do so alike"
        self._query_scales = next(
            (query_scales(it, config.max_position, device) for it in scalings if not it.is_one(config.max_position)),
            None,
        )

    def of(self, attention: AttentionConfig) -> tuple[int, Tensor]:
        """Return the number of a layer's table, and the table."""
        return self.of_kind(attention.rope, attention.rotary_dim)

    def of_kind(self, rope: RopeConfig, head_dim: int) -> tuple[int, Tensor]:
        """Return the number of a table, and the table, of a rotation of heads of so many numbers."""
        index = self._index_of[rope, head_dim]
        return index, self._tables[index].cos_sin

    def turned(self, step: Step) -> Step:
        """Return the step with what its layers rotate and scale by, as far as that is computed once for all of them."""
        tables, positions = tuple([it.cos_sin for it in self._tables]), step.positions
        if self._query_scales is not None:
            step = replace(step, query_scales=self._query_scales.index_select(0, positions))
        if positions.dim() == 2:
            tables = tuple([it.rows(positions) for it in self._tables])
            positions = torch.arange(positions.shape[1], dtype=torch.int32, device=positions.device)
            step = replace(step, positions=positions, tables=tables)
        turns = tuple([turns for it in tables if (turns := turns_of(it, positions)) is not None])
        return replace(step, turns=turns) if turns else step


def _parts_of(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the part of a position that each column of a table takes: cosines, then sines; 0 for layers without."""
    num_pairs = rope.rotated_dims(head_dim) // 2
    return torch.tensor((rope.position_parts or (0,) * num_pairs) * 2)


def cos_sin_table(rope: RopeConfig, head_dim: int, max_position: int, device: torch.device) -> Tensor:
    """[max_position, r] fp32: cosines of the r / 2 angles of each position, then their sines.

    r is the number of dimensions of a head that are rotated. LongRoPE has other angles where positions go beyond those
    of the original training: for all of them, so that a key in the cache fits the queries to come.
    """
    positions = torch.arange(max_position, dtype=torch.float32)
    is_long = rope.original_max_position is not None and max_position > rope.original_max_position
    angles = torch.outer(positions, inverse_frequencies(rope, rope.rotated_dims(head_dim), is_long=is_long))
    table = torch.cat((angles.cos(), angles.sin()), dim=1).mul_(rope.attention_factor)
    return table.to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int, *, is_long: bool) -> Tensor:
    """Radians a position for each pair of dimensions: [head_dim / 2] fp32 on the CPU. is_long: for LongRoPE."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match rope.kind:
        case RopeKind.NONE:  # cosines of 1 and sines of 0 leave queries and keys as they are, to the bit
            return torch.zeros_like(plain)
        case RopeKind.PLAIN:
            return plain
        case RopeKind.LINEAR:
            return plain / rope.factor
        case RopeKind.LLAMA3:
            return _llama3(plain, rope)
        case RopeKind.YARN:
            return _yarn(plain, rope, head_dim)
        case RopeKind.LONGROPE:
            return plain / torch.tensor(rope.long_factors if is_long else rope.short_factors)
        case RopeKind.PROPORTIONAL:
            plain[int(head_dim * rope.rotated_share) // 2 :] = 0
            return plain / rope.factor


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between interpolated. Source: Llama 3.1."""
    assert rope.original_max_position is not None
    num_turns = rope.original_max_position * plain / (2 * math.pi)  # in the context it was trained on
    share = ((num_turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - share) * plain / rope.factor + share * plain


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Interpolate frequencies as llama3 does, but along the dimensions. Source: Peng et al. 2023, section 3.2."""
    assert rope.original_max_position is not None
    context = rope.original_max_position

    def dimension_with(num_turns: float) -> float:
        return head_dim * math.log(context / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    stretched_share = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / rope.factor * stretched_share + plain * (1 - stretched_share)
