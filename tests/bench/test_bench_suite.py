"""The whole of what is measured, as data."""

from fnmatch import fnmatchcase

import torch

from bench.attention.ahead import calls_of, compile_ahead, make_call
from bench.attention.cases import cases_of, quick_sweep
from bench.attention.suite import FA3_PAGE_SIZES, full_suite, new_cases
from kernels.vocabulary.shape import PLANNED_PHASES, Dtype, Phase

SUITE = full_suite(Dtype.BF16)
CASES = [case for _, cases in new_cases(SUITE) for case in cases]


def test_no_case_is_measured_twice() -> None:
    assert len(CASES) == len(set(CASES))
    assert all(cases for _, cases in new_cases(SUITE))


def test_every_phase_has_every_head_dim() -> None:
    head_dims = {64, 80, 96, 112, 128, 192, 256}
    assert {(case.shape.phase, case.shape.head_dim) for case in CASES} == {
        (p, d) for p in PLANNED_PHASES for d in head_dims
    }


def test_every_part_is_beside_fa3_or_flex() -> None:
    known = ["fa2", "cudnn", "flex", "fa3", *(f"fa3-page{size}" for size in FA3_PAGE_SIZES)]
    for part in SUITE:
        assert part.peers is not None
        assert all(any(fnmatchcase(name, pattern) for name in known) for pattern in part.peers)
        assert {"fa3", "flex"} & {*part.peers}


def test_batches_of_decode_have_no_gap() -> None:
    """Cliffs could hide in gaps: 1 to 64 sequences of 4096 tokens at head dim 128."""
    cases = [case for case in CASES if case.shape.phase is Phase.DECODE and case.shape.head_dim == 128]
    plain = [case for case in cases if case.keys[0] == 4096 and case.queries[0] == 1 and case.is_equal_lengths]
    assert {len(case.keys) for case in plain} == {*range(1, 65), 256}


def test_large_cases_are_not_compiled_ahead() -> None:
    assert len(calls_of(CASES, [])) == sum(case.num_bytes <= 2**31 for case in CASES) < len(CASES)


def test_worker_calls_the_paths_on_each_case() -> None:
    cases = cases_of(quick_sweep(Dtype.FP32))[:4]
    said = compile_ahead(cases, ["sdpa.cpu"], torch.device("cpu"), num_processes=2, seed=0)
    assert said == f"compiling ahead in 2 processes, {len(cases)} of {len(cases)} calls"
    assert all(make_call(call, torch.device("cpu"), seed=0) for call in calls_of(cases[:2], ["sdpa.cpu"]))
