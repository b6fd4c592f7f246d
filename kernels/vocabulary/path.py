"""A kernel path: one concrete way to compute an operator, with its limits as data and its refusals as codes."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.operators import AnyShape, Operator, operator_of
from kernels.vocabulary.shape import AttentionShape, Dtype, Mask, Phase
from kernels.vocabulary.value_shape import Indexer, Values, values_of

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.calls.batch import AttentionBatch, AttentionFlags


class Reject(Enum):
    """Why a path cannot or may not serve a shape. Closed: the values are metric labels."""

    DTYPE = "dtype"
    HEAD_DIM = "head_dim"
    ARCH = "arch"
    PAGE_SIZE = "page_size"
    WINDOW = "window"
    SOFTCAP = "softcap"
    SINKS = "sinks"
    MASK = "mask"
    LENGTH = "length"
    LAYOUT = "layout"
    UNPROVEN = "unproven"
    STALE = "stale"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    DISABLED = "disabled"
    COMPILE_ERROR = "compile_error"
    OUT_OF_RESOURCES = "out_of_resources"
    MATRIX_INVALID = "matrix_invalid"
    OPERATOR_OVERRIDE = "operator_override"
    PEER_MEMORY = "peer_memory"  # the processes of several GPUs can share none
    BATCH_VARIANT = "batch_variant"  # a row's bits may depend on what else is in the batch


@dataclass(frozen=True, slots=True)
class Rejection:
    code: Reject
    detail: str  # for people and traces: names the limit and the value


class Tier(Enum):
    """The rank of a path: the first choice, or a fallback that serves where no first choice can."""

    FIRST = "first"
    FALLBACK = "fallback"  # a decision for it is always a fallback, however well proven


class AnyLimits(Protocol):
    """The shapes and machines that a path of any operator can compute."""

    @property
    def devices(self) -> frozenset[Device]: ...
    @property
    def min_sm(self) -> int | None: ...
    @property
    def max_sm(self) -> int | None: ...
    @property
    def needs_triton(self) -> bool: ...
    def rejections(self, shape: Any) -> list[Rejection]:
        """Every reason of the shape, of the path's operator, why it cannot be computed."""


# Ends of the names of paths that are there for their order of sums.
_FOR_ORDER = (".ordered", ".ordered.hopper", ".tiles", ".apart")


def is_for_order(path: str) -> bool:
    """Return whether the path of this name serves only where an order is asked for.

    Others compute the same faster, and it is not measured beside them.
    """
    return path.endswith(_FOR_ORDER)


LimitsT = TypeVar("LimitsT", bound=AnyLimits)
RunT = TypeVar("RunT")


@dataclass(frozen=True, slots=True)
class OperatorPath(Generic[LimitsT, RunT]):
    """An entry of the catalog, of any operator. A subclass for each names its operator, limits and call."""

    operator: ClassVar[Operator]

    name: str  # e.g. "triton.prefill"
    tier: Tier
    limits: LimitsT
    source_digest: str  # of what its sources compute: `kernels/identity/source_digest.py`
    kernel_names: tuple[str, ...]  # at least one of these substrings must be in every profiler kernel name it launches
    # What trials and service call, and nothing else: a function, or an object of a class, of the module that the digest
    # begins with. None where that cannot be imported; `rejects` then answers ARCH.
    run: RunT | None
    # Whether a CUDA graph can hold its launches: they depend on shapes and host bounds only, and nothing waits.
    is_capturable: bool = False
    # Where, though a fallback, it serves before the first tier: for shapes that this can compute too, where both are
    # proven and it was measured to be clearly faster. It is no fallback then.
    competes_on: frozenset[Device] = frozenset()
    # Whole names of what a call launches, one set of several: the batch decides which. Empty: all launch the same.
    alternatives: tuple[tuple[str, ...], ...] = ()
    # What this machine, as it is set up now, refuses to it, though its limits allow it; None: nothing.
    refused: Rejection | None = None
    # The name of the order in which it sums, e.g. "k16". Two paths of one operator with the same order promise equal
    # bits for each row, whatever else is in the batch, across phases and numbers of rows. None: the bits of a row may
    # depend on the batch.
    order: str | None = None

    @property
    def is_for_order(self) -> bool:
        """Return `is_for_order` of its name."""
        return is_for_order(self.name)

    def serves(self, shape: AnyShape) -> bool:
        """Return whether the path is made for shapes of this kind, were no limit in the way."""
        return operator_of(shape) is self.operator

    def rejects(self, shape: AnyShape, fingerprint: Fingerprint) -> tuple[Rejection, ...]:
        """Every reason why this path cannot compute `shape` on that machine; empty when it can."""
        if operator_of(shape) is not self.operator:
            return (Rejection(Reject.LAYOUT, f"computes {self.operator.value}, not {operator_of(shape).value}"),)
        return (*_machine_rejections(self.limits, fingerprint, shape.dtype), *self.limits.rejections(shape))


