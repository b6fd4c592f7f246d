from array import array
from dataclasses import replace

import pytest
from graph_session import Inputs

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import Phase
from server.engine.execution.graph_keys import GraphKey, PartKey
from server.engine.execution.step_buffer import StepTensors
from server.engine.scheduling.sequence import PENDING, Batch, Sequence
from server.protocol.messages import SamplingParams

PAGE_SIZE = 4
NUM_PAGES = 50
NUM_PROMPTS = 3
SHORT = GraphKey(None, PartKey(Phase.DECODE, 4, Bucket.LE_128))
LONG = GraphKey(None, PartKey(Phase.DECODE, 4, Bucket.LE_512))
PROMPTS = GraphKey(PartKey(Phase.PREFILL, 32, Bucket.LE_128), None)
BOTH = GraphKey(PartKey(Phase.PREFILL, 32, Bucket.LE_128), PartKey(Phase.DECODE, 4, Bucket.LE_512))
CHUNKS = GraphKey(PartKey(Phase.EXTEND, 16, Bucket.LE_512), PartKey(Phase.DECODE, 4, Bucket.LE_512))


@pytest.fixture
def inputs() -> Inputs:
    return Inputs([LONG, SHORT, PROMPTS, BOTH, CHUNKS], num_prompts=NUM_PROMPTS)


def decode_batch(*rows: tuple[int, int, list[int]], num_prefill: int = 0) -> Batch:
    """Rows of (first token, context length, pages), the first ones prompts; tokens count up from the first."""
    sequences = tuple(
        Sequence("", list(range(first, first + n)), n, SamplingParams(max_tokens=1), 0, 0.0) for first, n, _ in rows
    )
    tables = tuple(array("i", pages) for _, _, pages in rows)
    lens = tuple(n for _, n, _ in rows)
    query_lens = tuple(n if row < num_prefill else 1 for row, n in enumerate(lens))
    return Batch(sequences, query_lens, lens, tables, tuple(range(len(rows))), num_prefill, 0)


def fill(inputs: Inputs, key: GraphKey, batch: Batch) -> StepTensors:
    return inputs.load(batch, key)


