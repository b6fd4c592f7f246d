"""`hallmark doctor`: this machine, the attention paths that can run on it, and why the others cannot."""

from collections.abc import Iterable, Iterator

from kernels.buckets import Bucket
from kernels.fingerprint import Fingerprint
from kernels.path import KernelPath
from kernels.shape import AttentionShape, Dtype, Phase
from qualification.common.table import table


def report(fingerprint: Fingerprint, paths: Iterable[KernelPath]) -> Iterator[str]:
    """Lines: the fingerprint's fields, then one for each path."""
    yield from table(("machine", ""), [(name, _text(value)) for name, value in fingerprint.values().items()])
    yield ""
    yield from table(("path", "tier", "phases", "here"), [_row(path, fingerprint) for path in paths])


def _row(path: KernelPath, fingerprint: Fingerprint) -> tuple[str, str, str, str]:
    phases = [phase for phase in Phase if phase in path.limits.phases]
    usable, whys = [], []
    for dtype in Dtype:
        rejections = path.rejects(_plain_shape(path, phases[0], dtype), fingerprint)
        if rejections:
            whys.append({f"{rejection.code.value}: {rejection.detail}": None for rejection in rejections})
        else:
            usable.append(dtype.value)
    # What stands against every dtype is the machine's; that some are not taken besides says nothing of it.
    reasons = [why for why in whys[0] if all(why in others for others in whys)] if whys else []
    reasons = reasons or list(dict.fromkeys(why for each in whys for why in each))
    verdict = f"yes, in {', '.join(usable)}" if usable else f"no ({'; '.join(reasons)})"
    return path.name, path.tier.value, " ".join(phase.value for phase in phases), verdict


def _plain_shape(path: KernelPath, phase: Phase, dtype: Dtype) -> AttentionShape:
    """A shape that only the machine or the dtype can make `path` reject."""
    return AttentionShape(
        phase=phase,
        dtype=dtype,
        kv_dtype=dtype,
        num_heads=8,
        num_kv_heads=8,
        head_dim=path.limits.max_head_dim,
        query_bucket=Bucket.LE_128,
        context_bucket=Bucket.LE_128,
        page_size=None if phase is Phase.PREFILL else path.limits.page_size_multiple,
    )


def _text(value: object) -> str:
    return "none" if value is None else str(value)
