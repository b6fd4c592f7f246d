"""`hallmark doctor`: this machine, the kernel paths that can run on it, why the others cannot, and a verdict."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from kernels.collective.shape import CollectiveShape, Follows
from kernels.convolution.shape import ConvolutionShape
from kernels.convolution.sizes import ConvolutionSizes
from kernels.experts.formats import FewBitFormat
from kernels.experts.shape import AnyExpertActivation, ExpertForm, ExpertsShape
from kernels.fused.activation_kind import Activation
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.ungated_kind import Ungated
from kernels.linear.shape import LinearShape
from kernels.recurrence.shape import RecurrenceShape
from kernels.recurrence.sizes import RecurrenceSizes
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.fingerprint import Fingerprint
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.path import AnyPath, Tier
from kernels.vocabulary.recurrence_form import RecurrenceForm
from kernels.vocabulary.recurrence_operator import CONVOLUTION, RECURRENCE
from kernels.vocabulary.row_buckets import LinearRows, TokenRows
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Dtype, Mask, Phase
from kernels.vocabulary.value_shape import with_values
from qualification.common.table import table

_ACTIVATIONS: Mapping[ExpertForm, AnyExpertActivation] = {
    ExpertForm.GATED: Activation.SILU,
    ExpertForm.CAPPED: CappedSilu(7.0),
    ExpertForm.UNGATED: Ungated.RELU2,
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Lines to print; the last one is the verdict."""

    lines: list[str]
    can_serve: bool  # every phase of attention has a path, and products with weights


def diagnose(fingerprint: Fingerprint, paths: Iterable[AnyPath]) -> Diagnosis:
    """The fingerprint's fields, a line for each path, and whether a server can run here."""
    paths = list(paths)
    usable = {path.name: _usable_dtypes(path, fingerprint) for path in paths}
    rows = [_row(path, fingerprint, usable[path.name]) for path in paths]
    can_run = [path for path in paths if usable[path.name]]
    missing, falling = (_not_computed(some) for some in (can_run, [it for it in can_run if it.tier is Tier.FIRST]))
    lines = table(("machine", ""), [(name, _text(value)) for name, value in fingerprint.values().items()])
    lines += [
        "",
        *table(("path", "tier", "computes", "here"), rows),
        "",
        _verdict(can_run, len(paths), missing, falling),
    ]
    return Diagnosis(lines, not missing)


def _verdict(can_run: Sequence[AnyPath], num_paths: int, missing: Sequence[str], falling: Sequence[str]) -> str:
    if missing:
        return f"Verdict: no server can run here: nothing computes {' and '.join(missing)}."
    num_first = sum(path.tier is Tier.FIRST for path in can_run)
    tiers = f"{num_first} wanted, {len(can_run) - num_first} fallback"
    slow = f" It will be slow: {' and '.join(falling)} fall back." if falling else ""
    return f"Verdict: a server can run here, on {len(can_run)} of {num_paths} kernel paths ({tiers}).{slow}"


def _not_computed(paths: Iterable[AnyPath]) -> list[str]:
    """Return what every model needs and none of `paths` computes; a mixture's experts only some models need."""
    computed = {name for path in paths for name in _computes(path)}
    return [
        name for name in (*(phase.value for phase in PLANNED_PHASES), Operator.LINEAR.value) if name not in computed
    ]


def _computes(path: AnyPath) -> list[str]:
    """The phases of attention that a path computes, or its operator."""
    if path.operator is not Operator.ATTENTION:
        return [path.operator.value]
    return [phase.value for phase in Phase if phase in path.limits.phases]


def _usable_dtypes(path: AnyPath, fingerprint: Fingerprint) -> list[str]:
    return [dtype.value for dtype in Dtype if not path.rejects(_plain_shape(path, dtype), fingerprint)]


def _row(path: AnyPath, fingerprint: Fingerprint, usable: Sequence[str]) -> tuple[str, str, str, str]:
    whys = []
    for dtype in Dtype:
        rejections = path.rejects(_plain_shape(path, dtype), fingerprint)
        if rejections:
            whys.append({f"{rejection.code.value}: {rejection.detail}": None for rejection in rejections})
    # What stands against every dtype is the machine's; that some are not taken besides says nothing of it.
    reasons = [why for why in whys[0] if all(why in others for others in whys)] if whys else []
    reasons = reasons or list(dict.fromkeys(why for each in whys for why in each))
    verdict = f"yes, in {', '.join(usable)}" if usable else f"no ({'; '.join(reasons)})"
    return path.name, path.tier.value, " ".join(_computes(path)), verdict


def _plain_shape(
    path: AnyPath, dtype: Dtype
) -> AttentionShape | LinearShape | ExpertsShape | CollectiveShape | RecurrenceShape | ConvolutionShape:
    """A shape that only the machine or the dtype can make `path` reject."""
    if path.operator is Operator.LINEAR:
        weight_format = min(path.limits.formats, key=lambda it: it.name)
        sizes = product((2048, 4096), LinearRows)
        products = (LinearShape(dtype, 4096, size, rows, weight_format=weight_format) for size, rows in sizes)
        return min(products, key=lambda shape: len(path.limits.rejections(shape)))
    if path.operator is Operator.EXPERTS:
        return ExpertsShape(
            dtype=dtype,
            format=min(path.limits.formats, key=lambda it: (isinstance(it, FewBitFormat), it.value)),
            num_experts=8,
            num_active=2,
            hidden=4096,
            width=4096,
            activation=_ACTIVATIONS[path.limits.form],
            has_bias=False,
            rows=TokenRows.LE_16,
        )
    if path.operator is Operator.COLLECTIVE:
        sums = (
            CollectiveShape(dtype, columns=4096, world=2, follows=Follows.ADD_NORM, rows=rows) for rows in TokenRows
        )
        return min(sums, key=lambda shape: len(path.limits.rejections(shape)))
    if path.operator is RECURRENCE:
        form = path.limits.form
        width = 1 if form is RecurrenceForm.FIXED_DECAY else 4  # taps
        layer = RecurrenceSizes(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, width=width)
        return RecurrenceShape.of(layer, Phase.EXTEND, dtype, Dtype.FP32, TokenRows.LE_16, form)
    if path.operator is CONVOLUTION:
        return ConvolutionShape.of(ConvolutionSizes(2048, 3), Phase.EXTEND, dtype, TokenRows.LE_16)
    phase = next(phase for phase in Phase if phase in path.limits.phases)
    values = path.limits.max_values
    num_kv_heads = 1 if values is not None and values.is_latent else 8
    shape = AttentionShape(
        phase=phase,
        dtype=dtype,
        kv_dtype=next(iter(path.limits.kv_dtypes or {dtype})),
        num_heads=num_kv_heads * path.limits.group_multiple,
        num_kv_heads=num_kv_heads,
        head_dim=path.limits.max_head_dim,
        query_bucket=Bucket.LE_128,
        context_bucket=Bucket.LE_128,
        page_size=None if phase is Phase.PREFILL else path.limits.page_size_multiple,
        window=path.limits.max_window,
        mask=Mask.CAUSAL if Mask.CAUSAL in path.limits.masks else Mask.FULL,
    )
    return with_values(shape, values)


def _text(value: object) -> str:
    return "none" if value is None else str(value)
