"""Every path of convolutions, in the order of preference, with its limits as data."""

from dataclasses import dataclass
from typing import ClassVar

from kernels.calls import launch
from kernels.convolution.calls import RunConvolution
from kernels.convolution.eager_path import run_convolution_eager
from kernels.convolution.shape import ConvolutionShape
from kernels.identity.source_digest import SOURCES
from kernels.identity.torch_kernels import TORCH_HELPERS
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import OperatorPath, Reject, Rejection
from kernels.vocabulary.path_order import tier_of
from kernels.vocabulary.recurrence_operator import CONVOLUTION
from kernels.vocabulary.shape import Dtype


@dataclass(frozen=True, slots=True)
class ConvolutionLimits:
    """The convolutions and machines that a path can compute, as data."""

    devices: frozenset[Device]
    dtypes: frozenset[Dtype]
    min_sm: int | None = None
    max_sm: int | None = None
    needs_triton: bool = False

    def rejections(self, shape: ConvolutionShape) -> list[Rejection]:
        """Every reason of the shape, not of the machine, why it cannot be computed."""
        if shape.dtype in self.dtypes:
            return []
        wanted = ", ".join(sorted(it.value for it in self.dtypes))
        return [Rejection(Reject.DTYPE, f"takes {wanted}, the shape has {shape.dtype.value}")]


@dataclass(frozen=True, slots=True)
class ConvolutionPath(OperatorPath[ConvolutionLimits, RunConvolution]):
    """A path of convolutions."""

    operator: ClassVar[Operator] = CONVOLUTION


def _triton_run() -> RunConvolution | None:
    if launch.triton_version() is None:
        return None
    from kernels.convolution.launch import run_convolution

    return run_convolution


_DTYPES = frozenset({Dtype.FP32, Dtype.FP16, Dtype.BF16})  # by name: a new member widens no path's limits
_ORDER = "taps"  # from the oldest token to the newest in fp32, then the bias, then the gate, each rounded

CONVOLUTION_PATHS: tuple[ConvolutionPath, ...] = (
    ConvolutionPath(
        "triton.convolution",
        tier_of("triton.convolution"),
        ConvolutionLimits(
            devices=frozenset({Device.CUDA, Device.INTERPRETER}), dtypes=_DTYPES, min_sm=80, needs_triton=True
        ),
        SOURCES.of("kernels.convolution.launch"),
        ("hallmark_convolution_",),
        _triton_run(),
        is_capturable=True,  # grids depend on the numbers of tokens and rows alone
        order=_ORDER,
    ),
    ConvolutionPath(
        "torch.convolution.cpu",
        tier_of("torch.convolution.cpu"),
        ConvolutionLimits(devices=frozenset({Device.CPU}), dtypes=_DTYPES),
        SOURCES.of("kernels.convolution.eager_path"),
        TORCH_HELPERS,
        run_convolution_eager,
        order=_ORDER,
    ),
)
