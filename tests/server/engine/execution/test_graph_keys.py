from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.row_buckets import LinearRows, TokenRows
from kernels.vocabulary.shape import Mask, Phase
from qualification.decision.presets import preset_named
from qualification.model.config import ModelConfig
from qualification.model.families.reader import read_model
from server.engine.execution.graph_keys import (
    GraphKey,
    GraphSizes,
    PartKey,
    graph_keys,
    graph_sizes,
    key_of,
    row_sizes,
    token_sizes,
)
from server.engine.scheduling.sequence import Batch
from server.engine.startup.warmup import synthetic_batch
from server.model.load.load import load_config
from server.settings import DEMO_MODEL

SIZES = GraphSizes((Bucket.LE_512, Bucket.LE_2K), (1, 2, 4, 8), (64, 128, 192, 256), (4, 8), (64, 256), num_prompts=2)


def decode(size: int, longest: Bucket) -> PartKey:
    return PartKey(Phase.DECODE, size, longest)


def fresh(size: int, longest: Bucket) -> PartKey:
    return PartKey(Phase.PREFILL, size, longest)


def chunk(size: int, longest: Bucket) -> PartKey:
    return PartKey(Phase.EXTEND, size, longest)


def batch_of(prompts: list[int], contexts: list[int], chunks: Sequence[tuple[int, int]] = ()) -> Batch:
    """Fresh prompts of these lengths, (query, context) of chunks, then decode rows of these contexts."""
    batch = synthetic_batch([(1, 2)], 16)
    lens = (*prompts, *(length for _, length in chunks), *contexts)
    return replace(
        batch,
        sequences=batch.sequences * len(lens),
        query_lens=(*prompts, *(length for length, _ in chunks), *[1] * len(contexts)),
        context_lens=lens,
        num_prefill=len(prompts),
        num_extend=len(chunks),
    )


@pytest.mark.parametrize("most", [1, 2, 3, 8, 31, 100, 256, 512])
def test_sizes_ascend_to_the_most_rows_there_can_be(most: int) -> None:
    sizes = row_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)


def test_padding_is_at_most_a_quarter_of_the_rows_or_seven() -> None:
    sizes = row_sizes(512)
    for num_rows in range(1, 513):
        size = min(size for size in sizes if size >= num_rows)
        assert size - num_rows <= max(7, num_rows / 4)
    assert len(sizes) < 30


def test_there_are_no_graphs_of_more_than_512_rows() -> None:
    assert row_sizes(4096)[-1] == 512


@pytest.mark.parametrize("most", [1, 63, 64, 65, 500, 777, 4096])
def test_token_sizes_ascend_and_pad_by_an_eighth_or_63(most: int) -> None:
    sizes = token_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for num_tokens in range(1, most + 1):
        size = min(size for size in sizes if size >= num_tokens)
        assert size - num_tokens <= max(63, num_tokens / 8)


def test_a_small_model_has_graphs_of_longer_prompts() -> None:
    small = load_config(DEMO_MODEL)
    large = read_model(preset_named("llama-3.1-8b").config)

    def most(config: ModelConfig) -> int:
        return graph_sizes(config, max_num_seqs=8, max_num_batched_tokens=8192, max_context=512).tokens[-1]

    assert (most(small), most(large)) == (4096, 1024)


def test_sizes_and_bounds_end_with_the_limits() -> None:
    config = load_config(DEMO_MODEL)
    sizes = graph_sizes(config, max_num_seqs=6, max_num_batched_tokens=100, max_context=5000)
    assert sizes.tokens == (64, 100)
    assert (sizes.rows[-1], sizes.mixed_rows[-1], sizes.num_prompts) == (6, 6, 6)
    assert sizes.bounds == (Bucket.LE_2K, Bucket.LE_8K)


@pytest.mark.parametrize("most", [100, 512, 600, 1024, 8192])
def test_no_graph_has_rows_in_a_bucket_without_decisions(most: int) -> None:
    sizes = graph_sizes(load_config(DEMO_MODEL), max_num_seqs=64, max_num_batched_tokens=most, max_context=5000)
    decided = LinearRows.up_to(most)
    keys = graph_keys(sizes)
    assert {LinearRows.of(key.num_tokens) for key in keys} <= set(decided)
    assert all(TokenRows.of(key.num_tokens) in TokenRows.up_to(most) for key in keys)
    full = key_of(batch_of([], [50] * 8, [(min(most, 1024) - 8, 1500)]), sizes)  # as many tokens as a step may have
    assert (full in keys) is (full is not None) is (most == 8192)


