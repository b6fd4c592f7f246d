"""The layout of a step's inputs: one list for eager steps and graphs, for the host and every device."""

from array import array

import pytest
import torch

from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.shape import Phase
from server.engine.execution.graph_keys import GraphKey, PartKey
from server.engine.execution.step_buffer import TOKEN_ARRAYS, TokenArray
from server.engine.scheduling.sequence import Batch, Sequence
from server.protocol.messages import SamplingParams
from support.engine.graph_session import Inputs

DECODE = PartKey(Phase.DECODE, 4, Bucket.LE_128)
MIXED = GraphKey(PartKey(Phase.PREFILL, 8, Bucket.LE_128), DECODE)
CHUNKS = GraphKey(PartKey(Phase.EXTEND, 16, Bucket.LE_512), PartKey(Phase.DECODE, 4, Bucket.LE_512))


def sequence(num_tokens: int, seed: int = 0) -> Sequence:
    return Sequence(str(seed), list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=1), seed, 0.0)


def mixed_batch(*, has_chunk: bool = False) -> Batch:
    """Page size 4: a prompt of 3 tokens, a chunk of 2 over 5 if asked for, and a single token after 8."""
    rows = [(sequence(3, 7), 3, 3, array("i", [5]))]
    rows += [(sequence(9, 8), 2, 7, array("i", [2, 3]))] * has_chunk
    rows += [(sequence(9, 9), 1, 9, array("i", [7, 1, 6]))]
    sequences, query_lens, context_lens, tables = zip(*rows, strict=True)
    return Batch(sequences, query_lens, context_lens, tables, (0, len(rows) - 1), num_prefill=1, num_extend=has_chunk)


@pytest.mark.parametrize("key", [None, GraphKey(None, DECODE), MIXED, CHUNKS])
def test_every_tensor_of_a_kernel_is_aligned_and_contiguous(key: GraphKey | None) -> None:
    inputs = Inputs([] if key is None else [key], num_prompts=3)
    tensors = inputs.load(mixed_batch(has_chunk=True)) if key is None else inputs.device.of_graph(key)
    found = [*tensors.tokens.values(), tensors.sampled]
    for part in tensors.parts:
        batch = part.batch
        of_part = [it for it in (batch.page_table, batch.context_lens, batch.cu_seqlens_q) if it is not None]
        assert {it.dtype for it in of_part} == {torch.int32}
        assert key is not None or batch.page_table is None or batch.page_table.stride(0) % 16 == 0
        if part.phase is Phase.PREFILL:
            assert batch.cu_seqlens_q is batch.cu_seqlens_k  # a faster variant of the Hopper path
        found += of_part
    assert all(it is None or (it.is_contiguous() and it.data_ptr() % 16 == 0) for it in found)


def test_a_phase_has_the_spans_that_its_tokens_see() -> None:
    batch = mixed_batch(has_chunk=True)
    for seq, spans in zip(batch.sequences, (((0, 1), (1, 3)), ((2, 5), (5, 7)), ((8, 9),)), strict=True):
        seq.whole_spans = spans
    prompts, chunks, decode = Inputs().load(batch).parts
    assert prompts.spans is not None and chunks.spans is not None  # noqa: PT018
    assert (prompts.spans.tolist(), chunks.spans.tolist()) == ([[0, 1], [1, 3], [1, 3]], [[5, 7], [5, 7]])
    assert chunks.spans.dtype is torch.int32
    assert decode.spans is None
    batch.sequences[1].whole_spans = ((2, 5),)  # of a chunk before
    assert [part.spans is None for part in Inputs().load(batch).parts] == [False, True, True]


# The one line that a new input of each token takes (the sequence's seed stands for an adapter's index).
ADAPTERS = TokenArray("adapters", torch.int32, lambda seq, start, stop: [seq.seed] * (stop - start))


@pytest.mark.parametrize(("key", "due"), [(None, [7, 7, 7, 9]), (MIXED, [7, 7, 7, 0, 0, 0, 0, 0, 9, 0, 0, 0])])
def test_a_new_token_array_is_one_line(key: GraphKey | None, due: list[int]) -> None:
    keys = [] if key is None else [key]
    inputs = Inputs(keys, token_arrays=(*TOKEN_ARRAYS, ADAPTERS))
    for _ in range(3):  # both host memories, one of them again
        tensors = inputs.load(mixed_batch(), key)
    assert tensors.tokens["adapters"].tolist() == due
    assert tensors.tokens["adapters"].dtype is torch.int32
    plain = Inputs(keys).load(mixed_batch(), key)
    assert plain.tokens.keys() == {"token_ids", "slots", "positions"}
    for name, values in plain.tokens.items():
        assert torch.equal(tensors.tokens[name], values)
