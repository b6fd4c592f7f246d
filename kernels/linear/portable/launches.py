"""A launch of a Triton kernel as a value, which runs on a GPU, in the interpreter, or is compiled without either."""

from typing import Any, NamedTuple

import triton

from kernels.linear.portable.tiles import ProductTile


class Launch(NamedTuple):
    """A kernel's launch: its arguments, and its constexpr parameters and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)


def grid_of(num_rows: int, size_out: int, tile: ProductTile) -> tuple[int]:
    """Return the programs of a product, one a tile."""
    return (triton.cdiv(size_out, tile.block_n) * triton.cdiv(num_rows, tile.block_m),)


def options_of(tile: ProductTile) -> dict[str, int]:
    """Return a tile as parameters of a kernel, but for its columns, and its launch options."""
    return {
        "BLOCK_N": tile.block_n,
        "BLOCK_M": tile.block_m,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
