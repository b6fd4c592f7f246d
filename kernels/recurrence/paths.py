"""Every path of recurrences, in the order of preference, with its limits as data."""

from dataclasses import dataclass
from typing import ClassVar

from kernels.calls import launch
from kernels.identity.source_digest import SOURCES
from kernels.identity.torch_kernels import GEMMS, TORCH_HELPERS
from kernels.recurrence.calls import RunRecurrence
from kernels.recurrence.channel_delta.eager import run_channel_delta_eager
from kernels.recurrence.eager_path import run_recurrence_eager
from kernels.recurrence.fixed_decay.eager import run_fixed_decay_eager
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.state_space.eager import run_state_space_eager
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import OperatorPath, Reject, Rejection
from kernels.vocabulary.path_order import tier_of
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.recurrence_operator import RECURRENCE
from kernels.vocabulary.shape import Dtype


@dataclass(frozen=True, slots=True)
class RecurrenceLimits:
    """The recurrences and machines that a path can compute, as data."""

    devices: frozenset[Device]
    dtypes: frozenset[Dtype]
    state_dtypes: frozenset[Dtype]
    min_sm: int | None = None
    max_sm: int | None = None
    needs_triton: bool = False
    form: RecurrenceForm = RecurrenceForm.GATED_DELTA

    def rejections(self, shape: RecurrenceShape) -> list[Rejection]:
        """Every reason of the shape, not of the machine, why it cannot be computed."""
        found = []
        if shape.form is not self.form:
            found.append(
                Rejection(Reject.LAYOUT, f"computes {self.form.value}, the shape is of the form {shape.form.value}")
            )
        for name, dtype, taken in (
            ("tokens", shape.dtype, self.dtypes),
            ("states", shape.state_dtype, self.state_dtypes),
        ):
            if dtype not in taken:
                wanted = ", ".join(sorted(it.value for it in taken))
                found.append(Rejection(Reject.DTYPE, f"takes {name} of {wanted}, the shape has {dtype.value}"))
        return found


@dataclass(frozen=True, slots=True)
class RecurrencePath(OperatorPath[RecurrenceLimits, RunRecurrence]):
    """A path of recurrences."""

    operator: ClassVar[Operator] = RECURRENCE


def _triton_run() -> RunRecurrence | None:
    if launch.triton_version() is None:
        return None
    from kernels.recurrence.portable.launch import run_recurrence

    return run_recurrence


def _triton_run_of_space() -> RunRecurrence | None:
    if launch.triton_version() is None:
        return None
    from kernels.recurrence.state_space.launch import run_state_space

    return run_state_space


def _triton_run_of_fixed() -> RunRecurrence | None:
    if launch.triton_version() is None:
        return None
    from kernels.recurrence.fixed_decay.launch import run_fixed_decay

    return run_fixed_decay


def _triton_run_of_channels() -> RunRecurrence | None:
    if launch.triton_version() is None:
        return None
    from kernels.recurrence.channel_delta.launch import run_channel_delta

    return run_channel_delta


_DTYPES = frozenset({Dtype.FP32, Dtype.FP16, Dtype.BF16})  # by name: a new member widens no path's limits
_STATE_DTYPES = frozenset({Dtype.FP32, Dtype.BF16})
# Chunks begin at multiples of 64 tokens of a sequence; blocks of 16, and within a block tokens, are added in order.
_ORDER = "chunk64"


def _paths_of(
    form: RecurrenceForm, kernels: tuple[str, ...], triton_run: RunRecurrence | None, cpu_run: RunRecurrence
) -> tuple[RecurrencePath, RecurrencePath]:
    """Return the two paths of a form of its own: in Triton, whose kernels' names begin so, and on a CPU."""
    name = form.value.replace("-", "_")  # as its folder's
    in_triton, on_cpu = f"triton.recurrence.{name}", f"torch.recurrence.cpu.{name}"
    return (
        RecurrencePath(
            in_triton,
            tier_of(in_triton),
            RecurrenceLimits(
                devices=frozenset({Device.CUDA, Device.INTERPRETER}),
                dtypes=frozenset({Dtype.FP32, Dtype.BF16}),  # as of the gated delta rule
                state_dtypes=_STATE_DTYPES,
                min_sm=80,
                needs_triton=True,
                form=form,
            ),
            SOURCES.of(f"kernels.recurrence.{name}.launch"),
            kernels,
            triton_run,
            is_capturable=True,
            order=f"{_ORDER}.{name}.triton",
        ),
        RecurrencePath(
            on_cpu,
            tier_of(on_cpu),
            RecurrenceLimits(devices=frozenset({Device.CPU}), dtypes=_DTYPES, state_dtypes=_STATE_DTYPES, form=form),
            SOURCES.of(f"kernels.recurrence.{name}.eager"),
            (*GEMMS, *TORCH_HELPERS),
            cpu_run,
            order=f"{_ORDER}.{name}",
        ),
    )


RECURRENCE_PATHS: tuple[RecurrencePath, ...] = (
    RecurrencePath(
        "triton.recurrence",
        tier_of("triton.recurrence"),
        RecurrenceLimits(
            devices=frozenset({Device.CUDA, Device.INTERPRETER}),
            dtypes=frozenset({Dtype.FP32, Dtype.BF16}),  # a small state as two numbers of fp16 would lose digits
            state_dtypes=_STATE_DTYPES,
            min_sm=80,
            needs_triton=True,
        ),
        SOURCES.of("kernels.recurrence.portable.launch"),
        ("hallmark_recurrence_",),
        _triton_run(),
        is_capturable=True,  # grids depend on the numbers of tokens, rows and writes alone
        order=f"{_ORDER}.triton",
    ),
    RecurrencePath(
        "torch.recurrence.cpu",
        tier_of("torch.recurrence.cpu"),
        RecurrenceLimits(devices=frozenset({Device.CPU}), dtypes=_DTYPES, state_dtypes=_STATE_DTYPES),
        SOURCES.of("kernels.recurrence.eager_path"),
        (*GEMMS, *TORCH_HELPERS),
        run_recurrence_eager,
        order=_ORDER,
    ),
    *_paths_of(
        RecurrenceForm.STATE_SPACE, ("hallmark_recurrence_space_",), _triton_run_of_space(), run_state_space_eager
    ),
    *_paths_of(  # its scan is a state space's
        RecurrenceForm.FIXED_DECAY,
        ("hallmark_recurrence_fixed_", "hallmark_recurrence_space_"),
        _triton_run_of_fixed(),
        run_fixed_decay_eager,
    ),
    *_paths_of(
        RecurrenceForm.CHANNEL_DELTA,
        ("hallmark_recurrence_channels_",),
        _triton_run_of_channels(),
        run_channel_delta_eager,
    ),
)
