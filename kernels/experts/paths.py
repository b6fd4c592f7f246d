"""Every path of a mixture's products, in the order of preference, with its limits as data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kernels.calls import launch
from kernels.experts.capped.eager import run_capped, run_capped_tiles
from kernels.experts.few_bits.eager import run_few_bits
from kernels.experts.formats import AnyExpertFormat, FewBitFormat
from kernels.experts.kinds import ExpertFormat
from kernels.experts.portable.eager import run_eager
from kernels.experts.portable.tiles import run_experts_tiles
from kernels.experts.shape import ExpertForm, ExpertsShape
from kernels.experts.ungated.eager import run_ungated, run_ungated_tiles
from kernels.identity.source_digest import SOURCES
from kernels.identity.torch_kernels import GEMMS, TORCH_HELPERS
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import OperatorPath, Reject, Rejection
from kernels.vocabulary.path_order import tier_of
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype

if TYPE_CHECKING:
    from torch import Tensor

# Fills out [T, H], its last argument, completely; the others are those of `experts_eager` in portable/eager.py, the
# weights in the path's format, the activation one that the path's limits allow.
RunExperts = Callable[["Tensor", "Tensor", "Tensor", Any, Any, "Tensor"], None]


@dataclass(frozen=True, slots=True)
class ExpertsLimits:
    """The mixtures and machines that a path can compute, as data.

    form  of the experts that it computes, and no others
    """

    devices: frozenset[Device]
    dtypes: frozenset[Dtype]
    formats: frozenset[AnyExpertFormat]
    min_sm: int | None = None
    max_sm: int | None = None
    needs_triton: bool = False
    size_multiple: int = 1  # of hidden size and width
    max_rows: TokenRows = TokenRows.GT_8K
    form: ExpertForm = ExpertForm.GATED

    def rejections(self, shape: ExpertsShape) -> list[Rejection]:
        """Every reason of the shape, not of the machine, why it cannot be computed."""
        found = []
        if shape.dtype not in self.dtypes:
            found.append(Rejection(Reject.DTYPE, f"takes {_values(self.dtypes)}, the shape has {shape.dtype.value}"))
        if shape.format not in self.formats:
            detail = f"takes weights in {_values(self.formats)}, the shape has {shape.format.value}"
            found.append(Rejection(Reject.LAYOUT, detail))
        if shape.form is not self.form:
            detail = f"computes experts that are {self.form.value}, the shape's are {shape.form.value}"
            found.append(Rejection(Reject.LAYOUT, detail))
        if self.form is not ExpertForm.GATED and shape.has_bias:
            found.append(Rejection(Reject.LAYOUT, "computes no experts with biases"))
        if shape.hidden % self.size_multiple or shape.width % self.size_multiple:
            detail = f"takes multiples of {self.size_multiple}, the shape has {shape.hidden} and {shape.width}"
            found.append(Rejection(Reject.LAYOUT, detail))
        if shape.rows.lo > self.max_rows.lo:
            found.append(Rejection(Reject.LENGTH, f"takes {self.max_rows.label} rows, the shape is {shape.rows.label}"))
        return found


@dataclass(frozen=True, slots=True)
class ExpertsPath(OperatorPath[ExpertsLimits, RunExperts]):
    """A path of a mixture's products."""

    operator: ClassVar[Operator] = Operator.EXPERTS


def _values(members: frozenset[Dtype] | frozenset[AnyExpertFormat]) -> str:
    return ", ".join(sorted(member.value for member in members))


def _triton_run() -> RunExperts | None:
    if launch.triton_version() is None:
        return None
    from kernels.experts.portable.launch import run_experts

    return run_experts


def _hopper_run() -> RunExperts | None:
    if launch.triton_version() is None:
        return None
    from kernels.experts.hopper.launch import run_experts_hopper

    return run_experts_hopper


def _codes_run() -> RunExperts | None:
    if launch.triton_version() is None:
        return None
    from kernels.experts.mxfp4.launch import run_experts_codes

    return run_experts_codes


