"""Tiles of the Triton path whose values are the first numbers of its keys."""

from kernels.portable.launch_config import SHARED_BYTES_HOPPER, Tiles

_INTERPRETED = Tiles(32, 32, 4, 1)  # small: so that short test inputs cross tile edges


def latent_tiles(element_bytes: int, rows: int, shared: int | None) -> Tiles:
    """Return the tile of query rows and keys.

    rows    that a tile should have room for, as far as registers do
    shared  bytes that one program can have; None in the interpreter
    """
    if shared is None:
        return _INTERPRETED
    if element_bytes == 4:
        return Tiles(16, 16, 8, 1)  # fp32 FMAs, for tests
    block_m = min(64, max(16, 1 << (rows - 1).bit_length()))
    if shared < SHARED_BYTES_HOPPER:
        return Tiles(min(block_m, 32), 16, 4, 2)
    # 64 rows by 512 numbers of an output take 128 registers of each of 256 threads; 32 by 128 threads spill.
    return Tiles(block_m, 32, 4 if block_m == 16 else 8, 2)
