"""The driver's record of a captured call. Needs a GPU; the fields of its structures are checked without one."""

import ctypes

import pytest
import torch

from kernels.catalog import path_named
from kernels.driver.cuda_driver import DriverError, EdgeData, KernelParams
from kernels.driver.driver_record import Recorder
from kernels.fused.backend import jit, tl
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import AttentionShape, Dtype, Phase
from qualification.attest.explain import TimeClass, explain
from qualification.measure.costs.profile import calls_seen
from qualification.measure.inputs.attention_inputs import long_case


def test_kernel_node_parameters_have_the_drivers_layout() -> None:
    offsets = {name: getattr(KernelParams, name).offset for name, _ in KernelParams._fields_}
    assert offsets == {"func": 0, "sizes": 8, "kernel_params": 40, "extra": 48, "kern": 56, "ctx": 64}
    assert ctypes.sizeof(KernelParams) == 72
    assert ctypes.sizeof(EdgeData) == 8


@jit
def planted_kernel(x_ptr, NUM_ADDED: tl.constexpr):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    x = tl.load(x_ptr + at)
    for _ in range(NUM_ADDED):
        x += 1.0
    tl.store(x_ptr + at, x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_nothing_can_be_recorded() -> None:
    with pytest.raises((DriverError, RuntimeError, AssertionError)):
        Recorder(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton.prefill", "gluon.prefill.hopper", "triton.extend", "triton.decode"])
def test_the_record_names_the_kernels_that_the_profiler_sees(name: str) -> None:
    device, path = torch.device("cuda"), path_named(name)
    (phase,) = path.limits.phases
    page_size = None if phase is Phase.PREFILL else 64
    shape = AttentionShape(phase, Dtype.BF16, Dtype.BF16, 8, 2, 128, Bucket.LE_128, Bucket.LE_128, page_size=page_size)
    case, run = long_case(shape, device, seed=0), path.run
    assert run is not None
    out, again = torch.empty_like(case.q), torch.full_like(case.q, torch.nan)
    run(case.q, case.k, case.v, case.batch, case.flags, out)
    seen = Recorder(device).calls_seen([lambda: run(case.q, case.k, case.v, case.batch, case.flags, again)])
    assert torch.equal(out, again)  # a recorded call is still computed
    profiled = calls_seen([lambda: run(case.q, case.k, case.v, case.batch, case.flags, out)], device)
    assert seen.calls == profiled.calls


@pytest.mark.gpu
def test_time_of_an_unnamed_kernel_is_unexplained() -> None:
    device = torch.device("cuda")
    weight = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    x, y, z = torch.randn(3, 64, 4096, device=device, dtype=torch.bfloat16)
    many = torch.zeros(2**20, device=device)

    def step() -> None:
        torch.mm(x, weight, out=y)
        torch.add(y, x, out=z)
        planted_kernel[(2**20 // 128,)](many, NUM_ADDED=1000)

    step()
    recorder = Recorder(device)
    graph = recorder.capture(step)
    before = many.clone()
    assert sum(recorder.node_names(graph).values()) >= 3  # a product may be two
    found = explain(recorder.node_seconds(graph), {})
    assert list(found.unexplained) == ["planted_kernel"]
    assert found.unproven
    assert found.seconds[TimeClass.NAMED] > 0
    assert not torch.equal(many, before)  # the copy computes
    graph.replay()
    torch.cuda.synchronize()
