"""The shipped variants of `gluon.prefill.window.hopper`: what is compiled in, by head dim and group."""

from functools import lru_cache

from kernels.calls.batch import AttentionFlags
from kernels.hopper.variants import ROWS, Tiling, Variant

MAX_WINDOW = 128  # keys: all that a tile sees before its own tokens
MIN_GROUP = 2
PACKS = (2,)  # query heads of a KV head in 64 rows, the preferred first


def _tiling(consumers: int, block_d: int, stages: int, q_buffers: int) -> Tiling:
    return Tiling(
        consumers, block_d, MAX_WINDOW, stages, q_buffers, named_barriers=False, pv_first=False, lazy_rescale=False
    )


TILINGS: dict[int, Tiling] = {64: _tiling(3, 64, 3, 8), 128: _tiling(2, 128, 2, 3)}


def tokens_of(variant: Variant) -> int:
    """Tokens of one tile."""
    return ROWS // variant.pack


def window_variant(head_dim: int, group: int, flags: AttentionFlags) -> Variant:
    """The variant that serves these arguments. Raises ValueError for those that the path's limits reject."""
    if head_dim not in TILINGS:
        raise ValueError(f"head_dim: expected one of {', '.join(map(str, TILINGS))}, found {head_dim}")
    if flags.window is None or flags.window > MAX_WINDOW:
        raise ValueError(f"window: expected at most {MAX_WINDOW}, found {flags.window}")
    if flags.softcap is not None or flags.spans is not None:
        raise ValueError("softcap, spans: expected none")
    return _variant(head_dim, group, flags.sinks is not None)


@lru_cache
def _variant(head_dim: int, group: int, sinks: bool) -> Variant:
    pack = next((pack for pack in PACKS if group % pack == 0), None)
    if pack is None:
        raise ValueError(f"query heads of a KV head: expected a multiple of {PACKS[-1]}, found {group}")
    return Variant(TILINGS[head_dim], head_dim, window=True, sinks=sinks, pack=pack)
