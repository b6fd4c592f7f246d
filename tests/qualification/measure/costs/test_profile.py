"""Kernels and times from the profiler's events. On a CPU the kernels are PyTorch's operators."""

from dataclasses import replace

import torch

from kernels.catalog import path_named
from kernels.vocabulary.shape import AttentionShape
from qualification.measure.costs.profile import Mark, calls_seen, profiled, temporary_bytes
from qualification.measure.inputs.attention_inputs import long_case
from support.qualification_fakes import DECODE, SHAPE

CPU = torch.device("cpu")


def seen_of(name: str, shape: AttentionShape) -> tuple[str, ...]:
    case, run = long_case(shape, CPU, seed=0), path_named(name).run
    assert run is not None
    out = torch.empty_like(case.q)
    return calls_seen([lambda: run(case.q, case.k, case.v, case.batch, case.flags, out)], CPU).always


def test_the_kernels_of_a_cpu_are_named() -> None:
    flash = ("aten::_scaled_dot_product_flash_attention_for_cpu",)
    assert seen_of("sdpa.cpu", SHAPE) == flash
    assert seen_of("sdpa.cpu", DECODE) == flash


def test_math_fallback_shows_in_the_profile() -> None:
    windowed = replace(SHAPE, window=17)
    assert seen_of("sdpa.math", windowed) == ("aten::_softmax", "aten::bmm")


def test_kernels_are_given_to_the_call_that_launched_them() -> None:
    a, b = torch.randn(8, 8), torch.randn(2, 8, 8)

    def work(mark: Mark) -> None:
        a @ a
        with mark():
            b @ b
        a.softmax(-1)
        with mark():
            b @ b
            b @ b

    seen = profiled(work, CPU)
    assert [dict(call) for call in seen.calls] == [{"aten::bmm": 1}, {"aten::bmm": 2}]
    assert dict(seen.outside) == {"aten::mm": 1, "aten::_softmax": 1}


def test_launches_of_every_call_and_of_some_are_separated() -> None:
    a, b = torch.randn(8, 8), torch.randn(2, 8, 8)
    seen = calls_seen([lambda: a @ a, lambda: (a @ a, b @ b)], CPU)
    assert (seen.always, seen.sometimes) == (("aten::mm",), ("aten::bmm",))


def test_cpu_has_no_count_of_temporary_memory() -> None:
    assert temporary_bytes(lambda: None, CPU) is None
