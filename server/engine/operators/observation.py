"""Copies of what the layers of one step hand out, the same on rank 0 for any number of ranks.

Of several ranks each has its own heads: they are joined layer by layer, so that all ranks must observe a step together.
"""

from enum import Enum

import torch
from torch import Tensor

from qualification.model.config import ModelConfig
from qualification.model.gated_delta import GatedDeltaConfig
from server.engine.operators.attention_table import Choice
from server.engine.operators.dispatch import PhasePart
from server.model.kv_cache import KVCache
from server.model.ranks import Ranks


class Border(Enum):
    """A tensor between two sections of a layer."""

    RESIDUAL = "residual"  # [T, hidden] before the mixer
    ATTENTION_READ = "what attention reads"  # [T, hidden]
    QUERIES = "queries"  # [T, heads, d], rotated
    KEYS = "keys"  # [T, kv_heads, d], as they are in their pages
    VALUES = "values"
    INDEX_QUERIES = "queries of the indexer"  # [T, heads, d], rotated
    INDEX_WEIGHTS = "weights of the indexer"  # [T, heads]
    CHOICE = "choice of keys"  # [T, count], positions; of a layer that reads an earlier one's, what it reads
    ATTENDED = "attention"  # [T, heads, d]
    RESIDUAL_BEHIND_ATTENTION = "residual behind attention"  # [T, hidden]
    RECURRENT_INPUT = "what a recurrence reads"  # [T, n]: queries, keys, values, and the gates of its result
    RECURRENT_GATES = "gates of a recurrence"  # [T, heads + decays]: of writing, of decay; or [T, heads]: steps
    CONVOLUTION_READ = "what a convolution reads"  # [T, 3 * channels]: both gates, and the inputs
    CONVOLVED = "convolution"  # [T, channels], gated
    RECURRED = "recurrence"  # [T, heads, d], before its norm
    FEED_FORWARD_READ = "what the feed-forward reads"  # [T, hidden]
    RESIDUAL_BEHIND_FEED_FORWARD = "residual behind the feed-forward"  # [T, hidden], where the layer still changes it


class Observation:
    """Tensors that the layers of one step handed out, by layer and border. Give it to `Worker.launch` once."""

    def __init__(self, ranks: Ranks, kv: KVCache, config: ModelConfig) -> None:
        """`config`: of this rank's part of the model."""
        self._ranks = ranks
        self._kv = kv
        self._config = config
        self._slots = torch.zeros(0, dtype=torch.int64)
        self._taken: dict[tuple[int, Border], list[Tensor]] = {}
        self._spans: dict[tuple[int, int], Tensor | None] = {}

    def begin(self, slots: Tensor) -> None:
        """Note where the step's keys and values are written: slots [T] of the cache."""
        self._slots = slots

    def on_attention(self, layer: int, read: Tensor, residual: Tensor) -> None:
        self._keep(layer, Border.RESIDUAL, residual.clone())
        self._keep(layer, Border.ATTENTION_READ, read.clone())

    def on_feed_forward(self, layer: int, read: Tensor, residual: Tensor) -> None:
        self._keep(layer, Border.RESIDUAL_BEHIND_ATTENTION, residual.clone())
        self._keep(layer, Border.FEED_FORWARD_READ, read.clone())

    def on_recurrence(self, layer: int, projected: Tensor, gates: Tensor, out: Tensor) -> None:
        mixer = next(iter(self._config.layers[layer].recurrences), None)
        assert isinstance(mixer, GatedDeltaConfig), "other layers hand out none"
        sizes, num_tokens = mixer.sizes, out.shape[0]
        keys = sizes.num_key_heads * sizes.key_dim
        by_head = (sizes.key_dim, sizes.key_dim, sizes.value_dim, sizes.value_dim)
        parts = projected.split_with_sizes((keys, keys, mixer.value_size, mixer.value_size), dim=1)
        whole = [self._joined(it.reshape(num_tokens, -1, dim)) for it, dim in zip(parts, by_head, strict=True)]
        self._keep(layer, Border.RECURRENT_INPUT, torch.cat([it.flatten(1) for it in whole], dim=1))
        heads = sizes.num_value_heads
        if mixer.fixed is not None:  # whose rule has none
            self._keep(layer, Border.RECURRENT_GATES, gates)
            self._keep(layer, Border.RECURRED, self._joined(out))
            return
        kinds = gates.tensor_split((heads,) if mixer.rule is None else (), dim=1)
        both = [self._joined(it.reshape(num_tokens, heads, -1)) for it in kinds]
        self._keep(layer, Border.RECURRENT_GATES, torch.cat([it.flatten(1) for it in both], dim=1))
        self._keep(layer, Border.RECURRED, self._joined(out))

    def on_convolution(self, layer: int, projected: Tensor, out: Tensor) -> None:
        whole = [self._joined(it.unsqueeze(2)).flatten(1) for it in (*projected.chunk(3, dim=1), out)]
        self._keep(layer, Border.CONVOLUTION_READ, torch.cat(whole[:3], dim=1))
        self._keep(layer, Border.CONVOLVED, whole[3])

    def on_finish(self, layer: int, residual: Tensor) -> None:
        self._keep(layer, Border.RESIDUAL_BEHIND_FEED_FORWARD, residual.clone())

    def take_call(
        self, choice: Choice, part: PhasePart, place: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        """Take a call of attention for one phase of the step; `place` is among the layers that attend."""
        del choice, k, v  # of the keys and values those count that are in the cache
        layer = self._config.attention_layers[place]
        keys, values = self._kv.layers[place].at(self._slots[part.tokens])
        self._keep(layer, Border.QUERIES, self._joined(q))
        self._keep(layer, Border.KEYS, self._joined(keys))
        self._keep(layer, Border.VALUES, self._joined(values))
        self._keep(layer, Border.ATTENDED, self._joined(out))
        if (index := part.index) is not None:
            self._keep(layer, Border.CHOICE, index.chosen.clone())
            if index.queries is not None and index.weights is not None:
                self._keep(layer, Border.INDEX_QUERIES, index.queries.clone())
                self._keep(layer, Border.INDEX_WEIGHTS, index.weights.clone())
        self._spans[part.tokens.start, part.tokens.stop] = None if part.spans is None else part.spans.clone()

    def spans(self) -> Tensor | None:
        """Return [T, 2] int32 what the step has told paths of spans, of all its tokens; None where of none."""
        given = [(edges, it) for edges, it in sorted(self._spans.items(), key=lambda it: it[0])]
        if all(it is None for _, it in given):
            return None
        parts = [torch.zeros(stop - start, 2, dtype=torch.int32) if it is None else it for (start, stop), it in given]
        return torch.cat([it.cpu() for it in parts])

    def at(self, layer: int, border: Border) -> Tensor:
        """Return the tensor at a border, of all tokens of the step. Of several ranks KV heads may be there twice."""
        return torch.cat(self._taken[layer, border])

    def _keep(self, layer: int, border: Border, tensor: Tensor) -> None:
        self._taken.setdefault((layer, border), []).append(tensor)

    def _joined(self, heads: Tensor) -> Tensor:
        """Return the heads [T, all heads, d] of all ranks, of this rank's [T, heads, d]."""
        num_tokens, num_heads, head_dim = heads.shape
        if self._ranks.world == 1:
            return heads.clone()
        flat = heads.reshape(num_tokens, num_heads * head_dim).contiguous()
        joined = self._ranks.joined(flat, [flat.shape[1]] * self._ranks.world)
        return joined.view(num_tokens, -1, head_dim)
