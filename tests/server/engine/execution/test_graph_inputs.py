from array import array
from dataclasses import replace

import pytest

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import Phase
from server.engine.execution.graph_keys import GraphKey, PartKey
from server.engine.execution.step_buffer import StepTensors
from server.engine.scheduling.sequence import Batch, Sequence
from server.protocol.messages import SamplingParams
from support.engine.graph_session import Inputs

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
