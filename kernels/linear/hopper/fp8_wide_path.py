"""Products of more than 64 rows with weights of 8 bits by the kernel of `fp8_wide.py`: two launches.

The first rounds the inputs, where the norm before them has not.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.calls.processors import num_processors
from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_weights import Fp8BlocksWeight, Fp8StaticWeight, Fp8Weight
from kernels.linear.hopper.fp8_norm import round_norm
from kernels.linear.hopper.fp8_rounding import padded_codes
from kernels.linear.hopper.fp8_wide import launch_fp8_wide, launcher
from kernels.linear.hopper.fp8_wide_tilings import Fp8WideTiling, WideScales, fp8_wide_tiling, fp8_wide_tilings
from kernels.linear.rounded_input import Input, RoundedInput, TakesRounded


@dataclass(frozen=True, slots=True)
class RunFp8Wide(TakesRounded):
    """Products of any number of rows.

    size_in and size_out multiples of 16, of SwiGLU with scales of blocks size_out of 128.
    """

    def __call__(self, x: Input, weight: Fp8Weight, bias: Tensor | None, epilogue: Epilogue, out: Tensor, /) -> None:
        """Fill out [rows, size_out] with epilogue(x [rows, size_in] @ weight^T + bias), x rounded as the format says.

        A plain x with its last dim contiguous.
        """
        kind, of_bias, device = scales_of(weight), None if bias is None else bias.dtype, out.device
        _load(device, epilogue.parts, kind, out.dtype, of_bias)
        tiling = _tiling(device, x.shape[0], out.shape[1], epilogue.parts, bias is not None, kind)
        codes, scales = (x.codes, x.scales) if isinstance(x, RoundedInput) else padded_codes(x, weight)
        launch_fp8_wide(codes, scales, weight.codes, weight.scales, bias, out, tiling)

    def round_norm(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Fp8Weight, /
    ) -> tuple[Tensor, Tensor]:
        return round_norm(x, residual, norm, eps, weight)


run_fp8_wide = RunFp8Wide()


def scales_of(weight: Fp8Weight) -> WideScales:
    """Return the kind of scales of a weight's products."""
    if isinstance(weight, Fp8BlocksWeight):
        return WideScales.BLOCKS
    return WideScales.STATIC if isinstance(weight, Fp8StaticWeight) else WideScales.ROWS


# A kernel that is loaded stays so: the cache holds what has been done. A bucket of rows has several tilings, and the
# first call of each product comes before the engine is ready.
@lru_cache(maxsize=256)
def _load(
    device: torch.device, parts: int, scales: WideScales, dtype_out: torch.dtype, of_bias: torch.dtype | None
) -> None:
    for tiling in fp8_wide_tilings(parts=parts, has_bias=of_bias is not None, scales=scales):
        launcher(tiling, dtype_out, of_bias, device)


# A pure function of what it is given: the cache holds no state.
@lru_cache(maxsize=4096)
def _tiling(
    device: torch.device, num_rows: int, size_out: int, parts: int, has_bias: bool, scales: WideScales
) -> Fp8WideTiling:
    processors = num_processors(device)
    return fp8_wide_tiling(num_rows, size_out, processors, parts=parts, has_bias=has_bias, scales=scales)