def _ordered_run() -> RunExperts | None:
    if launch.triton_version() is None:
        return None
    from kernels.experts.hopper.ordered import run_experts_ordered

    return run_experts_ordered


def _ordered_codes_run() -> RunExperts | None:
    if launch.triton_version() is None:
        return None
    from kernels.experts.mxfp4.ordered import run_codes_ordered

    return run_codes_ordered


_DTYPES = frozenset({Dtype.FP32, Dtype.FP16, Dtype.BF16})  # by name: a new member widens no path's limits
_FORMATS: frozenset[AnyExpertFormat] = frozenset({ExpertFormat.PLAIN, ExpertFormat.MXFP4})
_PLAIN: frozenset[AnyExpertFormat] = frozenset({ExpertFormat.PLAIN})


def _torch_path(name: str, devices: frozenset[Device]) -> ExpertsPath:
    limits = ExpertsLimits(devices=devices, dtypes=_DTYPES, formats=_FORMATS)
    # It waits for the device to learn which experts are visited: no CUDA graph can hold it.
    names = (*GEMMS, "softmax", *TORCH_HELPERS)
    return ExpertsPath(name, tier_of(name), limits, SOURCES.of("kernels.experts.portable.eager"), names, run_eager)


def _few_bits_run() -> RunExperts | None:
    if launch.triton_version() is None:
        return None
    from kernels.experts.few_bits.launch import run_few_bits_triton

    return run_few_bits_triton


def _fp8_run() -> RunExperts | None:
    if launch.triton_version() is None:
        return None
    from kernels.experts.fp8.launch import run_experts_fp8

    return run_experts_fp8


def _int4_run() -> RunExperts | None:
    if launch.triton_version() is None:
        return None
    from kernels.experts.int4.launch import run_experts_int4

    return run_experts_int4


def _few_bits_path(name: str, devices: frozenset[Device]) -> ExpertsPath:
    limits = ExpertsLimits(devices=devices, dtypes=_DTYPES, formats=frozenset(FewBitFormat))
    digest = SOURCES.of("kernels.experts.few_bits.eager")
    return ExpertsPath(name, tier_of(name), limits, digest, (*GEMMS, *TORCH_HELPERS), run_few_bits)


def _capped_run() -> RunExperts | None:
    if launch.triton_version() is None:
        return None
    from kernels.experts.capped.launch import run_capped_triton

    return run_capped_triton


_PLAIN_AND_FEW_BITS: frozenset[AnyExpertFormat] = frozenset({ExpertFormat.PLAIN, *FewBitFormat})


def _capped_path(name: str, devices: frozenset[Device]) -> ExpertsPath:
    limits = ExpertsLimits(devices=devices, dtypes=_DTYPES, formats=_PLAIN_AND_FEW_BITS, form=ExpertForm.CAPPED)
    digest = SOURCES.of("kernels.experts.capped.eager")
    return ExpertsPath(name, tier_of(name), limits, digest, (*GEMMS, *TORCH_HELPERS), run_capped)


def _ungated_run() -> RunExperts | None:
    if launch.triton_version() is None:
        return None
    from kernels.experts.ungated.launch import run_ungated_triton

    return run_ungated_triton


def _ungated_few_bits_run() -> RunExperts | None:
    if launch.triton_version() is None:
        return None
    from kernels.experts.ungated.few_bits import run_ungated_few_bits_triton

    return run_ungated_few_bits_triton


def _ungated_path(name: str, devices: frozenset[Device], run: RunExperts, order: str | None = None) -> ExpertsPath:
    formats = _PLAIN_AND_FEW_BITS if order is None else _PLAIN
    limits = ExpertsLimits(devices=devices, dtypes=_DTYPES, formats=formats, form=ExpertForm.UNGATED)
    digest = SOURCES.of("kernels.experts.ungated.eager")
    return ExpertsPath(name, tier_of(name), limits, digest, (*GEMMS, *TORCH_HELPERS), run, order=order)


