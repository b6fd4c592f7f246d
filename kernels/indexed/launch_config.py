"""Tiles and scratch memory of the Triton path that chooses keys."""

from kernels.portable.launch_config import Tiles

CHOICE_WARPS = 8
_MOST_PARTS = 32  # of a row's chosen keys
_SCORES = 2**26  # numbers of the scratch memory: 256 MB
_LEAST_ROWS = 16  # whose scores are computed together, however long a context is
_PART = 256  # chosen keys, at whose multiples a row is cut: the name of the order says it


def score_tiles(element_bytes: int, shared: int | None) -> Tiles:
    """Return the tile of keys of the scores; its rows are the indexer's heads. `shared`: None in the interpreter."""
    if shared is None:
        return Tiles(0, 32, 4, 1)
    return Tiles(0, 32 if element_bytes == 4 else 64, 4, 1)


def choice_block(shared: int | None) -> int:
    """Return how many scores a program looks at together."""
    return 64 if shared is None else 2048


def row_chunk(num_columns: int) -> int:
    """Return for how many rows of so many keys scores are computed together."""
    return max(_LEAST_ROWS, _SCORES // max(1, num_columns))


def num_parts(count: int, block_n: int) -> tuple[int, int]:
    """Return in how many parts a row's chosen keys are cut, and the keys of a part: multiples of a tile."""
    size = max(_PART, -(-count // (_MOST_PARTS * block_n)) * block_n)
    return -(-count // size), size