def tables_of(tensors: StepTensors) -> list[list[int]]:
    batch = tensors.parts[-1].batch
    table, lens = batch.page_table, batch.context_lens
    assert table is not None
    assert lens is not None
    return [table[row, : -(-int(n) // PAGE_SIZE)].tolist() for row, n in enumerate(lens)]


def test_every_row_has_its_token_position_slot_and_pages(inputs: Inputs) -> None:
    tensors = fill(inputs, SHORT, decode_batch((100, 5, [7, 3]), (200, 4, [9])))
    assert tensors.tokens["token_ids"].tolist()[:2] == [104, 203]
    assert tensors.tokens["positions"].tolist()[:2] == [4, 3]
    assert tensors.tokens["slots"].tolist()[:2] == [3 * PAGE_SIZE, 9 * PAGE_SIZE + 3]
    assert tables_of(tensors)[:2] == [[7, 3], [9]]


def test_padding_rows_write_behind_the_last_page(inputs: Inputs) -> None:
    fill(inputs, SHORT, decode_batch(*[(100, 9, [4, 5, 6])] * 4))
    tensors = fill(inputs, SHORT, decode_batch((100, 5, [7, 3])))
    context_lens = tensors.parts[0].batch.context_lens
    assert context_lens is not None
    assert context_lens.tolist() == [5, 0, 0, 0]
    assert [slot // PAGE_SIZE for slot in tensors.tokens["slots"].tolist()[1:]] == [NUM_PAGES] * 3
    assert tensors.tokens["positions"].tolist()[1:] == [0, 0, 0]
    assert tensors.tokens["token_ids"].tolist()[1:] == [0, 0, 0]


def test_changed_pages_and_keys_leave_no_old_page_behind(inputs: Inputs) -> None:
    for key, pages in ((SHORT, [7, 3]), (SHORT, [7, 3]), (SHORT, [8, 3]), (LONG, [8, 3]), (SHORT, [8, 3])):
        other = [12, 11, 10]
        tensors = fill(inputs, key, decode_batch((100, 6, pages), (200, 9, other)))
        assert tables_of(tensors)[:2] == [pages, other]


def test_a_graphs_longest_context_is_its_buckets_or_the_models(inputs: Inputs) -> None:
    assert inputs.device.of_graph(SHORT).parts[0].batch.max_context == 128
    assert inputs.device.of_graph(LONG).parts[0].batch.max_context == 200


def test_every_tensor_of_a_kernel_is_aligned_and_contiguous(inputs: Inputs) -> None:
    for key in (SHORT, LONG, PROMPTS, BOTH, CHUNKS):
        tensors = inputs.device.of_graph(key)
        found = [tensors.tokens["token_ids"], tensors.tokens["slots"], tensors.tokens["positions"], tensors.sampled]
        for part in tensors.parts:
            found += [part.batch.page_table, part.batch.context_lens, part.batch.cu_seqlens_k]
        for tensor in found:
            assert tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0)


def test_prompts_and_decode_rows_are_padded_each_for_itself(inputs: Inputs) -> None:
    batch = decode_batch((10, 5, [1, 2]), (50, 3, [3]), (100, 9, [4, 5, 6]), num_prefill=2)
    tensors = fill(inputs, BOTH, batch)
    assert tensors.tokens["token_ids"].tolist() == [10, 11, 12, 13, 14, 50, 51, 52, *[0] * 24, 108, 0, 0, 0]
    assert tensors.tokens["positions"].tolist()[:8] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert tensors.tokens["positions"].tolist()[32] == 8
    assert tensors.tokens["slots"].tolist()[:8] == [4, 5, 6, 7, 8, 12, 13, 14]
    assert tensors.tokens["slots"].tolist()[32] == 6 * PAGE_SIZE
    padding = tensors.tokens["slots"].tolist()[8:32] + tensors.tokens["slots"].tolist()[33:]
    assert {slot // PAGE_SIZE for slot in padding} == {NUM_PAGES}
    prompts, rows = (part.batch for part in tensors.parts)
    assert prompts.cu_seqlens_q is prompts.cu_seqlens_k  # a faster variant of the Hopper path
    assert prompts.cu_seqlens_q.tolist() == [0, 5, 8, 8]
    assert rows.context_lens is not None
    assert rows.context_lens.tolist() == [9, 0, 0, 0]


def test_last_prompt_tokens_and_all_decode_rows_are_sampled(inputs: Inputs) -> None:
    prompts = ((10, 5, [1, 2]), (50, 3, [3]))
    both = fill(inputs, BOTH, decode_batch(*prompts, (100, 9, [4, 5, 6]), num_prefill=2))
    assert both.sampled is not None
    assert both.sampled.tolist() == [4, 7, 0, 32, 33, 34, 35]
    only = fill(inputs, PROMPTS, decode_batch(*prompts, num_prefill=2))
    assert only.sampled is not None
    assert only.sampled.tolist() == [4, 7, 0]
    assert fill(inputs, SHORT, decode_batch((100, 5, [7, 3]))).sampled is None


def test_chunks_have_their_tokens_places_and_pages(inputs: Inputs) -> None:
    rows = decode_batch((10, 9, [1, 2, 3]), (50, 6, [4, 5]), (100, 5, [7, 6]))
    batch = replace(rows, query_lens=(3, 2, 1), num_extend=2)
    tensors = fill(inputs, CHUNKS, batch)
    assert tensors.tokens["token_ids"].tolist()[:6] == [16, 17, 18, 54, 55, 0]
    assert tensors.tokens["positions"].tolist()[:5] == [6, 7, 8, 4, 5]
    assert tensors.tokens["slots"].tolist()[:5] == [10, 11, 12, 20, 21]
    chunks, singles = (part.batch for part in tensors.parts)
    assert chunks.cu_seqlens_k is None
    assert chunks.cu_seqlens_q.tolist() == [0, 3, 5, 5]
    assert chunks.context_lens is not None
    assert chunks.context_lens.tolist() == [9, 6, 0]
    assert chunks.page_table is not None
    assert [chunks.page_table[0, :3].tolist(), chunks.page_table[1, :2].tolist()] == [[1, 2, 3], [4, 5]]
    assert (chunks.max_seqlen_q, chunks.max_context) == (16, 200)
    assert singles.context_lens is not None
    assert singles.context_lens.tolist() == [5, 0, 0, 0]
    assert tensors.sampled is not None
    assert tensors.sampled.tolist() == [2, 4, 0, 16, 17, 18, 19]


def test_the_host_buffers_alternate_with_their_page_tables(inputs: Inputs) -> None:
    for pages in ([7, 3], [7, 3], [8, 3], [8, 3], [9, 3]):
        tensors = fill(inputs, SHORT, decode_batch((100, 6, pages)))
        assert tables_of(tensors)[0] == pages


def test_an_unknown_token_is_found_where_it_was_chosen(inputs: Inputs) -> None:
    batch = decode_batch((100, 5, [7, 3]), (200, 4, [9]), (300, 2, [5]))
    late = batch.sequences[1]
    late.tokens[-1] = PENDING
    tensors = inputs.load(batch, SHORT, {late: 6})
    assert tensors.is_pending is not None
    assert tensors.is_pending.tolist() == [False, True, False, False]
    assert tensors.chosen_at is not None
    assert tensors.chosen_at.tolist() == [0, 6, 0, 0]
    assert tensors.tokens["token_ids"].tolist()[0::2] == [104, 301]
    with pytest.raises(KeyError):
        inputs.load(batch, SHORT)
