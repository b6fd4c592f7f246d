"""Every path of a sum over ranks, in the order of preference, with its limits as data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from kernels.calls import launch
from kernels.collective.library_path import run_library
from kernels.collective.most_rows import most_rows
from kernels.collective.peers import RunCollective
from kernels.collective.shape import CollectiveShape
from kernels.identity.source_digest import SOURCES
from kernels.identity.torch_kernels import TORCH_HELPERS
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import AnyPath, OperatorPath, Reject, Rejection
from kernels.vocabulary.path_order import tier_of
from kernels.vocabulary.shape import Dtype

if TYPE_CHECKING:
    import torch

_MOST_GPUS = 8
PUSH = "triton.collective.push"
PUSH_APART = "triton.collective.push.apart"
EXCHANGE = "triton.collective.exchange"


@dataclass(frozen=True, slots=True)
class CollectiveLimits:
    """The sums and machines that a path can compute, as data."""

    devices: frozenset[Device]
    dtypes: frozenset[Dtype]
    min_sm: int | None = None
    max_sm: int | None = None
    needs_triton: bool = False
    columns_multiple: int = 1
    few_rows: bool = False  # as few as inboxes have places for, see `most_rows`
    min_rows: int = 1
    max_world: int = _MOST_GPUS  # on this machine, see `collective_paths_on`
    world_detail: str = ""  # why it is less than the path could

    def rejections(self, shape: CollectiveShape) -> list[Rejection]:
        """Every reason of the shape, and of this machine's GPUs together, why it cannot be computed."""
        found = []
        if shape.dtype not in self.dtypes:
            wanted = ", ".join(sorted(dtype.value for dtype in self.dtypes))
            found.append(Rejection(Reject.DTYPE, f"takes {wanted}, the shape has {shape.dtype.value}"))
        if shape.columns % self.columns_multiple:
            detail = f"takes multiples of {self.columns_multiple} columns, the shape has {shape.columns}"
            found.append(Rejection(Reject.LAYOUT, detail))
        if self.few_rows and (shape.rows.hi is None or shape.rows.hi > most_rows(shape.world)):
            detail = f"takes at most {most_rows(shape.world)} rows, the shape is {shape.rows.label}"
            found.append(Rejection(Reject.LENGTH, detail))
        if shape.rows.lo + 1 < self.min_rows:
            detail = f"takes {self.min_rows} rows or more, the shape is {shape.rows.label}"
            found.append(Rejection(Reject.LENGTH, detail))
        if shape.world > self.max_world:
            detail = self.world_detail or f"takes at most {self.max_world} ranks"
            found.append(Rejection(Reject.ARCH, f"{detail}, the shape has {shape.world} ranks"))
        return found


@dataclass(frozen=True, slots=True)
class CollectivePath(OperatorPath[CollectiveLimits, RunCollective]):
    """A path of sums over ranks."""

    operator: ClassVar[Operator] = Operator.COLLECTIVE


def _push_run() -> RunCollective | None:
    if launch.triton_version() is None:
        return None
    from kernels.collective.push_path import run_push

    return run_push


def _push_apart_run() -> RunCollective | None:
    if launch.triton_version() is None:
        return None
    from kernels.collective.push_apart_path import run_push_apart

    return run_push_apart


def _exchange_run() -> RunCollective | None:
    if launch.triton_version() is None:
        return None
    from kernels.collective.exchange_path import run_exchange

    return run_exchange


_HALF_DTYPES = frozenset({Dtype.FP16, Dtype.BF16})
_ALL_DTYPES = frozenset({Dtype.FP32, Dtype.FP16, Dtype.BF16})  # by name: a new member widens no path's limits
# Parts are added in fp32 in the order of the ranks, and rounded once; norms of all numbers of rows are one kernel's.
_RANKS = "ranks"
_PUSH_LIMITS = CollectiveLimits(
    devices=frozenset({Device.CUDA}),
    dtypes=_HALF_DTYPES,
    min_sm=80,
    needs_triton=True,
    columns_multiple=8,  # units of 16 bytes
    few_rows=True,
)


def _library_path(
    name: str, devices: frozenset[Device], names: tuple[str, ...], *, is_capturable: bool
) -> CollectivePath:
    limits = CollectiveLimits(devices=devices, dtypes=_ALL_DTYPES)
    digest = SOURCES.of("kernels.collective.library_path")
    return CollectivePath(
        name, tier_of(name), limits, digest, names, run_library, is_capturable=is_capturable, order=_RANKS
    )


# Those before NCCL's take the rows that they are chosen for, so that the first which can compute a shape does.
COLLECTIVE_PATHS: tuple[CollectivePath, ...] = (
    CollectivePath(
        PUSH,
        tier_of(PUSH),
        _PUSH_LIMITS,
        SOURCES.of("kernels.collective.push_path"),
        ("hallmark_push_sum",),
        _push_run(),
        is_capturable=True,
    ),
    CollectivePath(
        PUSH_APART,
        tier_of(PUSH_APART),
        _PUSH_LIMITS,
        SOURCES.of("kernels.collective.push_apart_path"),
        ("hallmark_push_sum", "_rms_norm_kernel", *TORCH_HELPERS),
        _push_apart_run(),
        is_capturable=True,
        order=_RANKS,
    ),
    CollectivePath(
        EXCHANGE,
        tier_of(EXCHANGE),
        replace(_PUSH_LIMITS, few_rows=False, min_rows=most_rows(2) + 1, max_world=2),
        SOURCES.of("kernels.collective.exchange_path"),
        ("hallmark_exchange_sum", *TORCH_HELPERS),
        _exchange_run(),
        is_capturable=True,
        order=_RANKS,
    ),
    _library_path(
        "nccl.collective",
        frozenset({Device.CUDA}),
        ("nccl", "_rms_norm_kernel", *TORCH_HELPERS),
        is_capturable=True,
    ),
    _library_path(
        "gloo.collective",
        frozenset({Device.CPU, Device.INTERPRETER}),
        ("gloo", "c10d::"),
        is_capturable=False,
    ),
)


def collective_paths_on(device: "torch.device") -> tuple[CollectivePath, ...]:
    """The same with the limits of this machine's GPUs: how many there are, and can address each other's memory."""
    if device.type != "cuda":
        return COLLECTIVE_PATHS
    import torch

    from kernels.collective.inboxes import num_connected

    push, apart, exchange, nccl, gloo = COLLECTIVE_PATHS
    count, connected = torch.cuda.device_count(), num_connected()
    of_host = f"takes GPUs of one host that address each other's memory, here are {connected}"
    return (
        _limited(push, connected, of_host),
        _limited(apart, connected, of_host),
        _limited(exchange, connected, of_host),
        _limited(nccl, count, f"takes a GPU a rank, here are {count}"),
        gloo,
    )


def without_peer_memory(paths: Sequence[AnyPath], why: str) -> tuple[AnyPath, ...]:
    """Return the paths, of which those that write into other ranks' memory are refused."""
    refused = Rejection(Reject.PEER_MEMORY, why)
    return tuple(
        replace(path, refused=refused) if path.name in (PUSH, PUSH_APART, EXCHANGE) else path for path in paths
    )


def _limited(path: CollectivePath, count: int, detail: str) -> CollectivePath:
    if path.limits.max_world <= count:
        return path
    return replace(path, limits=replace(path.limits, max_world=count, world_detail=detail))
