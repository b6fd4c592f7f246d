"""Decisions of the real catalog after an upgrade, and PyTorch's kernels for grouped heads with a mask."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch

from kernels.catalog import PATHS, path_named
from kernels.vocabulary.fingerprint import Device, Fingerprint
from kernels.vocabulary.path import KernelPath, Reject, Tier
from kernels.vocabulary.shape import AttentionShape, Dtype, Mask, Phase
from qualification.attest.promise import Promise, call_mismatch
from qualification.decision.decision import Book, Decision, Policy, Status, decide
from qualification.decision.model_shapes import ServingLimits, shapes_needed, signature_of
from qualification.decision.presets import preset_named
from qualification.evidence.matrix import Matrix
from qualification.measure.costs.profile import calls_seen
from qualification.measure.inputs.attention_inputs import cases
from qualification.measure.trials.trial import call_of
from qualification.model.families.reader import read_model
from support.qualification_fakes import SHAPE, evidence

H200 = Fingerprint(Device.CUDA, "NVIDIA H200", 90, "580.159.04", "13.0", "91900", "2.11.0+cu130", "3.6.0")
LIMITS = ServingLimits(32768, 8192, 64, Dtype.BF16, Dtype.BF16)
LLAMA = preset_named("llama-3.1-8b").config
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def shapes_of(config: dict[str, object]) -> tuple[AttentionShape, ...]:
    return shapes_needed(signature_of(read_model(config)), LIMITS)


def able(shape: AttentionShape) -> Iterator[KernelPath]:
    return (path for path in PATHS if not path.rejects(shape, H200))


def decisions(
    shapes: tuple[AttentionShape, ...], policy: Policy, machine: Fingerprint = H200
) -> dict[AttentionShape, Decision]:
    """Decide by a reviewed matrix that proves, for the model before, every path that can compute a shape."""
    known = {
        (shape, path.name): evidence(shape, path, fingerprint=H200)
        for shape in shapes_of(dict(LLAMA))
        for path in able(shape)
    }
    book = Book(Matrix(known, "digest"))
    return {
        shape: decide(shape, paths=PATHS, fingerprint=machine, book=book, quarantined=frozenset(), policy=policy)
        for shape in shapes
    }


def test_before_upgrade_every_shape_is_proven() -> None:
    found = decisions(shapes_of(dict(LLAMA)), Policy.REFUSE).values()
    assert {decision.status for decision in found} == {Status.PROVEN}
    assert not any(decision.is_fallback for decision in found)


@pytest.mark.parametrize("policy", [Policy.REFUSE, Policy.QUALIFY])
def test_head_dim_320_is_not_served_without_proof(policy: Policy) -> None:
    found = decisions(shapes_of({**LLAMA, "head_dim": 320}), policy).values()
    assert {decision.path for decision in found} == {None}
    assert all(Reject.HEAD_DIM in decision.fallback_reasons for decision in found)


def test_head_dim_320_falls_back_under_degrade() -> None:
    found = decisions(shapes_of({**LLAMA, "head_dim": 320}), Policy.DEGRADE).values()
    assert {decision.status for decision in found} == {Status.UNPROVEN}
    assert {decision.path for decision in found} <= {path.name for path in PATHS if path.tier is Tier.FALLBACK}
    assert all(Reject.HEAD_DIM in decision.fallback_reasons for decision in found)
    assert all(path_named(decision.wanted).tier is Tier.FIRST for decision in found)


@pytest.mark.parametrize("field", ["torch", "triton", "driver", "cuda", "cudnn", "gpu"])
def test_an_upgrade_of_the_stack_leaves_nothing_proven(field: str) -> None:
    machine = replace(H200, **{field: "another"})
    found = decisions(shapes_of(dict(LLAMA)), Policy.REFUSE, machine).values()
    assert {(decision.path, decision.status) for decision in found} == {(None, Status.STALE)}
    assert {decision.fallback_reasons for decision in found} == {(Reject.STALE,)}


@pytest.mark.parametrize(("window", "mask"), [(48, Mask.CAUSAL), (None, Mask.SPANS), (None, Mask.CAUSAL)])
@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.EXTEND])
def test_grouped_heads_with_a_mask_run_the_pinned_kernel(phase: Phase, window: int | None, mask: Mask) -> None:
    """Real calls under the profiler: PyTorch may take math for grouped heads with a mask, and nobody would be told."""
    shape = replace(SHAPE, phase=phase, page_size=None if phase is Phase.PREFILL else 16, window=window, mask=mask)
    device = torch.device("cpu")
    seen = {}
    for name in ("sdpa.cpu", "sdpa.math"):
        run = path_named(name).run
        assert run is not None
        seen[name] = calls_seen([call_of(run, case) for case in islice(cases(shape, device, seed=0), 2)], device)
    assert seen["sdpa.cpu"].always == (FLASH,)
    assert seen["sdpa.cpu"].sometimes == ()
    assert FLASH not in (*seen["sdpa.math"].always, *seen["sdpa.math"].sometimes)
    for call in seen["sdpa.math"].calls:
        wrong = call_mismatch(Promise("sdpa.cpu", (FLASH,)), call)
        assert wrong is not None
        assert wrong.startswith(f"sdpa.cpu did not launch {FLASH} and launched aten::")
