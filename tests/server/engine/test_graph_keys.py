from array import array

import pytest

from kernels.buckets import Bucket
from server.engine.graph_keys import GraphKey, graph_keys, graph_sizes, key_of
from server.engine.messages import SamplingParams
from server.engine.sequence import Batch, Sequence
from server.engine.warmup import synthetic_batch

SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize("most", [1, 2, 3, 8, 31, 100, 256, 512])
def test_sizes_ascend_to_the_most_rows_there_can_be(most: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)


def test_padding_is_at_most_a_quarter_of_the_rows_or_seven() -> None:
    sizes = graph_sizes(512)
    for num_rows in range(1, 513):
        size = min(size for size in sizes if size >= num_rows)
        assert size - num_rows <= max(7, num_rows / 4)
    assert len(sizes) < 30


def test_there_are_no_graphs_of_more_than_512_rows() -> None:
    assert graph_sizes(4096)[-1] == 512


def test_every_size_has_a_graph_for_every_context_that_can_be_reached_largest_first() -> None:
    keys = graph_keys((1, 4), 600)
    contexts = (Bucket.LE_2K, Bucket.LE_512, Bucket.LE_128)
    assert keys == [GraphKey(size, context) for size in (4, 1) for context in contexts]


def test_a_batch_takes_the_next_size_and_the_bucket_of_its_longest_context() -> None:
    assert key_of(synthetic_batch([(1, 40)] * 3, 16), SIZES) == GraphKey(4, Bucket.LE_128)
    assert key_of(synthetic_batch([(1, 40)] * 4, 16), SIZES) == GraphKey(4, Bucket.LE_128)
    assert key_of(synthetic_batch([(1, 128), (1, 129)], 16), SIZES) == GraphKey(2, Bucket.LE_512)


def test_more_rows_than_the_largest_graph_have_no_graph() -> None:
    assert key_of(synthetic_batch([(1, 40)] * 9, 16), SIZES) is None


@pytest.mark.parametrize("row", [(5, 5), (5, 9)])
def test_a_batch_with_a_prompt_has_no_graph(row: tuple[int, int]) -> None:
    sequences = tuple(Sequence("", [0] * n, n, SamplingParams(max_tokens=1), 0, 0.0) for n in (row[1], 3))
    is_prefill = row[0] == row[1]
    batch = Batch(
        sequences, (row[0], 1), (row[1], 3), (array("i", [0]),) * 2, (0, 1), int(is_prefill), int(not is_prefill)
    )
    assert key_of(batch, SIZES) is None
