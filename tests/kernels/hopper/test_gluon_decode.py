"""What the kernels of `gluon.decode.hopper` compute, in numpy: against the oracle, over poisoned pages and tables."""

import random
from dataclasses import replace

import pytest
import torch
from attention_inputs import Inputs, assert_right, flags_for, paged
from gluon_by_numpy import numpy_runner

from kernels.batch import AttentionFlags
from kernels.hopper.decode.stream import SEQS
from kernels.hopper.decode.variants import DecodeVariant, variant_of

CPU = torch.device("cpu")
# No key, no query, tile and page edges, and one context much longer than the others.
CONTEXTS = [1, 15, 16, 17, 33, 0, 65, 64, 300, 2]
QUERIES = [1, 1, 1, 1, 1, 1, 1, 0, 1, 1]


def small(inputs: Inputs, flags: AttentionFlags, *, heads: int = 1, block_n: int = 16) -> DecodeVariant:
    """A variant of few keys a tile, so that short contexts have many."""
    num_heads, page_size, num_kv_heads = inputs.q.shape[1], inputs.k.shape[1], inputs.k.shape[2]
    variant = variant_of(
        inputs.q.shape[2], page_size, (num_heads, num_kv_heads), max(1, inputs.batch.max_seqlen_q),
        inputs.batch.num_seqs, inputs.batch.max_context, flags,
    )  # fmt: skip
    return replace(variant, heads=heads, block_n=block_n, stages=2)


def check(inputs: Inputs, flags: AttentionFlags, num_programs: int, *, heads: int = 1, parts: int = 16) -> None:
    run = numpy_runner(small(inputs, flags, heads=heads), num_programs, parts)
    assert_right(run, inputs, flags)


def ragged(heads: tuple[int, int] = (4, 2), **options: int) -> Inputs:
    return paged(QUERIES, CONTEXTS, CPU, heads=heads, dtype=torch.float32, page_size=32, **options)


@pytest.mark.parametrize("num_programs", [1, 2, 7, 16, 61])
def test_any_number_of_programs_computes_a_ragged_batch(num_programs: int) -> None:
    inputs = ragged()
    check(inputs, flags_for(inputs), num_programs)


@pytest.mark.parametrize("parts", [1, 16, 64])
def test_partial_results_of_a_row_are_combined_in_groups(parts: int) -> None:
    """Of the longest context there are from 2 parts, which registers hold, to some 25."""
    inputs = ragged((6, 2))
    for num_programs in (5, 23, 61):
        check(inputs, flags_for(inputs), num_programs, parts=parts)


def test_neighbouring_heads_are_worked_on_together() -> None:
    inputs = ragged((8, 4))
    check(inputs, flags_for(inputs), 9, heads=2)


@pytest.mark.parametrize("window", [1, 16, 17, 64, 301])
def test_windows(window: int) -> None:
    inputs = ragged()
    check(inputs, flags_for(inputs, window=window), 5)


def test_all_flags_at_once() -> None:
    inputs = ragged()
    check(inputs, flags_for(inputs, "softcap", "sinks", window=40), 11)


@pytest.mark.parametrize("heads", [(34, 1), (66, 2)])
def test_a_group_too_large_for_one_row_is_several(heads: tuple[int, int]) -> None:
    inputs = ragged(heads)
    assert small(inputs, flags_for(inputs)).parts > 1
    check(inputs, flags_for(inputs, "sinks"), 13)


@pytest.mark.parametrize("max_queries", [2, 3, 8])
def test_a_few_queries_a_sequence(max_queries: int) -> None:
    queries, contexts = [max_queries, 0, 1, max_queries - 1, 2], [max_queries, 5, 70, 90, 1]
    inputs = paged(queries, contexts, CPU, heads=(8, 2), dtype=torch.float32, page_size=32)
    for flags in (flags_for(inputs), flags_for(inputs, "sinks", window=20)):
        check(inputs, flags, 6)


def test_a_few_queries_in_several_chunks() -> None:
    """A part of a row's columns holds no query."""
    inputs = paged([3, 0, 1], [70, 5, 130], CPU, heads=(6, 2), head_dim=136, dtype=torch.float32, page_size=32)
    flags = flags_for(inputs, "softcap", window=50)
    assert small(inputs, flags).chunks == 3
    check(inputs, flags, 5)


@pytest.mark.parametrize(("head_dim", "chunks"), [(40, 1), (72, 2), (192, 3), (200, 4)])
def test_head_dims_that_are_padded_or_of_several_chunks(head_dim: int, chunks: int) -> None:
    inputs = ragged(head_dim=head_dim)
    flags = flags_for(inputs, "sinks")
    assert small(inputs, flags).chunks == chunks
    check(inputs, flags, 4)


@pytest.mark.parametrize("num_seqs", [32, 33, 64, 65])
def test_each_way_to_look_at_sequences(num_seqs: int) -> None:
    inputs = paged([1] * num_seqs, [1 + 13 * n % 50 for n in range(num_seqs)], CPU, heads=(1, 1), dtype=torch.float32)
    check(inputs, flags_for(inputs), 19)


def test_more_sequences_than_are_looked_at_together() -> None:
    num_seqs = 2 * SEQS.value + 40
    draw = random.Random(3)
    contexts = [draw.choice([0, 1, 5, 40]) for _ in range(num_seqs)]
    queries = [draw.choice([0, 1, 1]) for _ in range(num_seqs)]
    inputs = paged(queries, contexts, CPU, heads=(1, 1), dtype=torch.float32, page_size=16)
    check(inputs, flags_for(inputs), 37)


def test_random_batches() -> None:
    draw = random.Random(11)
    for _ in range(6):
        num_seqs = draw.randint(1, 9)
        contexts = [int(2 ** draw.uniform(0, 8)) for _ in range(num_seqs)]
        inputs = paged([1] * num_seqs, contexts, CPU, heads=(4, 2), dtype=torch.float32, page_size=16)
        check(inputs, flags_for(inputs, window=draw.choice([None, 30])), draw.randint(1, 40))


@pytest.mark.parametrize(
    ("heads", "queries", "columns", "parts"),
    [((32, 8), 1, 8, 1), ((7, 1), 1, 8, 1), ((16, 1), 1, 16, 1), ((64, 1), 1, 32, 2), ((32, 8), 3, 16, 1),
     ((32, 8), 8, 32, 1), ((64, 8), 8, 32, 2)],
)  # fmt: skip
def test_queries_of_a_group_take_as_few_rows_as_possible(
    heads: tuple[int, int], queries: int, columns: int, parts: int
) -> None:
    variant = variant_of(128, 64, heads, queries, 8, 4096, AttentionFlags(0.1))
    assert (variant.columns, variant.parts) == (columns, parts)


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128])
def test_a_tile_never_crosses_the_border_of_a_page(page_size: int) -> None:
    assert page_size % variant_of(128, page_size, (32, 8), 1, 8, 4096, AttentionFlags(0.1)).block_n == 0


@pytest.mark.parametrize(
    ("head_dim", "page_size", "queries"), [(320, 64, 1), (100, 64, 1), (128, 24, 1), (128, 64, 17)]
)
def test_what_no_variant_takes_is_refused(head_dim: int, page_size: int, queries: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        variant_of(head_dim, page_size, (32, 8), queries, 8, 4096, AttentionFlags(0.1))
