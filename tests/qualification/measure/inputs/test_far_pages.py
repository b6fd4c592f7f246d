"""Pages past number 2**32 of their pool: what they hold, and every path of attention that a CPU can run on them.

The pool takes 4 to 17 GB of addresses and some MB of memory. On a GPU it takes memory: `gpu` tests it there.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.catalog import PATHS
from kernels.system.device import read_fingerprint
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.fingerprint import Device
from kernels.vocabulary.path import KernelPath
from kernels.vocabulary.shape import AttentionShape, Dtype, Mask
from qualification.measure.checks.attention_checks import check_path
from qualification.measure.checks.references import References
from qualification.measure.faults.attention_faults import narrow_trial_shapes, trial_shapes
from qualification.measure.faults.latent_faults import trial_shapes_of_latents
from qualification.measure.inputs.attention_inputs import few_case
from qualification.measure.inputs.far_memory import FAR
from qualification.measure.inputs.far_pages import far_cases

CPU = torch.device("cpu")
GPU = torch.device("cuda")


def shapes(dtype: Dtype) -> Iterator[AttentionShape]:
    """Small shapes over pages: of each phase, of narrow values, of latents, and in 8 bits."""
    for shape in (*trial_shapes(dtype), *narrow_trial_shapes(dtype), *trial_shapes_of_latents(dtype)):
        if shape.page_size is not None:
            yield shape
    if dtype is not Dtype.FP32:
        yield from (replace(it, kv_dtype=FP8) for it in trial_shapes(dtype) if it.page_size is not None)


@pytest.mark.parametrize("shape", [*shapes(Dtype.BF16)], ids=str)
def test_far_pages_hold_what_near_ones_do_and_wrap_to_nan(shape: AttentionShape) -> None:
    [case] = far_cases(shape, CPU, seed=3)
    near = few_case(shape, CPU, seed=3)
    assert case.near is not None
    for far, pages, of_near in ((case.k, near.k, case.near.k), (case.v, near.v, case.near.v)):
        numbers = case.batch.page_table.flatten().long()
        found, expected = (
            x.float()[:, : shape.page_size] for x in (far[numbers], pages[near.batch.page_table.flatten()])
        )
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(pages.float().nan_to_num(7.0), of_near.float().nan_to_num(7.0))
        starts = numbers * far.stride(0)
        assert (starts >= FAR).all()
        wrapped = far.as_strided((FAR,), (1,))[starts % FAR]
        assert wrapped.float().isnan().all()
        assert (starts % FAR < 2**31).all(), "signed and unsigned offsets wrap alike"


def on_a_cpu() -> Iterator[tuple[KernelPath, AttentionShape]]:
    """Every path that a CPU computes, Triton's in its interpreter, with each of these shapes that it takes."""
    for path in PATHS:
        is_ordered = path.name == "triton.ordered"  # no server offers it there
        if path.run is not None and (is_ordered or path.limits.devices & {Device.CPU, Device.INTERPRETER}):
            yield from ((path, it) for it in shapes(Dtype.FP16) if path.serves(it) and not path.limits.rejections(it))


@pytest.mark.parametrize(("path", "shape"), [*on_a_cpu()], ids=lambda it: getattr(it, "name", str(it)))
def test_a_path_on_a_cpu_reads_far_pages(path: KernelPath, shape: AttentionShape) -> None:
    assert path.run is not None
    checks = check_path(path.run, far_cases(shape, CPU, seed=3))
    assert [it for it in checks if not it.is_passed] == []


@pytest.mark.gpu
def test_every_path_on_a_gpu_reads_far_pages() -> None:
    """Plain shapes and wide heads beside those of a CPU."""
    here, seen = read_fingerprint(GPU), set()
    wide = (replace(it, head_dim=head_dim) for it in trial_shapes(Dtype.BF16) for head_dim in (128, 256, 512))
    plain = (replace(it, window=None, softcap=None, sinks=False, mask=Mask.CAUSAL) for it in trial_shapes(Dtype.BF16))
    for shape in (*shapes(Dtype.BF16), *(it for it in (*wide, *plain) if it.page_size is not None)):
        references = References()
        for path in PATHS:
            if path.run is None or path.rejects(shape, here):
                continue
            cases = list(far_cases(shape, GPU, seed=3))
            if not cases:
                pytest.skip("far pages take 8.6 GB, and at most half of the free memory")
            checks = check_path(path.run, cases, references)
            assert [it for it in checks if not it.is_passed] == [], (path.name, shape)
            seen.add(path.name)
    assert {path.name for path in PATHS if not path.rejects(next(shapes(Dtype.BF16)), here)} <= seen