AnyPath = OperatorPath[Any, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """The attention and machines that a path can compute, as data: a refusal does not import the kernel."""

    devices: frozenset[Device]
    phases: frozenset[Phase]
    dtypes: frozenset[Dtype]  # of queries and of the output
    max_head_dim: int
    head_dim_multiple: int = 1
    min_sm: int | None = None
    max_sm: int | None = None
    page_size_multiple: int = 1
    window: bool = True
    softcap: bool = True
    sinks: bool = True
    masks: frozenset[Mask] = frozenset({Mask.CAUSAL})
    max_context: Bucket = Bucket.GT_128K
    needs_triton: bool = False
    kv_dtypes: frozenset[Dtype] | None = None  # of keys and values; None: those of `dtypes`
    max_window: int | None = None  # of keys: a path for short windows takes no wider one, and not none
    group_multiple: int = 1  # of the query heads of a KV head
    max_values: Values | None = None  # the widest; a path for values of another size than keys takes no others

    def rejections(self, shape: AttentionShape) -> list[Rejection]:
        """Every reason of the shape, not of the machine, why it cannot be computed."""
        return [*_layout_rejections(self, shape), *_flag_rejections(self, shape)]


# Computes attention of one batch into `out`, which it fills completely. q, out: [tokens, heads, head_dim]; k, v:
# packed [tokens, kv_heads, head_dim] in prefill, pages [num_pages, page_size, kv_heads, head_dim] otherwise. Of a shape
# with values of another size, v and out have heads of that size; of latents, v is the view of the first numbers of k's.
# Of a shape with an indexer, k has its key behind each token's, and the flags are `IndexedFlags`.
RunAttention = Callable[["Tensor", "Tensor", "Tensor", "AttentionBatch", "AttentionFlags", "Tensor"], None]


@dataclass(frozen=True, slots=True)
class KernelPath(OperatorPath[Limits, RunAttention]):
    """A path of attention."""

    operator: ClassVar[Operator] = Operator.ATTENTION

    max_queries: int = 1  # query tokens a sequence that a path for decode takes

    def serves(self, shape: AnyShape) -> bool:
        """Return whether the path is made for attention of this phase."""
        return isinstance(shape, AttentionShape) and shape.phase in self.limits.phases


def _machine_rejections(limits: AnyLimits, machine: Fingerprint, dtype: Dtype) -> list[Rejection]:
    found = []
    if machine.device not in limits.devices:
        wanted = " or ".join(sorted(device.value for device in limits.devices))
        found.append(Rejection(Reject.ARCH, f"runs on {wanted}, this machine is {machine.device.value}"))
    elif limits.min_sm is not None and machine.sm is not None and machine.sm < limits.min_sm:
        found.append(Rejection(Reject.ARCH, f"needs sm_{limits.min_sm}, this GPU is sm_{machine.sm}"))
    elif limits.max_sm is not None and machine.sm is not None and machine.sm > limits.max_sm:
        found.append(Rejection(Reject.ARCH, f"is made for sm_{limits.max_sm}, this GPU is sm_{machine.sm}"))
    elif limits.needs_triton and machine.triton is None:
        found.append(Rejection(Reject.ARCH, "needs triton, which is not installed here (it exists for Linux only)"))
    elif machine.device is Device.INTERPRETER and dtype is Dtype.BF16:
        # Triton 3.6's interpreter computes bf16 on its raw bits: 8e8 and NaN where 1.0 was due.
        found.append(Rejection(Reject.DTYPE, "bf16 is silent garbage in Triton's interpreter"))
    return found


def _layout_rejections(limits: Limits, shape: AttentionShape) -> list[Rejection]:
    found = []
    if shape.phase not in limits.phases:
        found.append(Rejection(Reject.LAYOUT, f"does not serve {shape.phase.value}"))
    kv_dtypes = limits.dtypes if limits.kv_dtypes is None else limits.kv_dtypes
    if shape.dtype not in limits.dtypes:
        found.append(Rejection(Reject.DTYPE, f"takes {_values(limits.dtypes)}, the shape has {shape.dtype.value}"))
    if shape.kv_dtype not in kv_dtypes and (shape.kv_dtype is not shape.dtype or shape.dtype in limits.dtypes):
        detail = f"takes keys in {_values(kv_dtypes)}, the shape has {shape.kv_dtype.value}"
        found.append(Rejection(Reject.DTYPE, detail))
    if shape.head_dim > limits.max_head_dim:
        found.append(Rejection(Reject.HEAD_DIM, f"takes at most {limits.max_head_dim}, the shape has {shape.head_dim}"))
    elif shape.head_dim % limits.head_dim_multiple:
        detail = f"takes multiples of {limits.head_dim_multiple}, the shape has {shape.head_dim}"
        found.append(Rejection(Reject.HEAD_DIM, detail))
    if (reason := _values_reason(limits.max_values, shape)) is not None:
        found.append(Rejection(Reject.LAYOUT, reason))
    if (group := shape.num_heads // shape.num_kv_heads) % limits.group_multiple:
        detail = f"takes multiples of {limits.group_multiple} query heads of a KV head, the shape has {group}"
        found.append(Rejection(Reject.LAYOUT, detail))
    if shape.page_size is not None and shape.page_size % limits.page_size_multiple:
        detail = f"takes multiples of {limits.page_size_multiple}, the shape has {shape.page_size}"
        found.append(Rejection(Reject.PAGE_SIZE, detail))
    if shape.context_bucket.lo > limits.max_context.lo:
        detail = f"takes at most {limits.max_context.hi} tokens of context, the shape is {shape.context_bucket.label}"
        found.append(Rejection(Reject.LENGTH, detail))
    return found


def _values_reason(most: Values | None, shape: AttentionShape) -> str | None:
    values = values_of(shape)
    if most is None:
        return None if values is None else f"takes values as wide as keys, the shape has {_described(values)}"
    if values is None:
        return f"takes {_described(most)}, the shape has values as wide as keys"
    if values.is_latent is not most.is_latent:
        return f"takes {_described(most)}, the shape has {_described(values)}"
    widest = min(most.dim, shape.head_dim)
    if values.dim > widest:
        return f"takes values of at most {widest} numbers, the shape has {values.dim}"
    if values.indexer is not None and shape.num_kv_heads != 1:
        return f"attends to chosen keys of one KV head, the shape has {shape.num_kv_heads}"
    return _indexer_reason(most.indexer, values.indexer)


def _indexer_reason(most: Indexer | None, indexer: Indexer | None) -> str | None:
    """Return why a path cannot attend to the keys that are chosen so; None where it can."""
    if (most is None) is not (indexer is None):
        takes, has = ("all keys", "those that an indexer chooses") if most is None else ("chosen keys", "all")
        return f"attends to {takes}, the shape asks for {has}"
    if most is None or indexer is None:
        return None
    if indexer.num_keys > most.num_keys:
        return f"attends to at most {most.num_keys} chosen keys, the shape has {indexer.num_keys}"
    if indexer.heads > most.heads or indexer.dim > most.dim:
        limit = f"{most.heads} heads of {most.dim} numbers"
        return f"takes an indexer of at most {limit}, the shape has {indexer.heads} of {indexer.dim}"
    return None


def _described(values: Values) -> str:
    if values.is_latent:
        return f"values that are the first {values.dim} numbers of the keys"
    return f"values of {values.dim} numbers of their own"


def _values(dtypes: frozenset[Dtype]) -> str:
    return ", ".join(sorted(dtype.value for dtype in dtypes))


def _flag_rejections(limits: Limits, shape: AttentionShape) -> list[Rejection]:
    found = []
    if shape.window is not None and not limits.window:
        found.append(Rejection(Reject.WINDOW, f"takes no window, the shape has {shape.window}"))
    if limits.max_window is not None and (shape.window is None or shape.window > limits.max_window):
        window = "none" if shape.window is None else str(shape.window)
        found.append(Rejection(Reject.WINDOW, f"takes windows of at most {limits.max_window}, the shape has {window}"))
    if shape.softcap is not None and not limits.softcap:
        found.append(Rejection(Reject.SOFTCAP, f"takes no softcap, the shape has {shape.softcap:g}"))
    if shape.sinks and not limits.sinks:
        found.append(Rejection(Reject.SINKS, "takes no sinks"))
    if shape.mask not in limits.masks:
        wanted = ", ".join(sorted(mask.value for mask in limits.masks))
        found.append(Rejection(Reject.MASK, f"takes {wanted}, the shape has {shape.mask.value}"))
    return found