def _ordered_path(
    name: str,
    weight_format: ExpertFormat,
    dtypes: frozenset[Dtype],
    entry: str,
    kernel_name: str,
    run: RunExperts | None,
    order: str,
) -> ExpertsPath:
    limits = ExpertsLimits(
        devices=frozenset({Device.CUDA}),
        dtypes=dtypes,
        formats=frozenset({weight_format}),
        min_sm=90,
        max_sm=90,
        needs_triton=True,
        size_multiple=64,
    )
    names = kernel_name, "hallmark_experts_"
    digest = SOURCES.of(f"kernels.experts.{entry}")
    return ExpertsPath(name, tier_of(name), limits, digest, names, run, is_capturable=True, order=order)


def _ordered_triton_runs() -> tuple[RunExperts | None, RunExperts | None, RunExperts | None]:
    """Return those of few bits, without a gate, and with a bounded activation."""
    if launch.triton_version() is None:
        return None, None, None
    from kernels.experts.ordered.launch import run_capped_ordered, run_few_bits_ordered, run_ungated_ordered

    return run_few_bits_ordered, run_ungated_ordered, run_capped_ordered


_FEW_BITS_ORDERED, _UNGATED_ORDERED, _CAPPED_ORDERED = _ordered_triton_runs()


def _ordered_triton_path(
    name: str, form: ExpertForm, formats: frozenset[AnyExpertFormat], run: RunExperts | None
) -> ExpertsPath:
    """Return the Triton path of one order for experts that no path of Hopper has one for."""
    limits = ExpertsLimits(
        devices=frozenset({Device.CUDA}), dtypes=_DTYPES, formats=formats, min_sm=89, needs_triton=True, form=form
    )
    names = "hallmark_experts_", "hallmark_fp8_round_", "_squared_relu_kernel", *TORCH_HELPERS
    digest = SOURCES.of("kernels.experts.ordered.launch")
    return ExpertsPath(name, tier_of(name), limits, digest, names, run, is_capturable=True, order="rows64.triton")


