"""Cases of a bench, and the whole suite as data."""

from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.attention.ahead import calls_of, compile_ahead, make_call
from bench.attention.cases import FIXED, LOG_NORMAL, Sweep, cases_of, log_normal_lengths, quick_sweep
from bench.attention.suite import FA3_PAGE_SIZES, full_suite, new_cases
from kernels.vocabulary.shape import PLANNED_PHASES, Dtype, Phase
from support.bench_fakes import decode, extend, prefill

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


def test_prefill_of_every_length_has_equal_total_tokens() -> None:
    cases = cases_of(Sweep(Dtype.BF16, phases=(Phase.PREFILL,), head_dims=(128,), mixes=()))
    assert [len(case.queries) for case in cases] == [32, 16, 8, 4, 2, 1, 1]
    assert [sum(case.queries) for case in cases] == [16384] * 6 + [32768]


def test_a_case_costs_what_its_sequences_cost() -> None:
    """Two causal prompts of 3: 6 visible pairs each, of 4 heads of 64. q and out of 4 heads, k and v of 2."""
    case = prefill(3, sequences=2)
    assert case.flops == 2 * 6 * 4 * 64 * 4
    assert case.num_bytes == 2 * (2 * 3 * 4 * 64 + 2 * 3 * 2 * 64) * 4


def test_a_chunk_comes_after_its_context_and_decode_is_in_it() -> None:
    chunk, one = extend(16, 64), decode(64, batch=3)
    assert (chunk.queries, chunk.keys, chunk.shape.page_size) == ((16,), (80,), 16)
    assert (one.queries, one.keys) == ((1, 1, 1), (64, 64, 64))


def test_what_makes_no_case_is_refused() -> None:
    with pytest.raises(ValueError, match="6 query heads cannot share 4"):
        cases_of(Sweep(Dtype.BF16, heads=((6, 4),)))
    with pytest.raises(ValueError, match="3 tokens cannot be 4 sequences"):
        log_normal_lengths(4, 3, 0)


def test_every_window_makes_its_own_cases() -> None:
    cases = cases_of(Sweep(Dtype.BF16, (Phase.PREFILL,), (64,), lengths=(512,), mixes=(), windows=(None, 128)))
    assert [case.shape.window for case in cases] == [None, 128]
    assert cases[1].flops < cases[0].flops


@given(st.integers(1, 100), st.integers(0, 5000), st.integers(0, 99))
def test_log_normal_lengths_are_positive_and_fill_the_total(num_seqs: int, spare: int, seed: int) -> None:
    lengths = log_normal_lengths(num_seqs, num_seqs + spare, seed)
    assert len(lengths) == num_seqs
    assert min(lengths) >= 1
    assert sum(lengths) == num_seqs + spare


def test_quick_sweep_has_every_phase_and_kind_of_lengths() -> None:
    cases = cases_of(quick_sweep(Dtype.FP32))
    assert {case.shape.phase for case in cases} == set(PLANNED_PHASES)
    assert {case.mix for case in cases} == {FIXED, LOG_NORMAL}
