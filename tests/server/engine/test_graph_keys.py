from dataclasses import replace

import pytest

from kernels.buckets import Bucket
from server.engine.graph_keys import (
    GraphKey,
    GraphSizes,
    PartKey,
    graph_keys,
    graph_sizes,
    key_of,
    row_sizes,
    token_sizes,
)
from server.engine.messages import SamplingParams
from server.engine.sequence import Batch, Sequence
from server.engine.warmup import synthetic_batch
from server.model.load import load_config
from server.settings import DEMO_MODEL

SIZES = GraphSizes((1, 2, 4, 8), (64, 128, 192, 256), (4, 8), (64, 256), num_prompts=2)


def batch_of(prompts: list[int], contexts: list[int]) -> Batch:
    """Fresh prompts of these lengths, then decode rows of these contexts."""
    batch = synthetic_batch([(1, 2)], 16)
    lens = (*prompts, *contexts)
    return replace(
        batch,
        sequences=tuple(Sequence("", [0] * n, n, SamplingParams(max_tokens=1), 0, 0.0) for n in lens),
        query_lens=(*prompts, *[1] * len(contexts)),
        context_lens=lens,
        num_prefill=len(prompts),
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
def test_token_sizes_ascend_to_the_most_and_pad_by_at_most_a_quarter_or_63(most: int) -> None:
    sizes = token_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for num_tokens in range(1, most + 1):
        size = min(size for size in sizes if size >= num_tokens)
        assert size - num_tokens <= max(63, num_tokens / 4)


def test_a_small_model_has_graphs_of_longer_prompts_than_a_large_one() -> None:
    small = load_config(DEMO_MODEL)
    large = replace(small, hidden_size=4096, intermediate_size=14336, num_layers=32)
    most = [graph_sizes(config, max_num_seqs=8, max_num_batched_tokens=8192).tokens[-1] for config in (small, large)]
    assert most == [4096, 640]
    assert graph_sizes(small, max_num_seqs=8, max_num_batched_tokens=100).tokens == (64, 100)


def test_every_size_has_a_graph_for_every_context_that_can_be_reached_largest_first() -> None:
    keys = graph_keys(GraphSizes((1, 4)), 600)
    contexts = (Bucket.LE_2K, Bucket.LE_512, Bucket.LE_128)
    assert keys == [GraphKey(None, PartKey(size, context)) for size in (4, 1) for context in contexts]


def test_prompts_have_graphs_for_every_bucket_that_as_many_can_fill() -> None:
    keys = [key.prefill for key in graph_keys(GraphSizes((1,), (64, 512, 1024), num_prompts=4), 4096) if key.prefill]
    assert set(keys) == {
        PartKey(64, Bucket.LE_128),
        PartKey(512, Bucket.LE_128),
        PartKey(512, Bucket.LE_512),
        PartKey(1024, Bucket.LE_512),  # of at most 128 tokens each, 4 prompts are at most 512
        PartKey(1024, Bucket.LE_2K),
    }


def test_a_batch_takes_the_next_size_and_the_bucket_of_its_longest_context() -> None:
    assert key_of(batch_of([], [40] * 3), SIZES) == GraphKey(None, PartKey(4, Bucket.LE_128))
    assert key_of(batch_of([], [40] * 4), SIZES) == GraphKey(None, PartKey(4, Bucket.LE_128))
    assert key_of(batch_of([], [128, 129]), SIZES) == GraphKey(None, PartKey(2, Bucket.LE_512))
    assert key_of(batch_of([40], []), SIZES) == GraphKey(PartKey(64, Bucket.LE_128), None)
    assert key_of(batch_of([100, 29], []), SIZES) == GraphKey(PartKey(192, Bucket.LE_128), None)
    assert key_of(batch_of([129], []), SIZES) == GraphKey(PartKey(192, Bucket.LE_512), None)


def test_prompts_beside_decode_rows_take_the_sizes_of_mixed_steps() -> None:
    found = key_of(batch_of([129], [300, 40]), SIZES)
    assert found == GraphKey(PartKey(256, Bucket.LE_512), PartKey(4, Bucket.LE_512))


@pytest.mark.parametrize(
    ("prompts", "contexts"), [([], [40] * 9), ([257], []), ([1, 1, 1], []), ([257], [40]), ([5], [40] * 9)]
)
def test_more_than_the_largest_graph_takes_has_no_graph(prompts: list[int], contexts: list[int]) -> None:
    assert key_of(batch_of(prompts, contexts), SIZES) is None


def test_a_chunk_behind_a_context_has_no_graph() -> None:
    assert key_of(synthetic_batch([(5, 9)], 16), SIZES) is None


def test_every_batch_finds_its_key_among_those_captured() -> None:
    keys = set(graph_keys(SIZES, 512))
    for prompts in ([], [1], [64], [100, 100], [128, 128], [250]):
        for contexts in ([], [2], [128] * 5, [512] * 8):
            if prompts or contexts:
                found = key_of(batch_of(prompts, contexts), SIZES)
                is_thinned = prompts and contexts and found and found.prefill == PartKey(256, Bucket.LE_128)
                assert found in keys or is_thinned
