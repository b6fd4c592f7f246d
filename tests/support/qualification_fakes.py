"""Machines, shapes, paths and evidence for the tests of qualification, each a plain value."""

from dataclasses import replace
from typing import Any

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.operators import AnyShape, buckets_of, phase_of
from kernels.vocabulary.path import AnyPath, KernelPath, Limits, Tier
from kernels.vocabulary.shape import PLANNED_PHASES, AttentionShape, Dtype, Mask, Phase
from qualification.evidence.evidence import CHECK_LIMITS, Check, Evidence, Timing

MACHINE = Fingerprint(Device.CPU, "Test CPU", None, None, None, None, "2.13.0", None)
SHAPE = AttentionShape(Phase.PREFILL, Dtype.FP32, Dtype.FP32, 4, 2, 64, Bucket.LE_128, Bucket.LE_128)
DECODE = replace(SHAPE, phase=Phase.DECODE, page_size=16)

LIMITS = Limits(
    devices=frozenset({Device.CPU}),
    phases=frozenset(PLANNED_PHASES),
    dtypes=frozenset(Dtype),
    max_head_dim=256,
    masks=frozenset(Mask),
)


def no_kernel(*_: object) -> None:
    raise AssertionError("this path must not run")


def path(name: str, tier: Tier = Tier.FIRST, **limits: Any) -> KernelPath:
    return KernelPath(name, tier, replace(LIMITS, **limits), f"digest of {name}", (), no_kernel)


def checks(measured: float = 0.5, *, missing: str | None = None) -> tuple[Check, ...]:
    """All required checks: shares of a limit at 0.5 unless told otherwise, counts at 0 unless that is above 1."""
    return tuple(
        Check(name, "ragged", measured if limit or measured > 1 else 0.0, limit, unit, 0)
        for name, (limit, unit) in sorted(CHECK_LIMITS.items())
        if name != missing
    )


def evidence(shape: AnyShape, kernel: AnyPath, p50_us: float = 10.0, **changes: Any) -> Evidence:
    """Proof of (shape, path) on MACHINE, with changes."""
    queries, context = buckets_of(shape)
    found = Evidence(
        shape=shape,
        path=kernel.name,
        source_digest=kernel.source_digest,
        fingerprint=MACHINE,
        checks=checks(),
        tested_query_tokens=1 if phase_of(shape) == Phase.DECODE.value else queries.lo + 1,
        tested_context_tokens=context.lo + 1,
        at="2026-11-20T12:00:00+00:00",
        timing=Timing(p50_us, 0.01, 20),
    )
    return replace(found, **changes)
