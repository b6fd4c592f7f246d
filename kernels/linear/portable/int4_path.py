"""Products with weights of 4 bits in Triton: one launch."""

from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.int4_weights import Int4Weight
from kernels.linear.portable.int4_matmul import hallmark_int4_matmul
from kernels.linear.portable.launches import Launch, grid_of, options_of
from kernels.linear.portable.tiles import ProductTile, int4_tile


def run_int4(x: Tensor, weight: Int4Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias)."""
    sizes = {"parts": epilogue.parts, "group": weight.group, "bytes_of_x": x.element_size()}
    int4_launch(x, weight, bias, epilogue, out, int4_tile(x.shape[0], out.shape[1], **sizes)).run()


def int4_launch(
    x: Tensor, weight: Int4Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor, tile: ProductTile
) -> Launch:
    """Return the launch of a product by one tile, whose columns are a group.

    x with its last dim contiguous, out wholly so.
    """
    num_rows, size_in = x.shape
    size_out = out.shape[1]
    arguments = (
        x, weight.codes, weight.scales, weight.zeros, bias, out, num_rows, size_out, size_in, x.stride(0),
        weight.codes.shape[1], weight.scales.shape[1],
    )  # fmt: skip
    options = {
        "PARTS": epilogue.parts,
        "HAS_BIAS": bias is not None,
        "EVEN_K": size_in % weight.group == 0,
        "GROUP": weight.group,
    }
    return Launch(hallmark_int4_matmul, grid_of(num_rows, size_out, tile), arguments, {**options, **options_of(tile)})
