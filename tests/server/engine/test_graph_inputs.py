from array import array

import pytest
import torch

from kernels.buckets import Bucket
from server.engine.graph_inputs import DecodeInputs, DecodeTensors
from server.engine.graph_keys import GraphKey
from server.engine.messages import SamplingParams
from server.engine.sequence import Batch, Sequence

PAGE_SIZE = 4
NUM_PAGES = 50
SHORT = GraphKey(4, Bucket.LE_128)
LONG = GraphKey(4, Bucket.LE_512)


@pytest.fixture
def inputs() -> DecodeInputs:
    keys = [LONG, SHORT, GraphKey(1, Bucket.LE_128)]
    return DecodeInputs(keys, page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_context=200, device=torch.device("cpu"))


def decode_batch(*rows: tuple[int, int, list[int]]) -> Batch:
    """Rows of (first token, context length, pages); a sequence's tokens count up from its first."""
    sequences = tuple(
        Sequence("", list(range(first, first + n)), n, SamplingParams(max_tokens=1), 0, 0.0) for first, n, _ in rows
    )
    tables = tuple(array("i", pages) for _, _, pages in rows)
    return Batch(sequences, (1,) * len(rows), tuple(n for _, n, _ in rows), tables, tuple(range(len(rows))), 0, 0)


def fill(inputs: DecodeInputs, key: GraphKey, batch: Batch) -> DecodeTensors:
    inputs.fill(key, batch)
    return inputs.tensors(key)


def tables_of(tensors: DecodeTensors) -> list[list[int]]:
    table, lens = tensors.part.batch.page_table, tensors.part.batch.context_lens
    assert table is not None
    assert lens is not None
    return [table[row, : -(-int(n) // PAGE_SIZE)].tolist() for row, n in enumerate(lens)]


def test_every_row_has_its_token_position_slot_and_pages(inputs: DecodeInputs) -> None:
    tensors = fill(inputs, SHORT, decode_batch((100, 5, [7, 3]), (200, 4, [9])))
    assert tensors.token_ids.tolist()[:2] == [104, 203]
    assert tensors.positions.tolist()[:2] == [4, 3]
    assert tensors.slots.tolist()[:2] == [3 * PAGE_SIZE, 9 * PAGE_SIZE + 3]
    assert tables_of(tensors)[:2] == [[7, 3], [9]]


def test_padding_rows_have_no_context_and_write_behind_the_last_page(inputs: DecodeInputs) -> None:
    fill(inputs, SHORT, decode_batch(*[(100, 9, [4, 5, 6])] * 4))
    tensors = fill(inputs, SHORT, decode_batch((100, 5, [7, 3])))
    assert tensors.part.batch.context_lens is not None
    assert tensors.part.batch.context_lens.tolist() == [5, 0, 0, 0]
    assert [slot // PAGE_SIZE for slot in tensors.slots.tolist()[1:]] == [NUM_PAGES] * 3
    assert tensors.positions.tolist()[1:] == [0, 0, 0]
    assert tensors.token_ids.tolist()[1:] == [0, 0, 0]


def test_changed_pages_and_changed_keys_leave_no_old_page_behind(inputs: DecodeInputs) -> None:
    for key, pages in ((SHORT, [7, 3]), (SHORT, [7, 3]), (SHORT, [8, 3]), (LONG, [8, 3]), (SHORT, [8, 3])):
        other = [12, 11, 10]
        tensors = fill(inputs, key, decode_batch((100, 6, pages), (200, 9, other)))
        assert tables_of(tensors)[:2] == [pages, other]


def test_the_longest_context_of_a_graph_is_its_buckets_or_the_models(inputs: DecodeInputs) -> None:
    assert inputs.tensors(SHORT).part.batch.max_context == 128
    assert inputs.tensors(LONG).part.batch.max_context == 200


def test_every_tensor_that_a_kernel_gets_is_aligned_and_contiguous(inputs: DecodeInputs) -> None:
    for key in (SHORT, LONG, GraphKey(1, Bucket.LE_128)):
        tensors = inputs.tensors(key)
        batch = tensors.part.batch
        for tensor in (tensors.token_ids, tensors.slots, tensors.positions, batch.page_table, batch.context_lens):
            assert tensor is not None
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0
