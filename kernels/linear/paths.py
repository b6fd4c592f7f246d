"""Every path of products with weights, in the order of preference, with its limits as data."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from kernels.calls import launch
from kernels.calls.processors import num_processors
from kernels.identity.source_digest import SOURCES
from kernels.identity.torch_kernels import GEMMS, TORCH_HELPERS
from kernels.linear.epilogue import Epilogue
from kernels.linear.formats.fp8_torch_path import run_fp8_torch
from kernels.linear.formats.int4_formats import INT4_32, INT4_FORMATS
from kernels.linear.formats.int4_torch_path import run_int4_torch
from kernels.linear.hopper.tilings import wide_tiling
from kernels.linear.library.library_path import RunProposed
from kernels.linear.ordered.library_path import RunProposedInOrder
from kernels.linear.ordered.tiles_path import run_linear_tiles
from kernels.linear.shape import FP8_BLOCKS, FP8_FORMATS, PLAIN, LinearShape, WeightFormat
from kernels.linear.torch_path import run_torch
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import OperatorPath, Reject, Rejection
from kernels.vocabulary.path_order import tier_of
from kernels.vocabulary.row_buckets import LinearRows
from kernels.vocabulary.shape import Dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Fills `out` [rows, size_out], its last argument, with epilogue(x @ weight^T + bias), the weight in the path's format.
RunLinear = Callable[["Tensor", Any, "Tensor | None", Epilogue, "Tensor"], None]


@dataclass(frozen=True, slots=True)
class LinearLimits:
    """The products and machines that a path can compute, as data: a refusal does not import the kernel."""

    devices: frozenset[Device]
    dtypes: frozenset[Dtype]
    epilogues: frozenset[Epilogue]
    formats: frozenset[WeightFormat] = frozenset({PLAIN})
    bias: bool = True
    min_sm: int | None = None
    max_sm: int | None = None
    needs_triton: bool = False
    size_in_multiple: int = 1
    size_out_multiple: int = 1
    gated_multiple: int = 1  # of the results of a SwiGLU
    min_rows: int = 1
    max_rows: int | None = None
    min_size_out: int = 1
    max_size_out: int | None = None
    strided: bool = True  # rows of x may be further apart than they are long
    leaves: tuple["LinearLimits", ...] = ()  # what paths of these limits can compute is theirs
    processors: int | None = None  # of the GPU whose measured tilings leave some rows to the library; None: no tilings

    def rejections(self, shape: LinearShape) -> list[Rejection]:
        """Every reason of the shape, not of the machine, why it cannot be computed."""
        found = []
        if shape.dtype not in self.dtypes:
            found.append(Rejection(Reject.DTYPE, f"takes {_values(self.dtypes)}, the shape has {shape.dtype.value}"))
        if shape.epilogue not in self.epilogues:
            detail = f"stores {_values(self.epilogues)}, the shape has {shape.epilogue.value}"
            found.append(Rejection(Reject.LAYOUT, detail))
        if shape.weight_format not in self.formats:
            names = ", ".join(sorted(it.name for it in self.formats))
            detail = f"takes weights in {names}, the shape has {shape.weight_format.name}"
            found.append(Rejection(Reject.LAYOUT, detail))
        if shape.has_bias and not self.bias:
            found.append(Rejection(Reject.LAYOUT, "takes no bias"))
        for name, size, multiple in (
            ("columns", shape.size_in, self.size_in_multiple),
            ("results", shape.size_out, self.size_out_multiple),
            ("results", shape.size_out, self.gated_multiple if shape.epilogue is Epilogue.SWIGLU else 1),
        ):
            if size % multiple:
                found.append(Rejection(Reject.LAYOUT, f"takes multiples of {multiple} {name}, the shape has {size}"))
        if shape.size_out < self.min_size_out:
            detail = f"takes {self.min_size_out} results or more, the shape has {shape.size_out}"
            found.append(Rejection(Reject.LAYOUT, detail))
        if self.max_size_out is not None and shape.size_out > self.max_size_out:
            detail = f"takes at most {self.max_size_out} results, the shape has {shape.size_out}"
            found.append(Rejection(Reject.LAYOUT, detail))
        if shape.rows.lo + 1 < self.min_rows:
            found.append(Rejection(Reject.LENGTH, f"takes {self.min_rows} rows or more, the shape {shape.rows.label}"))
        if self.max_rows is not None and (shape.rows.hi is None or shape.rows.hi > self.max_rows):
            found.append(Rejection(Reject.LENGTH, f"takes at most {self.max_rows} rows, the shape {shape.rows.label}"))
        if any(not limits.rejections(shape) for limits in self.leaves):
            found.append(Rejection(Reject.LENGTH, f"leaves {shape.rows.label} rows of such sizes to another path"))
        elif self.processors is not None and not found and not _is_tiled(shape, self.processors):
            found.append(Rejection(Reject.LENGTH, f"leaves {shape.rows.label} rows of such sizes to the library"))
        return found


@dataclass(frozen=True, slots=True)
class LinearPath(OperatorPath[LinearLimits, RunLinear]):
    """A path of products with weights."""

    operator: ClassVar[Operator] = Operator.LINEAR


def _is_tiled(shape: LinearShape, processors: int) -> bool:
    """Return whether `tilings.py` has the rows of a bucket computed by the wide matmul."""
    sizes = shape.rows.hi or 0, shape.size_out, shape.size_in, processors
    return wide_tiling(*sizes, parts=shape.epilogue.parts, has_bias=shape.has_bias) is not None


def _values(members: frozenset[Dtype] | frozenset[Epilogue]) -> str:
    return ", ".join(sorted(member.value for member in members))


def _run_skinny() -> RunLinear | None:
    if launch.triton_version() is None:
        return None
    from kernels.linear.hopper.skinny_path import run_skinny

    return run_skinny


def _run_wide() -> RunLinear | None:
    if launch.triton_version() is None:
        return None
    from kernels.linear.hopper.wide_path import run_wide

    return run_wide


def _run_fp8_wide() -> RunLinear | None:
    if launch.triton_version() is None:
        return None
    from kernels.linear.hopper.fp8_wide_path import run_fp8_wide

    return run_fp8_wide


def _run_ordered() -> RunLinear | None:
    if launch.triton_version() is None:
        return None
    from kernels.linear.ordered.matmul_path import run_ordered

    return run_ordered


def _run_segments() -> RunLinear | None:
    if launch.triton_version() is None:
        return None
    from kernels.linear.ordered.segments_path import run_segments

    return run_segments


def _hopper_few_bits_run(name: str) -> RunLinear | None:
    if launch.triton_version() is None:
        return None
    from kernels.linear.hopper.few_bits_ordered_path import run_fp8_ordered, run_int4_ordered
    from kernels.linear.hopper.fp8_skinny_path import run_fp8_skinny
    from kernels.linear.hopper.fp8_swapped_path import run_fp8_swapped
    from kernels.linear.hopper.int4_skinny_path import run_int4_skinny
    from kernels.linear.hopper.int4_swapped_path import run_int4_swapped
    from kernels.linear.hopper.int4_wide_path import run_int4_wide

    runs: dict[str, RunLinear] = {
        "gluon.linear.fp8.swapped": run_fp8_swapped,
        "gluon.linear.fp8.skinny": run_fp8_skinny,
        "gluon.linear.fp8.ordered": run_fp8_ordered,
        "gluon.linear.int4.skinny": run_int4_skinny,
        "gluon.linear.int4.swapped": run_int4_swapped,
        "gluon.linear.int4.wide": run_int4_wide,
        "gluon.linear.int4.ordered": run_int4_ordered,
    }
    return runs[name]


def _few_bits_run(name: str) -> RunLinear | None:
    if launch.triton_version() is None:
        return None
    from kernels.linear.portable.fp8_path import run_fp8, run_fp8_as_half
    from kernels.linear.portable.int4_path import run_int4

    return {"triton.linear.fp8": run_fp8, "triton.linear.fp8.half": run_fp8_as_half}.get(name, run_int4)


_ALL_DTYPES = frozenset({Dtype.FP32, Dtype.FP16, Dtype.BF16})  # by name: a new member widens no path's limits
_HALF_DTYPES = frozenset({Dtype.FP16, Dtype.BF16})
_ALL_EPILOGUES = frozenset({Epilogue.NONE, Epilogue.SWIGLU, Epilogue.FP32})
# What PyTorch launches: products of its libraries, sums of their parts, SwiGLU behind a product without epilogue.
_LIBRARY_KERNELS = (*GEMMS, "splitK", "cublasLt", "_gated_kernel", *TORCH_HELPERS)
# One fp32 accumulator a number, wgmma's steps of 16 columns from the first on: no segments, no parts.
_ORDER = "k16"
_ORDER_OF_SMALL = "k16x4"  # the same of four segments, and ((0 + 2) + (1 + 3)) of these
_ORDER_OF_HALVES = "k16x2"  # weights of few bits: of two halves, and their sum
_MOST_SMALL = 2048  # rows of a weight: of more, tiles enough for all multiprocessors
_H200_PROCESSORS = 132  # of an H100 SXM too; those of fewer leave a few sizes more to the library


def _hopper_limits(
    min_rows: int, max_rows: int | None, size_out_multiple: int, processors: int | None = None
) -> LinearLimits:
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
        processors=processors,
    )


def _path(
    name: str,
    limits: LinearLimits,
    entry: str,
    kernel_names: tuple[str, ...],
    run: RunLinear | None,
    order: str | None = None,
) -> LinearPath:
    digest = SOURCES.of(f"kernels.linear.{entry}")
    return LinearPath(
        name, tier_of(name), limits, digest, kernel_names, run,
        is_capturable=True, order=order,
    )  # fmt: skip


_SMALL_ORDERED = replace(
    _hopper_limits(1, None, 1),
    epilogues=frozenset({Epilogue.NONE, Epilogue.FP32}),
    size_in_multiple=32,  # segments of whole 16 bytes
    max_size_out=_MOST_SMALL,
)
_LIBRARY_ORDERED = LinearLimits(
    devices=frozenset({Device.CUDA}),
    dtypes=_HALF_DTYPES,
    epilogues=_ALL_EPILOGUES,
    min_sm=90,
    max_sm=90,
    needs_triton=True,
    size_in_multiple=8,
    size_out_multiple=8,
    min_rows=LinearRows.LE_112.lo + 1,
    max_rows=LinearRows.LE_8K.hi,
    strided=False,
    leaves=(_SMALL_ORDERED,),
)


_FP8_WIDE = replace(
    _hopper_limits(LinearRows.LE_112.lo + 1, None, 16),
    formats=FP8_FORMATS,
    size_in_multiple=16,  # TMA's rows of whole 16 bytes
    gated_multiple=128,  # gate and up in whole blocks
)
_MOST_SWAPPED = 64 * _H200_PROCESSORS  # results of more than 64 rows: one tile a multiprocessor
# Of 65 to 128 rows the kernel of many is faster with SwiGLU, with scales of blocks, and with more results.
_FP8_WIDE_ALONE = (
    replace(_FP8_WIDE, epilogues=frozenset({Epilogue.SWIGLU})),
    replace(_FP8_WIDE, formats=frozenset({FP8_BLOCKS})),
    replace(_FP8_WIDE, min_size_out=_MOST_SWAPPED + 1),
)

_INT4_WIDE = replace(
    _hopper_limits(LinearRows.LE_112.lo + 1, None, 8),
    formats=INT4_FORMATS,
    size_in_multiple=32,
    epilogues=_ALL_EPILOGUES - {Epilogue.FP32},  # a tile of fp32 takes 237,616 bytes beside the ring, of 232,448
)
# Of more than 64 rows the kernel of many is faster with SwiGLU, of more than 128 with more results; of up to 16 rows in
# groups of 32 the skinny one.
_INT4_SWAPPED_LEAVES = (
    replace(_INT4_WIDE, epilogues=frozenset({Epilogue.SWIGLU})),
    replace(_INT4_WIDE, min_rows=LinearRows.LE_256.lo + 1, min_size_out=_MOST_SWAPPED // 2 + 1),
    replace(_INT4_WIDE, min_rows=1, max_rows=LinearRows.LE_16.hi, formats=frozenset({INT4_32})),
)


def _widened_path(name: str, devices: frozenset[Device], formats: frozenset[WeightFormat]) -> LinearPath:
    limits = LinearLimits(devices=devices, dtypes=_ALL_DTYPES, epilogues=_ALL_EPILOGUES, formats=formats)
    entry, run = (
        ("formats.fp8_torch_path", run_fp8_torch)
        if formats == FP8_FORMATS
        else ("formats.int4_torch_path", run_int4_torch)
    )
    return _path(name, limits, entry, (*_LIBRARY_KERNELS, "mkl", "addmm"), run)


def _few_bits_path(name: str, formats: frozenset[WeightFormat], min_rows: int = 1) -> LinearPath:
    is_fp8 = formats == FP8_FORMATS
    limits = LinearLimits(
        devices=frozenset({Device.CUDA, Device.INTERPRETER}),
        dtypes=_ALL_DTYPES,
        epilogues=_ALL_EPILOGUES,
        formats=formats,
        min_sm=89 if is_fp8 else 80,  # e4m3 in hardware
        needs_triton=True,
        min_rows=min_rows,
    )
    kernel_names = ("hallmark_fp8_matmul", "hallmark_fp8_round_") if is_fp8 else ("hallmark_int4_matmul",)
    entry = "portable.fp8_path" if is_fp8 else "portable.int4_path"
    return _path(name, limits, entry, kernel_names, _few_bits_run(name))


def _hopper_few_bits_path(
    name: str,
    formats: frozenset[WeightFormat],
    rows: tuple[int, int | None],
    size_in_multiple: int,
    entry: str,
    *,
    size_out_multiple: int = 1,
    gated_multiple: int = 1,
    epilogues: frozenset[Epilogue] = _ALL_EPILOGUES,
    leaves: tuple[LinearLimits, ...] = (),
    order: str | None = None,
) -> LinearPath:
    limits = _hopper_limits(*rows, size_out_multiple)
    limits = replace(
        limits,
        formats=formats,
        size_in_multiple=size_in_multiple,
        gated_multiple=gated_multiple,
        epilogues=epilogues,
        leaves=leaves,
    )
    kernel_names = ("hallmark_fp8_",) if formats == FP8_FORMATS else ("hallmark_int4_",)
    return _path(name, limits, f"hopper.{entry}", kernel_names, _hopper_few_bits_run(name), order)


# Those before the last take what they are chosen for, so that the first which can compute a shape is the one that does.
LINEAR_PATHS: tuple[LinearPath, ...] = (
    _path(
        "gluon.linear.skinny",
        _hopper_limits(1, LinearRows.LE_32.hi or 0, 1),
        "hopper.skinny_path",
        ("hallmark_skinny_matmul",),
        _run_skinny(),
    ),
    _path(
        "gluon.linear.wide",
        _hopper_limits(LinearRows.LE_64.lo + 1, LinearRows.LE_128.hi or 0, 8, _H200_PROCESSORS),
        "hopper.wide_path",
        ("hallmark_wide_matmul",),
        _run_wide(),
    ),
    _path(
        "cublaslt.linear",
        LinearLimits(
            devices=frozenset({Device.CUDA}),
            dtypes=_HALF_DTYPES,
            epilogues=_ALL_EPILOGUES,
            bias=False,
            min_sm=80,
            size_in_multiple=8,
            size_out_multiple=8,
            min_rows=LinearRows.LE_112.lo + 1,
            max_rows=LinearRows.LE_8K.hi,
            strided=False,
        ),
        "library.library_path",
        _LIBRARY_KERNELS,
        RunProposed(),
    ),
    _hopper_few_bits_path(
        "gluon.linear.fp8.swapped",
        FP8_FORMATS,
        (2, LinearRows.LE_128.hi),
        16,
        "fp8_swapped_path",
        size_out_multiple=8,
        gated_multiple=128,  # gate and up in whole blocks
        leaves=_FP8_WIDE_ALONE,
    ),
    _path(
        "gluon.linear.fp8",
        _FP8_WIDE,
        "hopper.fp8_wide_path",
        ("hallmark_fp8_wide_matmul", "hallmark_fp8_round_wide", "hallmark_fp8_norm"),
        _run_fp8_wide(),
    ),
    _widened_path("torch.linear.fp8", frozenset({Device.CPU}), FP8_FORMATS),
    _hopper_few_bits_path("gluon.linear.fp8.skinny", FP8_FORMATS, (1, 64), 16, "fp8_skinny_path"),
    _few_bits_path("triton.linear.fp8", FP8_FORMATS),
    _few_bits_path("triton.linear.fp8.half", FP8_FORMATS, LinearRows.LE_112.lo + 1),
    _widened_path("torch.fp8.linear", frozenset({Device.CUDA, Device.INTERPRETER}), FP8_FORMATS),
    _widened_path("torch.linear.int4", frozenset({Device.CPU}), INT4_FORMATS),
    _hopper_few_bits_path(
        "gluon.linear.int4.swapped",
        INT4_FORMATS,
        (2, LinearRows.LE_256.hi),
        32,
        "int4_swapped_path",
        size_out_multiple=8,
        leaves=_INT4_SWAPPED_LEAVES,
    ),
    _hopper_few_bits_path("gluon.linear.int4.skinny", INT4_FORMATS, (1, 16), 32, "int4_skinny_path"),
    _hopper_few_bits_path(
        "gluon.linear.int4.wide",
        INT4_FORMATS,
        (_INT4_WIDE.min_rows, None),
        32,
        "int4_wide_path",
        size_out_multiple=8,
        epilogues=_INT4_WIDE.epilogues,
    ),
    _few_bits_path("triton.linear.int4", INT4_FORMATS),
    _widened_path("torch.int4.linear", frozenset({Device.CUDA, Device.INTERPRETER}), INT4_FORMATS),
    _path(
        "torch.linear",
        LinearLimits(
            devices=frozenset({Device.CPU, Device.CUDA, Device.INTERPRETER}),
            dtypes=_ALL_DTYPES,
            epilogues=_ALL_EPILOGUES,
        ),
        "torch_path",
        (*_LIBRARY_KERNELS, "mkl", "addmm"),
        run_torch,
    ),
    # Those of one order of sums serve where that is asked for. Each takes what those before it do not.
    _path(
        "gluon.linear.small.ordered",
        _SMALL_ORDERED,
        "ordered.segments_path",
        ("hallmark_skinny_matmul", "hallmark_ordered_matmul"),
        _run_segments(),
        _ORDER_OF_SMALL,
    ),
    _path(
        "cublaslt.linear.ordered",
        _LIBRARY_ORDERED,
        "ordered.library_path",
        (*_LIBRARY_KERNELS, "hallmark_ordered_matmul"),
        None if launch.triton_version() is None else RunProposedInOrder(),
        _ORDER,
    ),
    _path(
        "gluon.linear.ordered",
        replace(_hopper_limits(1, None, 1), gated_multiple=8, leaves=(_SMALL_ORDERED, _LIBRARY_ORDERED)),
        "ordered.matmul_path",
        ("hallmark_ordered_matmul",),
        _run_ordered(),
        _ORDER,
    ),
    # Halves of the inner dim must be whole blocks and groups.
    _hopper_few_bits_path(
        "gluon.linear.fp8.ordered", FP8_FORMATS, (1, None), 256, "few_bits_ordered_path", order=_ORDER_OF_HALVES
    ),
    _hopper_few_bits_path(
        "gluon.linear.int4.ordered", INT4_FORMATS, (1, None), 256, "few_bits_ordered_path", order=_ORDER_OF_HALVES
    ),
    LinearPath(
        "torch.linear.tiles",
        tier_of("torch.linear.tiles"),
        LinearLimits(
            devices=frozenset({Device.CPU}),
            dtypes=_ALL_DTYPES,
            epilogues=frozenset({Epilogue.NONE, Epilogue.SWIGLU}),
        ),
        SOURCES.of("kernels.linear.ordered.tiles_path"),
        (*_LIBRARY_KERNELS, "mkl", "addmm"),
        run_linear_tiles,
        order="rows16",
    ),
)


def linear_paths_on(device: "torch.device") -> tuple[LinearPath, ...]:
    """The same with the tilings of this GPU, which depend on its multiprocessors."""
    if device.type != "cuda":
        return LINEAR_PATHS
    return tuple(
        path if path.limits.processors is None else _with_processors(path, num_processors(device))
        for path in LINEAR_PATHS
    )


def _with_processors(path: LinearPath, processors: int) -> LinearPath:
    return replace(path, limits=replace(path.limits, processors=processors))
