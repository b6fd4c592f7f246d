"""Images that no client sent: so that the tower's kernels are compiled, and its memory is known, before ready."""

import math
from collections.abc import Iterable

from server.engine.execution.commands import ImageRows
from server.engine.execution.worker import Worker

_SIZES = (1, 2, 4, 16, 64, 256, 1024, 4096)  # tokens: lengths of each bucket, and numbers of rows of each product


def warm_up_images(worker: Worker, max_image_tokens: int, *, is_cuda: bool) -> None:
    """Compute images of all kinds of sizes; on a CPU, where nothing is compiled, a small one."""
    sizes = [size for size in _SIZES if size < max_image_tokens] if is_cuda else []
    run_images(worker, [*sizes, max_image_tokens] if is_cuda else [1])


def run_images(worker: Worker, sizes: Iterable[int]) -> None:
    """Compute an image of about so many tokens after the other, by itself and beside a small one; wait for all.

    Where all images of a model have one size, as many of them as have so many tokens; of tiles so many, one at least.
    """
    assert worker.tower is not None, "only a server that takes images computes any"
    config = worker.tower.config
    for size in sizes:
        if config.is_tiled and config.image_side is not None:
            height = config.most_patches(size) // config.image_side
            num_tokens = height * config.image_side // config.merge**2
            worker.write_images([_rows((height, config.image_side), num_tokens, config.patch_size)])
            continue
        side = math.isqrt(config.most_patches(size)) // config.merge
        square = _rows((side * config.merge, side * config.merge), side * side, config.patch_size)
        worker.write_images([square] * (size // side**2 if config.image_side == side * config.merge else 1))
        if side * side < size and config.image_side is None:
            worker.write_images([square, _rows((config.merge, config.merge), 1, config.patch_size)])
    worker.synchronize()
    worker.take_tower_times()


def _rows(grid: tuple[int, int], num_tokens: int, patch_size: int) -> ImageRows:
    return ImageRows(grid, bytes(3 * grid[0] * grid[1] * patch_size**2), list(range(1, num_tokens + 1)))
