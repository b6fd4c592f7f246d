"""`torch.linear.tiles`: products with weights by tiles of 16 rows."""

from typing import TYPE_CHECKING

from torch import Tensor

from kernels.fused.activation_kind import Activation
from kernels.fused.alike import gated_alike
from kernels.linear.epilogue import Epilogue
from kernels.linear.ordered.tile_products import multiply_tiles

if TYPE_CHECKING:
    from kernels.linear.weights import PlainWeight


def run_linear_tiles(x: Tensor, weight: "PlainWeight", bias: Tensor | None, epilogue: Epilogue, out: Tensor) -> None:
    """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias); there is no epilogue of fp32."""
    found = multiply_tiles(x, weight.values, bias)
    out.copy_(gated_alike(found, Activation.SILU) if epilogue is Epilogue.SWIGLU else found)
