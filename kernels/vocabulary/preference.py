"""The order in which the library asks the paths of attention for a shape, from what the reviewed matrices show.

`tests/qualification/decision/test_library_choice.py` holds it against every row of them: for each shape the path that
serves is the fastest proven one, but where Triton's saves the device less than its launch takes the host.
"""

from collections.abc import Iterable
from dataclasses import replace

from kernels.vocabulary.path import KernelPath
from kernels.vocabulary.shape import AttentionShape, Phase

_ROWS_OF_A_TILE = 16  # query tokens x heads of a group, in decode


def asked_for(
    catalog: Iterable[KernelPath], shape: AttentionShape, max_seqlen_q: int
) -> tuple[tuple[KernelPath, AttentionShape], ...]:
    """Every path of attention, the most preferred first, each with the shape that it is asked for.

    The order is the catalog's, but where another path is known to be faster.
    A few query tokens a sequence, as when drafted ones are verified, are decode for the paths that take so many. These
    come first where the rows of a KV head fill one tile of theirs; where they fill two, keys would be read twice.
    """
    paths = sorted(catalog, key=lambda path: not _is_faster(path, shape))
    if shape.phase is not Phase.EXTEND:
        return tuple((path, shape) for path in paths)
    few = replace(shape, phase=Phase.DECODE)
    asked = [(path, few if path.max_queries >= max_seqlen_q else shape) for path in paths]
    if max_seqlen_q * (shape.num_heads // shape.num_kv_heads) <= _ROWS_OF_A_TILE:
        asked.sort(key=lambda pair: pair[1] is shape)
    return tuple(asked)


def _is_faster(path: KernelPath, shape: AttentionShape) -> bool:
    """Return whether the path is faster for this shape, should it serve it, than those before it in the catalog."""
    if path.limits.max_window is not None:  # made for short windows: 1.7 to 2 times as fast as those for any
        return True
    return path.name == "triton.decode" and _is_slow_by_gluon(shape)


def _is_slow_by_gluon(shape: AttentionShape) -> bool:
    """Return whether it is decode of 96 numbers a head without groups, over 2,048 keys or more.

    Gluon takes 1.2 to 1.3 times as long as Triton (Phi-3 on an H200 and an H100), and is faster over fewer keys.
    """
    is_alone = shape.head_dim == 96 and shape.num_heads == shape.num_kv_heads and shape.window is None
    return shape.phase is Phase.DECODE and is_alone and shape.context_bucket.lo >= 2048
