"""Blocks of a checkpoint's tensors that belong to a rank, and their places in its weights."""

from dataclasses import dataclass, replace

import torch

from kernels.linear.weights import PlainWeight, StoredTensor, class_of
from qualification.model.config import AttentionConfig, ExpertsConfig, LayerConfig, QKNorm
from qualification.model.families.family import TensorNames, within
from qualification.model.gated_delta import GatedDeltaConfig
from qualification.model.latent import LatentAttentionConfig
from qualification.model.shard import LayerShard, Shard
from qualification.model.short_convolution import ShortConvolutionConfig
from server.errors import ModelError
from server.model.empty_weights import empty_weights
from server.model.layers import LayerWeights, Weights
from server.model.linear import Linear
from server.model.load.checkpoint import Piece
from server.model.tensor_views import HEAD_BIAS, checkpoint_views, layer_views, turned

_LAYERS = "model.layers."
_Run = tuple[range, int]  # rows of a rank, among so many of their kind


def empty_shard(shard: Shard, dtype: torch.dtype, device: torch.device) -> Weights:
    """Return weights of a rank's shapes, not yet filled."""
    config = shard.local_config
    if shard.world == 1:
        return empty_weights(config, dtype, device)
    weights = empty_weights(replace(config, tie_embeddings=True), dtype, device)  # without a head of its own
    rows = weights.embedding[shard.vocabulary.start : shard.vocabulary.stop]
    if config.tie_embeddings:
        return replace(weights, head=Linear(PlainWeight(rows)))
    own = class_of(config.head_format).empty(rows.shape[0], rows.shape[1], dtype, device)
    return replace(weights, head=Linear(own))


def pieces_of(weights: Weights, shard: Shard, names: TensorNames) -> list[Piece]:
    """Return the blocks that fill a rank's weights. What is added once, by rank 0, is made zero on the other ranks."""
    pieces = outer_pieces(weights, shard, names)
    for index, layer in enumerate(weights.layers):
        pieces += layer_pieces(index, layer, shard, names)
    return pieces


def outer_pieces(weights: Weights, shard: Shard, names: TensorNames) -> list[Piece]:
    """Return the blocks that fill the embedding, the last norm and the head."""
    outer, config = replace(weights, layers=()), replace(shard.local_config, layers=())
    pieces = []
    for name, stored in checkpoint_views(outer, config, names).items():
        is_split = name.startswith("lm_head.") and name != HEAD_BIAS
        first_row = _blocks(name, shard.vocabulary.start, stored.rows) if is_split else 0
        pieces.append(Piece(name, stored.values, first_row=first_row))
    return pieces


def layer_pieces(index: int, layer: LayerWeights, shard: Shard, names: TensorNames) -> list[Piece]:
    """Return the blocks that fill one layer."""
    own, config = shard.layers[index], shard.local_config.layers[index]
    pieces = _pieces_of_part(index, replace(layer, beside=None), config, own, shard, names)
    if layer.beside is not None and config.of_beside is not None and own.of_beside is not None:
        pieces += _pieces_of_part(index, layer.beside, config.of_beside, own.of_beside, shard, names)
    return pieces


def _pieces_of_part(
    index: int, layer: LayerWeights, config: LayerConfig, own: LayerShard, shard: Shard, names: TensorNames
) -> list[Piece]:
    """Return the blocks that fill a layer, or what it has beside its attention."""
    pieces, splits = [], _Splits(own, names, shard.rank, shard.world)
    for name, stored in layer_views(index, layer, config, names).items():
        _, _, in_layer = name.removeprefix(_LAYERS).partition(".")
        pieces += _of_layer(name, stored, in_layer, splits, shard.rank)
    return pieces


