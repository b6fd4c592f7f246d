"""The inputs of one forward pass as one object: what a new per-token input is added to."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.calls.indexed import Index
from kernels.fused.rope_kv import Turns
from server.model.kv_cache import KVCache
from server.model.layer_state import StepStates


class Attend(Protocol):
    """Computes attention over the pages of a step, layer by layer."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, index: Index | None = None, /) -> None:
        """Fill out [T, heads, d], of q [T, heads, d] and k, v [T, kv_heads, d], which are in their pages.

        layer  the place among the layers that attend
        index  of a layer that attends to chosen keys: what chooses them, or an earlier layer's choice
        q, k and v are views: a token's heads are contiguous, tokens are further apart.
        """


@dataclass(frozen=True, slots=True)
class Step:
    """A forward pass over T tokens, those of all sequences of the batch one after another.

    token_ids  [T] int64
    positions  [T] int32, below the model's max_position: each token's place in its sequence; [3, T] for a model whose
               positions have three parts
    slots      [T] int64, page * page_size + offset: where its keys and values are written; unique, in range
    kv         the cache whose pages are written
    attend     computes attention over the pages, layer by layer
    embedding_rows  [T] int64: the row of `embeddings` that a token has in place of its own embedding, 0 for none; None
               where no token has one
    embeddings  [N, hidden x (1 + layers)] in the dtype of the weights, its first row zero; None where no token has one.
               What is behind a row's first `hidden` numbers is added to the residual behind each of the first layers
    turns      by rotary table the rotations of these positions: the decoder adds them where torch rotates (on a CPU)
    states     of the layers that are no attention; None where there is none
    query_scales  [T, 1, 1] fp32: what a query is multiplied by behind the rotation, in the layers whose queries grow;
               the decoder adds it, None where nothing grows
    kept       by layer that attends [T, kv_heads, d]: keys and values that later layers read again. The forward pass
               fills it; None where no layer reads another's
    choices  by layer that attends and has an indexer its choice [T, count], which later layers may read again. The
               forward pass fills it; None where no layer has an indexer
    per_layer  [T, layers, width]: what each token gives to each layer, where a model has such embeddings: the decoder
               adds it
    tables     by rotary table [T, r] fp32 the row of each token, where positions have three parts: the decoder adds
               them, and counts the tokens in `positions`
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    kv: KVCache
    attend: Attend
    embedding_rows: Tensor | None = None
    embeddings: Tensor | None = None
    turns: tuple[Turns, ...] | None = None
    tables: tuple[Tensor, ...] | None = None
    states: StepStates | None = None
    query_scales: Tensor | None = None
    kept: dict[int, tuple[Tensor, Tensor]] | None = None
    choices: dict[int, Tensor] | None = None
    per_layer: Tensor | None = None


def with_embeddings(hidden: Tensor, step: Step) -> Tensor:
    """Return hidden [T, hidden], the embeddings of the step's token ids, with the step's own rows in their places."""
    if step.embedding_rows is None or step.embeddings is None:
        return hidden
    is_given = (step.embedding_rows > 0).unsqueeze(1)
    own = step.embeddings[:, : hidden.shape[1]]
    return torch.where(is_given, own.index_select(0, step.embedding_rows), hidden)


def added_behind(layer: int, hidden_size: int, step: Step) -> Tensor | None:
    """Return what the step's own rows add to the residual [T, hidden] behind a layer; None where they add nothing."""
    if step.embedding_rows is None or step.embeddings is None:
        return None
    first = (layer + 1) * hidden_size
    if step.embeddings.shape[1] <= first:
        return None
    return step.embeddings[:, first : first + hidden_size].index_select(0, step.embedding_rows)
