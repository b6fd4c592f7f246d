"""Every path of products with weights, in the order of preference, with its limits as data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels import launch
from kernels.fingerprint import Device, Fingerprint
from kernels.linear.shape import Epilogue, LinearRows, LinearShape
from kernels.linear.torch_path import run_torch
from kernels.path import Reject, Rejection, Tier
from kernels.processors import num_processors
from kernels.shape import Dtype
from kernels.source_digest import SourceDigests

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.tuned import ChosenProduct

# Fills `out` [rows, size_out], its last argument, with epilogue(x @ weight^T + bias).
RunLinear = Callable[["Tensor", "Tensor", "Tensor | None", Epilogue, "Tensor"], None]


@dataclass(frozen=True, slots=True)
class LinearLimits:
    """The products and machines that a path can compute, as data: a refusal does not import the kernel."""

    devices: frozenset[Device]
    dtypes: frozenset[Dtype]
    epilogues: frozenset[Epilogue]
    bias: bool = True
    min_sm: int | None = None
    max_sm: int | None = None
    needs_triton: bool = False
    size_in_multiple: int = 1
    size_out_multiple: int = 1
    min_rows: int = 1
    max_rows: int | None = None
    strided: bool = True  # rows of x may be further apart than they are long

    def rejections(self, shape: LinearShape) -> list[Rejection]:
        """Every reason of the shape, not of the machine, why it cannot be computed."""
        found = []
        if shape.dtype not in self.dtypes:
            found.append(Rejection(Reject.DTYPE, f"takes {_values(self.dtypes)}, the shape has {shape.dtype.value}"))
        if shape.epilogue not in self.epilogues:
            detail = f"stores {_values(self.epilogues)}, the shape has {shape.epilogue.value}"
            found.append(Rejection(Reject.LAYOUT, detail))
        if shape.has_bias and not self.bias:
            found.append(Rejection(Reject.LAYOUT, "takes no bias"))
        for name, size, multiple in (
            ("columns", shape.size_in, self.size_in_multiple),
            ("results", shape.size_out, self.size_out_multiple),
        ):
            if size % multiple:
                found.append(Rejection(Reject.LAYOUT, f"takes multiples of {multiple} {name}, the shape has {size}"))
        if shape.rows.lo + 1 < self.min_rows:
            found.append(Rejection(Reject.LENGTH, f"takes {self.min_rows} rows or more, the shape {shape.rows.label}"))
        if self.max_rows is not None and (shape.rows.hi is None or shape.rows.hi > self.max_rows):
            found.append(Rejection(Reject.LENGTH, f"takes at most {self.max_rows} rows, the shape {shape.rows.label}"))
        return found


@dataclass(frozen=True, slots=True)
class LinearPath:
    """An entry of the catalog."""

    name: str
    tier: Tier
    limits: LinearLimits
    source_digest: str  # of what its sources compute: `kernels/source_digest.py`
    kernel_names: tuple[str, ...]  # at least one of these substrings must be in every profiler kernel name it launches
    run: RunLinear | None  # None where its module cannot be imported, or where `run_chosen` makes it of an algorithm
    is_capturable: bool = True

    def rejects(self, shape: LinearShape, machine: Fingerprint) -> tuple[Rejection, ...]:
        """Every reason why this path cannot compute `shape` on that machine; empty when it can."""
        limits, found = self.limits, []
        if machine.device not in limits.devices:
            wanted = " or ".join(sorted(device.value for device in limits.devices))
            found.append(Rejection(Reject.ARCH, f"runs on {wanted}, this machine is {machine.device.value}"))
        elif limits.min_sm is not None and machine.sm is not None and machine.sm < limits.min_sm:
            found.append(Rejection(Reject.ARCH, f"needs sm_{limits.min_sm}, this GPU is sm_{machine.sm}"))
        elif limits.max_sm is not None and machine.sm is not None and machine.sm > limits.max_sm:
            found.append(Rejection(Reject.ARCH, f"is made for sm_{limits.max_sm}, this GPU is sm_{machine.sm}"))
        elif limits.needs_triton and machine.triton is None:
            found.append(Rejection(Reject.ARCH, "needs triton, which is not installed here (it exists for Linux only)"))
        return (*found, *limits.rejections(shape))


def _values(members: frozenset[Dtype] | frozenset[Epilogue]) -> str:
    return ", ".join(sorted(member.value for member in members))


def _run_skinny(x: "Tensor", weight: "Tensor", bias: "Tensor | None", epilogue: Epilogue, out: "Tensor") -> None:
    from kernels.linear.skinny import launch_skinny
    from kernels.linear.tilings import skinny_tiling

    sizes = x.shape[0], out.shape[1], x.shape[1], num_processors(x.device)
    tiling = skinny_tiling(*sizes, parts=epilogue.parts, has_bias=bias is not None)
    if tiling is None:
        raise NotTakenError(f"the skinny matmul does not take {x.shape[0]} rows of {x.shape[1]} columns")
    launch_skinny(x, weight, bias, out, tiling)


def _run_wide(x: "Tensor", weight: "Tensor", bias: "Tensor | None", epilogue: Epilogue, out: "Tensor") -> None:
    from kernels.linear.tilings import wide_tiling
    from kernels.linear.wide import launch_wide

    sizes = x.shape[0], out.shape[1], x.shape[1], num_processors(x.device)
    tiling = wide_tiling(*sizes, parts=epilogue.parts, has_bias=bias is not None)
    if tiling is None:
        raise NotTakenError(f"the wide matmul leaves {x.shape[0]} rows of {x.shape[1]} columns to the library")
    launch_wide(x, weight, bias, out, tiling)


class NotTakenError(Exception):
    """A path was asked for a product that it leaves to another; the message says which."""


def run_chosen(chosen: "ChosenProduct") -> RunLinear:
    """Return `cublaslt.linear` with the algorithms that were measured for one weight."""
    from kernels.fused.activation import swiglu

    def run(x: "Tensor", weight: "Tensor", bias: "Tensor | None", epilogue: Epilogue, out: "Tensor") -> None:
        if bias is not None or not chosen.takes(x, weight):
            raise NotTakenError(f"no algorithm is chosen for {x.shape[0]} rows of {x.shape[1]} columns")
        if epilogue is Epilogue.SWIGLU:
            out.copy_(swiglu(chosen.product(x, weight)))
        else:
            out.copy_(chosen.product(x, weight))

    return run


_SOURCES = SourceDigests()
_ALL_DTYPES = frozenset({Dtype.FP32, Dtype.FP16, Dtype.BF16})  # by name: a new member widens no path's limits
_HALF_DTYPES = frozenset({Dtype.FP16, Dtype.BF16})
_ALL_EPILOGUES = frozenset({Epilogue.NONE, Epilogue.SWIGLU, Epilogue.FP32})
_HAS_TRITON = launch.triton_version() is not None
# What PyTorch launches: the products of its libraries, the sum of their parts, and copies around them.
_LIBRARY_KERNELS = ("nvjet", "xmma", "cutlass", "gemm", "gemv", "cublas", "splitK", "at::native", "Memcpy", "Memset")
_GATED = "_gated_kernel"  # of SwiGLU behind a product that does not hold it


def _hopper_limits(min_rows: int, max_rows: int, size_out_multiple: int) -> LinearLimits:
    return LinearLimits(
        devices=frozenset({Device.CUDA}),
        dtypes=_HALF_DTYPES,
        epilogues=_ALL_EPILOGUES,
        min_sm=90,
        max_sm=90,
        needs_triton=True,
        size_in_multiple=8,  # TMA's rows of whole 16 bytes
        size_out_multiple=size_out_multiple,
        min_rows=min_rows,
        max_rows=max_rows,
    )


LINEAR_PATHS: tuple[LinearPath, ...] = (
    LinearPath(
        "gluon.linear.skinny",
        Tier.FIRST,
        _hopper_limits(1, LinearRows.LE_32.hi or 0, 1),
        _SOURCES.of("kernels.linear.skinny"),
        ("hallmark_skinny_matmul",),
        _run_skinny if _HAS_TRITON else None,
    ),
    LinearPath(
        "gluon.linear.wide",
        Tier.FIRST,
        _hopper_limits(LinearRows.LE_64.lo + 1, LinearRows.LE_128.hi or 0, 8),
        _SOURCES.of("kernels.linear.wide"),
        ("hallmark_wide_matmul",),
        _run_wide if _HAS_TRITON else None,
    ),
    LinearPath(
        "cublaslt.linear",
        Tier.FIRST,
        LinearLimits(
            devices=frozenset({Device.CUDA}),
            dtypes=_HALF_DTYPES,
            epilogues=_ALL_EPILOGUES,
            bias=False,
            size_in_multiple=8,
            size_out_multiple=8,
            min_rows=LinearRows.LE_112.lo + 1,
            max_rows=LinearRows.LE_8K.hi,
            strided=False,
        ),
        _SOURCES.of("kernels.linear.cublaslt"),
        (*_LIBRARY_KERNELS, _GATED),
        None,
    ),
    LinearPath(
        "torch.linear",
        Tier.FALLBACK,
        LinearLimits(
            devices=frozenset({Device.CPU, Device.CUDA, Device.INTERPRETER}),
            dtypes=_ALL_DTYPES,
            epilogues=_ALL_EPILOGUES,
        ),
        _SOURCES.of("kernels.linear.torch_path"),
        (*_LIBRARY_KERNELS, _GATED, "mkl", "addmm"),
        run_torch,
    ),
)