@dataclass(frozen=True, slots=True)
class _Splits:
    """Split of a layer's tensors, by their names within it without the last word, which is weight or bias."""

    layer: LayerShard
    names: TensorNames
    rank: int
    world: int

    @property
    def unturned_names(self) -> TensorNames:
        """Return the names of a checkpoint whose products have a row for each number that they make."""
        return replace(self.names, products_are_turned=False)

    def row_runs(self, tensor: str) -> list[_Run] | None:
        """Return a rank's rows of each of the matrices that a tensor holds; None for one that is not split by rows."""
        if tensor == self.names.attention_gate and self.layer.whole.attends:
            return [self._gate_of_heads]
        mixer = self.layer.whole.mixer
        is_space = isinstance(mixer, GatedDeltaConfig) and mixer.rule is not None
        if is_space and self.names.recurrence is not None and tensor == f"{self.names.recurrence.prefix}.norm":
            return [self._recurrent_heads.values]
        width = self._width(tensor)
        *_, linear = tensor.split(".")
        gate, up, gate_up, _ = self._gated_names(tensor)
        runs = {gate: [width], up: [width], gate_up: [width, width], **self._mixer_runs}
        return runs.get(linear)

    def columns(self, tensor: str) -> range | None:
        """Return a rank's columns of a tensor; None for one that is not split by columns."""
        *_, linear = tensor.split(".")
        *_, down = self._gated_names(tensor)
        if isinstance(self.layer.whole.mixer, GatedDeltaConfig):
            columns = dict.fromkeys(("out_proj", "o_proj", "dense"), self._recurrent_heads.values[0])
        elif isinstance(self.layer.whole.mixer, ShortConvolutionConfig):
            columns = {"out_proj": self._channels[0]}
        elif self.layer.whole.attends:
            columns = {
                self.names.attention_output.rpartition(".")[2]: _rows(
                    self.layer.heads.query, self.layer.whole.attention.output_dim
                )
            }
        else:
            columns = {}
        return (columns | {down: self._width(tensor)[0]}).get(linear)

    @property
    def _mixer_runs(self) -> dict[str, list[_Run]]:
        """Return a rank's rows of the tensors of the layer's mixer, by the last words of their names."""
        if isinstance(self.layer.whole.mixer, GatedDeltaConfig):
            own = self._recurrent_heads
            if self.layer.whole.mixer.fixed is not None:
                return {
                    "query_key_value": [own.keys, own.keys, own.values],
                    "g_proj": [own.values],
                    "g_norm": [own.values],
                }
            if self.layer.whole.mixer.has_channel_decays:  # what the gates of both kinds read is on every rank
                of_parts = {"q": [own.keys], "k": [own.keys], "v": [own.values]}
                return {
                    **{f"{part}_{kind}": runs for part, runs in of_parts.items() for kind in ("proj", "conv1d")},
                    "b_proj": [own.of_values],
                    "f_b_proj": [own.of_decays],
                    "g_b_proj": [own.values],
                }
            return {
                "in_proj_qkv": [own.keys, own.keys, own.values],
                "in_proj_z": [own.values],
                "in_proj_b": [own.of_values],
                "in_proj_a": [own.of_values],
                "conv1d": [own.keys, own.keys, own.values],
                "" if self.names.recurrence is None else self.names.recurrence.prefix: [own.of_values],
            }
        if isinstance(self.layer.whole.mixer, ShortConvolutionConfig):
            return {"in_proj": [self._channels] * 3, "conv": [self._channels]}
        if not self.layer.whole.attends:
            return {}
        attention = self.layer.whole.attention
        if isinstance(attention, LatentAttentionConfig):  # what makes latents is on every rank
            size = attention.sizes.plain + attention.sizes.value
            return {"kv_b_proj": [(_rows(self.layer.heads.query, size), attention.num_heads * size)]}
        query = _rows(self.layer.heads.query, attention.head_dim), attention.query_size
        kv = _rows(self.layer.heads.kv, attention.head_dim), attention.kv_size
        values = _rows(self.layer.heads.kv, attention.value_dim or attention.head_dim), attention.value_size
        heads = self.layer.heads.query, attention.num_heads
        return {
            "q_proj": [query],
            "k_proj": [kv],
            "v_proj": [values],
            **({} if self.names.qkv is None else {self.names.qkv: [query, kv, values]}),
            "self_attn": [heads],  # of its sinks
            **({"q_norm": [query], "k_norm": [kv]} if attention.qk_norm is QKNorm.ALL_HEADS else {}),
        }

    @property
    def _gate_of_heads(self) -> _Run:
        """Return a rank's rows of what gates its heads: one of each, or as many as a head has dimensions."""
        attention, own = self.layer.whole.attention, self.layer.heads.query
        if attention.gate is not None and attention.gate.by_dimension:
            return _rows(own, attention.head_dim), attention.query_size
        return own, attention.num_heads

    @property
    def _channels(self) -> _Run:
        """Return a rank's channels of a layer of a short convolution."""
        mixer = self.layer.whole.mixer
        assert isinstance(mixer, ShortConvolutionConfig), "the layer convolves"
        count = mixer.sizes.channels
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world), count

    @property
    def _recurrent_heads(self) -> "_RecurrentHeads":
        return _RecurrentHeads.of(self.layer, self.rank, self.world)

    def pieces_of_heads(self, name: str, stored: StoredTensor, tensor: str) -> list[Piece] | None:
        """Return the blocks of a tensor in which what a head, or a group of them, has lies together; None of others."""
        mixer = self.layer.whole.mixer
        if isinstance(mixer, GatedDeltaConfig):
            if mixer.has_channel_decays and name.rpartition(".")[2] in ("A_log", "dt_bias"):
                own = self._recurrent_heads
                rows, _ = own.of_values if name.endswith("A_log") else own.of_decays
                return [Piece(name, stored.values.view(-1, 1), first_row=rows.start, row_size=1)]
            sizes, first = mixer.sizes, self._recurrent_heads.groups.start
            if mixer.rule is not None and tensor.rpartition(".")[2] in ("in_proj", "conv1d"):
                return _pieces_of_space(name, stored, self._recurrent_heads, is_projection=tensor.endswith("in_proj"))
            in_group = sizes.num_value_heads // sizes.num_key_heads
            values = in_group * sizes.value_dim
            groups = {
                "in_proj_qkvz": (sizes.key_dim, sizes.key_dim, values, values),
                "in_proj_ba": (in_group, in_group),
            }
            parts = groups.get(tensor.rpartition(".")[2])
            return None if parts is None else _pieces_of_groups(name, stored, parts, first)
        if isinstance(mixer, LatentAttentionConfig):
            return self._pieces_of_latents(name, stored, tensor, mixer)
        if self.names.qkv_is_by_head and tensor == f"{self.names.attention}.{self.names.qkv}":
            return self._pieces_of_kv_heads(name, stored)
        if not isinstance(mixer, AttentionConfig) or tensor != "self_attn.q_proj":
            return None
        if mixer.gate is None or not mixer.gate.is_beside_queries:
            return None
        parts = (mixer.head_dim, mixer.head_dim)  # queries, then gates, of which the latter are first in memory
        return _pieces_of_groups(name, stored, parts, self.layer.heads.query.start, is_turned=True)

    def _pieces_of_kv_heads(self, name: str, stored: StoredTensor) -> list[Piece]:
        """Return the blocks of a tensor that has, of each KV head, its queries, its key and its value."""
        attention, heads = self.layer.whole.attention, self.layer.heads
        in_group, head_dim = attention.num_heads // attention.num_kv_heads, attention.head_dim
        if len(heads.query) == in_group * len(heads.kv):
            return _pieces_of_groups(name, stored, (in_group * head_dim, head_dim, head_dim), heads.kv.start)
        [kv] = heads.kv  # of which other ranks have other queries
        size = len(heads.query) * head_dim
        first_query, first_key = heads.query.start + 2 * kv, kv * (in_group + 2) + in_group  # heads of the tensor
        return [
            Piece(name, stored.values[:size], first_row=first_query * head_dim),
            Piece(name, stored.values[size:], first_row=first_key * head_dim),
        ]

    def _pieces_of_latents(
        self, name: str, stored: StoredTensor, tensor: str, mixer: LatentAttentionConfig
    ) -> list[Piece] | None:
        """Return the blocks of a tensor whose last rows, of each head, make what is rotated; None of others.

        A tensor of blocks of rows has what is rotated in one of them. Raises ModelError for another.
        """
        sizes, heads = mixer.sizes, self.layer.heads.query
        own = self.names.attention
        makes_queries = tensor == f"{own}.{'q_proj' if sizes.query_latent is None else 'q_b_proj'}"
        if not makes_queries and tensor != f"{own}.kv_a_proj_with_mqa":
            return None
        plain = sizes.plain if makes_queries else sizes.latent
        groups = heads if makes_queries else range(1)
        if stored.rows > 1:
            size = plain + sizes.rotated
            if any((head * size + plain) % stored.rows + sizes.rotated > stored.rows for head in groups):
                raise ModelError(f"{name} is stored by blocks of {stored.rows} rows, and a rotated part lies in two")
            whole = (mixer.num_heads if makes_queries else 1) * size
            return _pieces(name, stored, [(range(groups.start * size, groups.stop * size), whole)])
        by_head = stored.values.view(len(groups), plain + sizes.rotated, -1)
        pairs = by_head[:, plain:]
        if self.names.neighbours_are_pairs:
            pairs = pairs.view(len(groups), 2, sizes.rotated // 2, -1).transpose(1, 2)
        row_size = by_head[0].numel()
        return [
            Piece(name, by_head[:, :plain], groups.start, 0, row_size),
            Piece(name, pairs, groups.start, plain * by_head.shape[2], row_size),
        ]

    def has_pairs(self, tensor: str) -> bool:
        """Return whether a tensor makes what is rotated, in the order in which the pairs are neighbours."""
        return self.names.neighbours_are_pairs and tensor in ("self_attn.q_proj", "self_attn.k_proj")

    def pieces_of_pairs(self, name: str, stored: StoredTensor) -> list[Piece]:
        """Return the blocks of such a tensor, plain numbers: of each head what is rotated, and the rest."""
        attention = self.layer.whole.attention
        heads = self.layer.heads.query if ".q_proj." in name else self.layer.heads.kv
        size = attention.rope.rotated_dims(attention.head_dim)
        by_head = stored.values.view(len(heads), attention.head_dim, -1)
        pairs = by_head[:, :size].view(len(heads), 2, size // 2, -1).transpose(1, 2)
        row_size = by_head[0].numel()
        found = [Piece(name, pairs, first_row=heads.start, row_size=row_size)]
        if size < attention.head_dim:
            first = size * by_head.shape[2]
            found.append(Piece(name, by_head[:, size:], heads.start, first, row_size))
        return found

    def _width(self, tensor: str) -> _Run:
        """Return the width of a dense feed-forward, of an expert, or of the experts that all tokens visit."""
        whole = self.layer.whole.feed_forward
        if isinstance(whole, ExpertsConfig) and whole.shared is not None and tensor.startswith(self._shared):
            return self.layer.shared, whole.shared.width
        return self.layer.width, 0 if whole is None else whole.width

    def _gated_names(self, tensor: str) -> tuple[str, str, str, str]:
        """Return the names of gate, of up, of both as one, and of the last product of a feed-forward."""
        experts = self.names.experts
        if experts is not None and tensor.startswith(f"{experts.experts}."):
            return experts.gate, experts.up, "gate_up_proj", experts.down
        if experts is not None and experts.shared_gate_up is not None and tensor.startswith(self._shared):
            return "gate_proj", "up_proj", experts.shared_gate_up, experts.shared_down
        if not tensor.startswith(within(self.names.feed_forward, "")):
            return "gate_proj", "up_proj", "gate_up_proj", "down_proj"
        gate, up, down = self.names.dense
        return gate, up, "gate_up_proj", down

    @property
    def _shared(self) -> str:
        return "" if self.names.experts is None else f"{self.names.experts.shared}."


def _of_layer(name: str, stored: StoredTensor, in_layer: str, splits: _Splits, rank: int) -> list[Piece]:
    tensor, _, kind = in_layer.rpartition(".")
    if splits.names.products_are_turned and stored.values.dim() == 2:
        whole = _of_layer(name, turned(stored), in_layer, replace(splits, names=splits.unturned_names), rank)
        return [Piece(name, it.target.T, first_row=it.first_column, first_column=it.first_row) for it in whole]
    if (pieces := splits.pieces_of_heads(name, stored, tensor)) is not None:
        return pieces
    runs, columns = splits.row_runs(tensor), splits.columns(tensor)
    if splits.has_pairs(tensor):
        return splits.pieces_of_pairs(name, stored)
    if runs is not None:
        return _pieces(name, stored, runs)
    if columns is None:
        return [Piece(name, stored.values)]  # a norm, or a router: on every rank
    if kind != "bias":
        first = 0 if stored.columns is None else _blocks(name, columns.start, stored.columns)
        return [Piece(name, stored.values, first_column=first)]
    if rank == 0:
        return [Piece(name, stored.values)]
    stored.values.zero_()  # of the sum over the ranks
    return []


@dataclass(frozen=True, slots=True)
class _RecurrentHeads:
    """A rank's part of a recurrent layer: rows of its keys, of its values, and of what a value head has once.

    of_decays  rows of what each channel of a key of a value head has
    groups  its key heads, each with the value heads that it serves
    """

    groups: range
    keys: _Run
    values: _Run
    of_values: _Run
    of_decays: _Run

    @classmethod
    def of(cls, layer: LayerShard, rank: int, world: int) -> "_RecurrentHeads":
        assert isinstance(layer.whole.mixer, GatedDeltaConfig), "the layer is recurrent"
        sizes = layer.whole.mixer.sizes
        keys, values = (
            range(count * rank // world, count * (rank + 1) // world)
            for count in (sizes.num_key_heads, sizes.num_value_heads)
        )
        return cls(
            keys,
            (_rows(keys, sizes.key_dim), sizes.num_key_heads * sizes.key_dim),
            (_rows(values, sizes.value_dim), sizes.num_value_heads * sizes.value_dim),
            (values, sizes.num_value_heads),
            (_rows(values, sizes.key_dim), sizes.num_value_heads * sizes.key_dim),
        )


def _pieces_of_space(name: str, stored: StoredTensor, own: "_RecurrentHeads", *, is_projection: bool) -> list[Piece]:
    """Return the blocks of a tensor that has gates, x, B, C and steps, in memory C, B, x, gates, steps.

    That of the convolution has x, B and C alone.
    """
    runs = {"x": own.values, "b": own.keys, "c": own.keys}
    if is_projection:
        runs = {"gates": own.values, **runs, "steps": own.of_values}
    firsts, first = {}, 0
    for part, (rows, num_whole) in runs.items():
        firsts[part] = first + rows.start
        first += num_whole
    found, start = [], 0
    for part in ("c", "b", "x", "gates", "steps"):
        if part in runs:
            # The steps are last in both, so that their last block may be a part of one.
            is_end = part == "steps" and runs[part][0].stop == runs[part][1]
            count = -(-len(runs[part][0]) // stored.rows) if is_end else _blocks(name, len(runs[part][0]), stored.rows)
            first_row = _blocks(name, firsts[part], stored.rows)
            found.append(Piece(name, stored.values[start : start + count], first_row=first_row))
            start += count
    return found


def _pieces_of_groups(
    name: str, stored: StoredTensor, parts: tuple[int, ...], first_group: int, *, is_turned: bool = False
) -> list[Piece]:
    """Return the blocks of a tensor that has, of each group, rows of one part after those of another.

    parts      rows of a group's parts in the checkpoint; in memory those of all groups lie together
    is_turned  whether the last part is the first one in memory
    """
    sizes = [_blocks(name, size, stored.rows) for size in parts]
    num_groups, width = stored.values.shape[0] // sum(sizes), stored.values[0].numel()
    order = [*range(len(sizes))][::-1] if is_turned else [*range(len(sizes))]
    found, start = [], 0
    for part in order:
        size = sizes[part]
        target = stored.values[start : start + num_groups * size].view(num_groups, size * width)
        found.append(Piece(name, target, first_group, sum(sizes[:part]) * width, sum(sizes) * width))
        start += num_groups * size
    return found


def _rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _pieces(name: str, stored: StoredTensor, runs: list[_Run]) -> list[Piece]:
    pieces, start, first = [], 0, 0
    for rows, num_whole in runs:
        is_end = rows.stop == num_whole and start + -(-len(rows) // stored.rows) == stored.values.shape[0]
        count = -(-len(rows) // stored.rows) if is_end else _blocks(name, len(rows), stored.rows)
        first_row = _blocks(name, first + rows.start, stored.rows)
        pieces.append(Piece(name, stored.values[start : start + count], first_row=first_row))
        start, first = start + count, first + num_whole
    return pieces


def _blocks(name: str, size: int, block: int) -> int:
    """Return how many blocks hold so many rows or columns. Raises ModelError where a rank's part cuts one."""
    if size % block:
        raise ModelError(f"{name} is stored by blocks of {block}, and a rank's part has a border at {size}")
    return size // block
