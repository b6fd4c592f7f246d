from array import array

import torch

from server.engine.scheduling.sequence import Batch, Sequence
from server.protocol.messages import SamplingParams
from support.engine.graph_session import Inputs


def sequence(first: int, num_tokens: int) -> Sequence:
    tokens = list(range(first, first + num_tokens))
    return Sequence(str(first), tokens, num_tokens, SamplingParams(max_tokens=1), seed=0, submitted_at=0.0)


def mixed_batch() -> Batch:
    """Page size 4: a prompt of 3, a chunk of 2 over 5, and single tokens after 8 and 1."""
    return Batch(
        sequences=(sequence(100, 3), sequence(200, 9), sequence(300, 9), sequence(400, 2)),
        query_lens=(3, 2, 1, 1),
        context_lens=(3, 7, 9, 2),
        page_tables=(array("i", [5]), array("i", [2, 3]), array("i", [7, 1, 6]), array("i", [0])),
        sampled_rows=(0, 2, 3),
        num_prefill=1,
        num_extend=1,
    )


def test_every_tensor_of_a_kernel_is_aligned_and_contiguous() -> None:
    for part in Inputs().load(mixed_batch()).parts:
        batch = part.batch
        for tensor in (batch.cu_seqlens_q, batch.context_lens, batch.page_table):
            if tensor is not None:
                assert tensor.is_contiguous()
                assert tensor.data_ptr() % 16 == 0
                assert tensor.dtype is torch.int32
        if batch.page_table is not None:
            assert batch.page_table.stride(0) % 16 == 0


def test_a_phase_has_the_spans_that_its_tokens_see() -> None:
    batch = mixed_batch()
    for seq, spans in zip(batch.sequences, (((0, 1), (1, 3)), ((2, 5), (5, 7)), ((8, 9),), ()), strict=True):
        seq.whole_spans = spans
    prompts, chunks, decode = Inputs().load(batch).parts
    assert prompts.spans is not None and chunks.spans is not None  # noqa: PT018
    assert (prompts.spans.tolist(), chunks.spans.tolist()) == ([[0, 1], [1, 3], [1, 3]], [[5, 7], [5, 7]])
    assert chunks.spans.dtype is torch.int32
    assert decode.spans is None
    batch.sequences[1].whole_spans = ((2, 5),)  # of a chunk before
    assert [part.spans is None for part in Inputs().load(batch).parts] == [False, True, True]


def test_buffers_grow_and_are_used_again() -> None:
    inputs = Inputs()
    inputs.load(mixed_batch())
    long = Batch((sequence(0, 500),), (500,), (500,), (array("i", range(125)),), (0,), num_prefill=1, num_extend=0)
    assert inputs.load(long).tokens["slots"].tolist() == list(range(500))
    assert inputs.load(mixed_batch()).tokens["token_ids"].tolist() == [100, 101, 102, 205, 206, 308, 401]