EXPERTS_PATHS: tuple[ExpertsPath, ...] = (
    ExpertsPath(
        "gluon.experts.mxfp4.hopper",
        tier_of("gluon.experts.mxfp4.hopper"),
        ExpertsLimits(
            devices=frozenset({Device.CUDA}),
            dtypes=frozenset({Dtype.BF16}),  # codes times scales are exact in it
            formats=frozenset({ExpertFormat.MXFP4}),
            min_sm=90,
            max_sm=90,
            needs_triton=True,
            size_multiple=64,  # a consumer's columns of the activated product
            max_rows=TokenRows.LE_8K,  # with more, weights that are written as 16-bit ones first take less
        ),
        SOURCES.of("kernels.experts.mxfp4.launch"),
        ("hallmark_gluon_experts_codes", "hallmark_experts_"),
        _codes_run(),
        is_capturable=True,  # grids depend on the number of rows alone
    ),
    ExpertsPath(
        "gluon.experts.hopper",
        tier_of("gluon.experts.hopper"),
        ExpertsLimits(
            devices=frozenset({Device.CUDA}),
            dtypes=frozenset({Dtype.FP16, Dtype.BF16}),
            formats=_FORMATS,
            min_sm=90,
            max_sm=90,
            needs_triton=True,
            size_multiple=64,  # rows are gathered by whole 128 bytes
        ),
        SOURCES.of("kernels.experts.hopper.launch"),
        ("hallmark_gluon_experts_", "hallmark_experts_"),
        _hopper_run(),
        is_capturable=True,  # grids depend on the number of rows alone
    ),
    ExpertsPath(
        "triton.experts",
        tier_of("triton.experts"),
        ExpertsLimits(
            devices=frozenset({Device.CUDA, Device.INTERPRETER}),
            dtypes=_DTYPES,
            formats=_FORMATS,
            min_sm=80,
            needs_triton=True,
        ),
        SOURCES.of("kernels.experts.portable.launch"),
        tuple(f"hallmark_experts_{it}" for it in ("sort", "count", "prefix", "place", "gate_up", "down", "combine")),
        _triton_run(),
        is_capturable=True,  # grids depend on the number of rows alone
    ),
    _torch_path("torch.experts.cpu", frozenset({Device.CPU})),
    _torch_path("torch.experts", frozenset({Device.CUDA, Device.INTERPRETER})),
    ExpertsPath(
        "gluon.experts.fp8.hopper",
        tier_of("gluon.experts.fp8.hopper"),
        ExpertsLimits(
            devices=frozenset({Device.CUDA}),
            dtypes=frozenset({Dtype.FP16, Dtype.BF16}),
            formats=frozenset({FewBitFormat.FP8_BLOCKS, FewBitFormat.FP8_ROWS}),
            min_sm=90,
            max_sm=90,
            needs_triton=True,
            size_multiple=128,  # columns of a step
        ),
        SOURCES.of("kernels.experts.fp8.launch"),
        ("hallmark_gluon_experts_fp8_", "hallmark_experts_"),
        _fp8_run(),
        is_capturable=True,  # grids depend on the number of rows alone
    ),
    ExpertsPath(
        "gluon.experts.int4.hopper",
        tier_of("gluon.experts.int4.hopper"),
        ExpertsLimits(
            devices=frozenset({Device.CUDA}),
            dtypes=frozenset({Dtype.BF16}),  # codes become numbers by its bits
            formats=frozenset({FewBitFormat.INT4_128}),
            min_sm=90,
            max_sm=90,
            needs_triton=True,
            size_multiple=128,  # columns of a step, and of a group
        ),
        SOURCES.of("kernels.experts.int4.launch"),
        ("hallmark_gluon_experts_int4", "hallmark_experts_"),
        _int4_run(),
        is_capturable=True,  # grids depend on the number of rows alone
    ),
    ExpertsPath(
        "triton.experts.few_bits",
        tier_of("triton.experts.few_bits"),
        ExpertsLimits(
            devices=frozenset({Device.CUDA, Device.INTERPRETER}),
            dtypes=_DTYPES,
            # Experts may have scales of their own for all inputs: a token's would be rounded once for each it visits.
            formats=frozenset(FewBitFormat) - {FewBitFormat.FP8_STATIC},
            min_sm=89,
            needs_triton=True,
        ),
        SOURCES.of("kernels.experts.few_bits.launch"),
        ("hallmark_experts_", "hallmark_fp8_round_"),
        _few_bits_run(),
        is_capturable=True,  # grids depend on the number of rows alone
    ),
    _few_bits_path("torch.experts.cpu.few_bits", frozenset({Device.CPU})),
    _few_bits_path("torch.experts.few_bits", frozenset({Device.CUDA, Device.INTERPRETER})),
    # Of two layers of Step 3.5: PyTorch activates between Triton's products.
    ExpertsPath(
        "triton.experts.capped",
        tier_of("triton.experts.capped"),
        ExpertsLimits(
            devices=frozenset({Device.CUDA, Device.INTERPRETER}),
            dtypes=_DTYPES,
            formats=_PLAIN_AND_FEW_BITS - {FewBitFormat.FP8_STATIC},  # as of `triton.experts.few_bits`
            min_sm=89,
            needs_triton=True,
            form=ExpertForm.CAPPED,
        ),
        SOURCES.of("kernels.experts.capped.launch"),
        ("hallmark_experts_", "hallmark_fp8_round_", *TORCH_HELPERS),
        _capped_run(),
        is_capturable=True,  # grids depend on the number of rows alone
    ),
    _capped_path("torch.experts.cpu.capped", frozenset({Device.CPU})),
    _capped_path("torch.experts.capped", frozenset({Device.CUDA, Device.INTERPRETER})),
    ExpertsPath(
        "torch.experts.capped.tiles",
        tier_of("torch.experts.capped.tiles"),
        ExpertsLimits(devices=frozenset({Device.CPU}), dtypes=_DTYPES, formats=_PLAIN, form=ExpertForm.CAPPED),
        SOURCES.of("kernels.experts.capped.eager"),
        (*GEMMS, *TORCH_HELPERS),
        run_capped_tiles,
        order="rows16",
    ),
    # Of Nemotron-H, whose experts have no gate.
    ExpertsPath(
        "triton.experts.ungated",
        tier_of("triton.experts.ungated"),
        ExpertsLimits(
            devices=frozenset({Device.CUDA, Device.INTERPRETER}),
            dtypes=_DTYPES,
            formats=_PLAIN,
            min_sm=80,
            needs_triton=True,
            form=ExpertForm.UNGATED,
        ),
        SOURCES.of("kernels.experts.ungated.launch"),
        tuple(f"hallmark_experts_{it}" for it in ("sort", "count", "prefix", "place", "up", "down", "combine")),
        _ungated_run(),
        is_capturable=True,  # grids depend on the number of rows alone
    ),
    # Inputs are gathered and, by one scale an expert, rounded by PyTorch's kernels.
    ExpertsPath(
        "triton.experts.ungated.few_bits",
        tier_of("triton.experts.ungated.few_bits"),
        ExpertsLimits(
            devices=frozenset({Device.CUDA, Device.INTERPRETER}),
            dtypes=_DTYPES,
            formats=frozenset(FewBitFormat),
            min_sm=89,
            needs_triton=True,
            form=ExpertForm.UNGATED,
        ),
        SOURCES.of("kernels.experts.ungated.few_bits"),
        ("hallmark_experts_", "hallmark_fp8_round_", "_squared_relu_kernel", *TORCH_HELPERS),
        _ungated_few_bits_run(),
        is_capturable=True,  # grids depend on the number of rows alone
    ),
    _ungated_path("torch.experts.cpu.ungated", frozenset({Device.CPU}), run_ungated),
    _ungated_path("torch.experts.ungated", frozenset({Device.CUDA, Device.INTERPRETER}), run_ungated),
    _ungated_path("torch.experts.ungated.tiles", frozenset({Device.CPU}), run_ungated_tiles, order="rows16"),
    ExpertsPath(
        "torch.experts.tiles",
        tier_of("torch.experts.tiles"),
        ExpertsLimits(devices=frozenset({Device.CPU}), dtypes=_DTYPES, formats=_FORMATS),
        SOURCES.of("kernels.experts.portable.tiles"),
        (*GEMMS, *TORCH_HELPERS),
        run_experts_tiles,
        order="rows16",
    ),
    # Those of one order of sums serve where that is asked for.
    _ordered_path(
        "gluon.experts.mxfp4.ordered",
        ExpertFormat.MXFP4,
        frozenset({Dtype.BF16}),
        "mxfp4.ordered",
        "hallmark_gluon_experts_codes",
        _ordered_codes_run(),
        "k16-codes",
    ),
    _ordered_path(
        "gluon.experts.ordered",
        ExpertFormat.PLAIN,
        frozenset({Dtype.FP16, Dtype.BF16}),
        "hopper.ordered",
        "hallmark_gluon_experts_",
        _ordered_run(),
        "k16",
    ),
    _ordered_triton_path(
        "triton.experts.few_bits.ordered",
        ExpertForm.GATED,
        frozenset(FewBitFormat) - {FewBitFormat.FP8_STATIC},  # as of `triton.experts.few_bits`
        _FEW_BITS_ORDERED,
    ),
    _ordered_triton_path("triton.experts.ungated.ordered", ExpertForm.UNGATED, _PLAIN_AND_FEW_BITS, _UNGATED_ORDERED),
    _ordered_triton_path(
        "triton.experts.capped.ordered",
        ExpertForm.CAPPED,
        _PLAIN_AND_FEW_BITS - {FewBitFormat.FP8_STATIC},
        _CAPPED_ORDERED,
    ),
)
