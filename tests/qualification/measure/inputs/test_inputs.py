import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import AttentionShape, Mask, Phase
from qualification.measure.inputs.attention_inputs import Case, Lengths, cases, long_case, longest_lengths
from qualification.measure.inputs.guard import GUARD_ROWS
from support.qualification_fakes import DECODE, SHAPE

CPU = torch.device("cpu")
PREFILL_512 = replace(SHAPE, query_bucket=Bucket.LE_512, context_bucket=Bucket.LE_512)
EXTEND = replace(PREFILL_512, phase=Phase.EXTEND, query_bucket=Bucket.LE_128, page_size=16)
SHAPES = [SHAPE, PREFILL_512, EXTEND, DECODE]


def lengths(case: Case) -> list[Lengths]:
    queries = case.batch.cu_seqlens_q.diff().tolist()
    keys = case.batch.context_lens if case.batch.is_paged else case.batch.cu_seqlens_k.diff()
    return [Lengths(*pair) for pair in zip(queries, keys.tolist(), strict=True)]


def around(view: torch.Tensor) -> list[torch.Tensor]:
    """The rows of a tensor's storage before and behind it."""
    row = view.stride(0)
    start, end = view.storage_offset() - GUARD_ROWS * row, view.storage_offset() + view.numel()
    return [view.as_strided((GUARD_ROWS * row,), (1,), first) for first in (start, end)]


@pytest.mark.parametrize(
    ("shape", "is_cpu", "expected"),
    [
        (SHAPE, False, Lengths(128, 128)),
        (replace(SHAPE, query_bucket=Bucket.LE_32K, context_bucket=Bucket.LE_32K), False, Lengths(32768, 32768)),
        (replace(SHAPE, query_bucket=Bucket.LE_2K, context_bucket=Bucket.LE_2K), True, Lengths(2048, 2048)),
        (replace(SHAPE, query_bucket=Bucket.LE_8K, context_bucket=Bucket.LE_8K), True, Lengths(2049, 2049)),
        (replace(EXTEND, context_bucket=Bucket.LE_8K), True, Lengths(128, 4096)),
        (replace(EXTEND, context_bucket=Bucket.LE_8K), False, Lengths(128, 8192)),
        (replace(DECODE, context_bucket=Bucket.LE_32K), True, Lengths(1, 8193)),
        (replace(DECODE, context_bucket=Bucket.GT_128K), False, Lengths(1, 262144)),
    ],
)
def test_the_longest_length_is_the_buckets_edge_or_just_inside(
    shape: AttentionShape, is_cpu: bool, expected: Lengths
) -> None:
    assert longest_lengths(shape, is_cpu=is_cpu) == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inputs_are_finite_and_surrounded_by_nan(shape: AttentionShape) -> None:
    for case in cases(shape, CPU, seed=0):
        assert case.q.isfinite().all()
        assert all(part.isnan().all() for part in around(case.q))
        if case.batch.is_paged:
            continue
        for packed in (case.k, case.v):
            assert packed.isfinite().all()
            assert all(part.isnan().all() for part in around(packed))


@pytest.mark.parametrize("shape", [EXTEND, DECODE], ids=str)
def test_pages_hold_nan_only_past_the_last_key(shape: AttentionShape) -> None:
    for case in cases(shape, CPU, seed=0):
        for index, length in enumerate(lengths(case)):
            num_pages = -(-length.keys // 16)
            assert (case.batch.page_table[index, :num_pages] > 0).all()
            assert (case.batch.page_table[index, num_pages:] == 0).all()
            for pages in (case.k, case.v):
                mine = pages[case.batch.page_table[index, :num_pages].long()].flatten(0, 1)
                assert mine[: length.keys].isfinite().all()
                assert mine[length.keys :].isnan().all()
                assert pages[0].isnan().all()


def test_no_page_belongs_to_two_sequences() -> None:
    case = next(cases(DECODE, CPU, seed=0))
    used = case.batch.page_table[case.batch.page_table > 0]
    assert used.numel() == used.unique().numel() > 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_lengths_stand_on_and_beside_every_edge(shape: AttentionShape) -> None:
    windowed = replace(shape, window=48)
    found = {length.keys for length in lengths(next(cases(windowed, CPU, seed=0)))}
    assert {0, 1, 2, 47, 48, 49, 63, 64, 65, 127, 128} <= found
    assert ({15, 16, 17} <= found) == (shape.page_size == 16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bounds_are_those_of_the_shape_and_no_query_is_longer(shape: AttentionShape) -> None:
    longest = longest_lengths(shape, is_cpu=True)
    for case in cases(shape, CPU, seed=0):
        assert (case.batch.max_seqlen_q, case.batch.max_context) == (longest.queries, longest.keys)
        assert all(length.queries <= length.keys for length in lengths(case))


def test_a_window_beyond_the_short_cases_gets_a_case_of_its_own() -> None:
    shape = replace(DECODE, window=3000, context_bucket=Bucket.LE_8K)
    case = next(case for case in cases(shape, CPU, seed=0) if case.name == "window_edges")
    assert [length.keys for length in lengths(case)] == [2999, 3000, 3001, 3065]


def test_rows_compared_include_each_sequences_ends() -> None:
    case = next(cases(PREFILL_512, CPU, seed=0))
    rows = case.rows.tolist()
    assert rows == sorted(set(rows))
    edges = case.batch.cu_seqlens_q.tolist()
    ends = {row for start, end in pairwise(edges) if end > start for row in (start, end - 1)}
    assert ends <= {*rows}
    assert len(rows) < case.q.shape[0]


def test_the_same_seed_gives_the_same_input() -> None:
    ours, theirs = (next(cases(DECODE, CPU, seed=7)) for _ in range(2))
    assert torch.equal(ours.q, theirs.q)
    assert torch.equal(ours.k.nan_to_num(9.0), theirs.k.nan_to_num(9.0))
    assert not torch.equal(ours.q, next(cases(DECODE, CPU, seed=8)).q)


def test_large_logits_and_an_outlier_key_are_among_the_cases() -> None:
    found = {case.name: case for case in cases(SHAPE, CPU, seed=0)}
    assert found["large_logits"].q.std() > 25
    assert found["outlier_key"].k.abs().max() > 30


def test_sinks_and_spans_are_made_where_the_shape_has_them() -> None:
    case = long_case(replace(SHAPE, sinks=True, mask=Mask.SPANS, softcap=30.0), CPU, seed=0)
    assert case.flags.sinks.shape == (4,)
    assert case.flags.softcap == 30.0
    assert case.flags.spans.shape == (128, 2)
    assert case.flags.spans[[63, 64, 95, 96]].tolist() == [[0, 0], [64, 96], [64, 96], [0, 0]]
    assert math.isclose(case.flags.scale, 0.9 * 0.125)  # not the root of head_dim, which a kernel might take
