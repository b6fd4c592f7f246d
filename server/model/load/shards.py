"""Blocks of a checkpoint's tensors that belong to a rank, and their places in its weights."""

from dataclasses import replace

import torch
from torch import Tensor

from qualification.model.config import DenseConfig
from qualification.model.families.family import TensorNames
from qualification.model.shard import LayerShard, Shard
from server.model.layers import Weights, empty_weights
from server.model.load.checkpoint import Piece
from server.model.tensor_views import checkpoint_views

_LAYERS = "model.layers."
_Run = tuple[range, int]  # rows of a rank, among so many of their kind


def empty_shard(shard: Shard, dtype: torch.dtype, device: torch.device) -> Weights:
    """Return weights of a rank's shapes, not yet filled."""
    config = shard.local_config
    if shard.world == 1:
        return empty_weights(config, dtype, device)
    weights = empty_weights(replace(config, tie_embeddings=True), dtype, device)  # without a head of its own
    rows = weights.embedding[shard.vocabulary.start : shard.vocabulary.stop]
    return replace(weights, head=rows if config.tie_embeddings else torch.empty_like(rows))


def pieces_of(weights: Weights, shard: Shard, names: TensorNames) -> list[Piece]:
    """Return the blocks that fill a rank's weights. What is added once, by rank 0, is made zero on the other ranks."""
    pieces: list[Piece] = []
    for name, target in checkpoint_views(weights, shard.local_config, names).items():
        if name.startswith(_LAYERS):
            index, _, rest = name.removeprefix(_LAYERS).partition(".")
            *_, linear, kind = rest.split(".")
            pieces += _of_layer(name, target, linear, kind, shard.layers[int(index)], shard.rank)
        else:
            pieces.append(Piece(name, target, first_row=shard.vocabulary.start if name == "lm_head.weight" else 0))
    return pieces


def _of_layer(name: str, target: Tensor, linear: str, kind: str, layer: LayerShard, rank: int) -> list[Piece]:
    runs, columns = _row_runs(linear, layer), _columns(linear, layer)
    if runs is not None:
        return _pieces(name, target, runs)
    if columns is None:
        return [Piece(name, target)]  # a norm: on every rank
    if kind == "weight":
        return [Piece(name, target, first_column=columns.start)]
    if rank == 0:
        return [Piece(name, target)]
    target.zero_()  # of the sum over the ranks
    return []


def _row_runs(linear: str, layer: LayerShard) -> list[_Run] | None:
    """Return a rank's rows of each of the matrices that a tensor holds; None for a tensor that is not split by rows."""
    attention, feed_forward = layer.whole.attention, layer.whole.feed_forward
    assert isinstance(feed_forward, DenseConfig)
    query = _rows(layer.heads.query, attention.head_dim), attention.query_size
    kv = _rows(layer.heads.kv, attention.head_dim), attention.kv_size
    width = layer.width, feed_forward.width
    runs = {
        "q_proj": [query],
        "k_proj": [kv],
        "v_proj": [kv],
        "qkv_proj": [query, kv, kv],
        "gate_proj": [width],
        "up_proj": [width],
        "gate_up_proj": [width, width],
    }
    return runs.get(linear)


def _columns(linear: str, layer: LayerShard) -> range | None:
    """Return a rank's columns of a tensor; None for a tensor that is not split by columns."""
    columns = {"o_proj": _rows(layer.heads.query, layer.whole.attention.head_dim), "down_proj": layer.width}
    return columns.get(linear)


def _rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _pieces(name: str, target: Tensor, runs: list[_Run]) -> list[Piece]:
    pieces, start, first = [], 0, 0
    for rows, num_whole in runs:
        pieces.append(Piece(name, target[start : start + len(rows)], first_row=first + rows.start))
        start, first = start + len(rows), first + num_whole
    return pieces