def test_prompts_have_graphs_for_every_bucket_they_can_fill() -> None:
    keys = graph_keys(GraphSizes((Bucket.LE_8K,), (1,), (64, 512, 1024), num_prompts=4))
    assert {key.prompts for key in keys if key.prompts} == {
        fresh(64, Bucket.LE_128),
        fresh(512, Bucket.LE_128),
        fresh(512, Bucket.LE_512),
        fresh(1024, Bucket.LE_512),  # of at most 128 tokens each, 4 prompts are at most 512
        fresh(1024, Bucket.LE_2K),
    }


def test_steps_of_two_kinds_of_rows_have_fewer_sizes_and_bounds() -> None:
    assert key_of(batch_of([65], [30] * 3), SIZES) == GraphKey(fresh(256, Bucket.LE_512), decode(4, Bucket.LE_512))
    assert key_of(batch_of([5], [513]), SIZES) == GraphKey(fresh(64, Bucket.LE_128), decode(4, Bucket.LE_2K))
    found = key_of(batch_of([], [700], [(9, 99)]), SIZES)
    assert found == GraphKey(chunk(64, Bucket.LE_2K), decode(4, Bucket.LE_2K))


@pytest.mark.parametrize(
    ("prompts", "contexts", "chunks"),
    [
        ([], [40] * 9, []),
        ([257], [], []),
        ([1, 1, 1], [], []),
        ([257], [40], []),
        ([5], [40] * 9, []),
        ([5], [2049], []),
        ([], [2049], [(2, 9)]),
        ([], [], [(2, 9)] * 3),
        ([5], [], [(5, 9)]),  # two kinds of prompts
    ],
)
def test_more_than_the_largest_graph_takes_has_no_graph(
    prompts: list[int], contexts: list[int], chunks: list[tuple[int, int]]
) -> None:
    assert key_of(batch_of(prompts, contexts, chunks), SIZES) is None


def test_tokens_that_see_others_behind_them_have_no_graph() -> None:
    of_text, of_image = (synthetic_batch([(40, 40)], 16, mask=mask) for mask in (Mask.CAUSAL, Mask.SPANS))
    assert (key_of(of_text, SIZES) is None, key_of(of_image, SIZES)) == (False, None)


def test_rows_of_drafted_tokens_have_graphs_by_their_longest() -> None:
    sizes = replace(SIZES, row_tokens=(2, 5), max_tokens=32)
    keys = [key for key in graph_keys(sizes) if key.decode is not None and key.decode.phase is Phase.VERIFY]
    assert [key.label for key in keys if key.decode and key.decode.longest is Bucket.LE_512] == [
        f"verify {rows}x{tokens} le_512" for rows, tokens in ((4, 5), (8, 2), (2, 5), (4, 2), (1, 5), (2, 2), (1, 2))
    ]  # the largest first; 8 rows of 5 are more than a graph may hold
    assert not any(key.decode and key.decode.phase is Phase.VERIFY for key in graph_keys(SIZES))

    def verified(*lens: int, prompts: Sequence[int] = ()) -> GraphKey | None:
        batch = batch_of([*prompts], [300] * len(lens))
        return key_of(replace(batch, query_lens=(*prompts, *lens), verifies=True), sizes)

    assert verified(1, 4, 2) == GraphKey(None, PartKey(Phase.VERIFY, 20, Bucket.LE_512, row_tokens=5))
    assert verified(2, 1, 1) in keys
    assert verified(6) is verified(*[5] * 8) is verified(2, 2, prompts=[9]) is None
    assert sizes.max_sampled == 8 * 5


@pytest.mark.parametrize("longest", [Bucket.LE_512, Bucket.LE_2K])
def test_every_batch_finds_its_key_among_those_captured(longest: Bucket) -> None:
    sizes = replace(SIZES, bounds=tuple(bound for bound in SIZES.bounds if bound.lo <= longest.lo))
    keys = set(graph_keys(sizes))
    most = longest.hi or 0
    parts = product(([], [1], [64], [100, 100], [128, 128], [250]), ([], [2], [128] * 5, [most] * 8))
    for prompts, contexts in parts:
        if prompts or contexts:
            assert key_of(batch_of(prompts, contexts), sizes) in keys
            chunks = [(length, length + 7) for length in prompts]
            assert key_of(batch_of([], contexts, chunks), sizes) in keys
