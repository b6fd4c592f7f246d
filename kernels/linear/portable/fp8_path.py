"""Products with weights of 8 bits in Triton: two launches, which round the inputs and multiply."""

from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import Fp8BlocksWeight, Fp8StaticWeight, Fp8Weight
from kernels.linear.portable.fp8_inputs import rounded_inputs
from kernels.linear.portable.fp8_matmul import hallmark_fp8_matmul
from kernels.linear.portable.launches import Launch, grid_of, options_of
from kernels.linear.portable.tiles import MOST_FEW, ProductTile, fp8_tile


def run_fp8(x: Tensor, weight: Fp8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias), x rounded as the format says.

    Up to 64 rows as products in fp16, of more by the matrix units' own of 8 bits.
    """
    _run(x, weight, bias, epilogue, out, as_half=x.shape[0] <= MOST_FEW)


def run_fp8_as_half(x: Tensor, weight: Fp8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out likewise, by products in fp16 of any number of rows: all that is summed is fp32."""
    _run(x, weight, bias, epilogue, out, as_half=True)


def _run(x: Tensor, weight: Fp8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor, *, as_half: bool) -> None:
    tile = fp8_tile(x.shape[0], out.shape[1], parts=epilogue.parts)
    for launch in fp8_launches(x, weight, bias, epilogue, out, tile, as_half=as_half):
        launch.run()


def fp8_launches(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor, tile: ProductTile, *,
    as_half: bool,
) -> tuple[Launch, ...]:  # fmt: skip
    """Return the launches of a product by one tile. x with its last dim contiguous, out wholly so."""
    num_rows, size_in = x.shape
    size_out = out.shape[1]
    codes, scales, launch = rounded_inputs(x, weight)
    arguments = (
        codes, scales, weight.codes, weight.scales, bias, out, num_rows, size_out, size_in, codes.shape[1],
    )  # fmt: skip
    options = {
        "IN_BLOCKS": isinstance(weight, Fp8BlocksWeight),
        "IS_STATIC": isinstance(weight, Fp8StaticWeight),
        "PARTS": epilogue.parts,
        "HAS_BIAS": bias is not None,
        "AS_HALF": as_half,
        "EVEN_K": size_in % tile.block_k == 0,
        "BLOCK_K": tile.block_k,
    }
    grid = grid_of(num_rows, size_out, tile)
    return launch, Launch(hallmark_fp8_matmul, grid, arguments, {**options, **options_of(tile)})
