"""The inputs of one forward pass as one object: what a new per-token input is added to."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.fused.rope_kv import Turns
from server.model.kv_cache import KVCache

# attend(layer, q [T, heads, d], k [T, kv_heads, d], v, out [T, heads, d]) fills out; k and v are in their pages.
# q, k and v are views: a token's heads are contiguous, tokens are further apart.
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Step:
    """A forward pass over T tokens, those of all sequences of the batch one after another.

    token_ids  [T] int64
    positions  [T] int32, below the model's max_position: each token's place in its sequence
    slots      [T] int64, page * page_size + offset: where its keys and values are written; unique, in range
    kv         the cache whose pages are written
    attend     computes attention over the pages, layer by layer
    turns      by rotary table the rotations of these positions: the decoder adds them where torch rotates (on a CPU)
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    kv: KVCache
    attend: Attend
    turns: tuple[Turns, ...] | None = None
