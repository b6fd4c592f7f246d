from array import array
from dataclasses import replace

import numpy as np
import torch
from graph_session import Inputs

from kernels.vocabulary.shape import Phase
from server.engine.scheduling.sequence import Batch, Sequence
from server.protocol.messages import SamplingParams

CPU = torch.device("cpu")


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


def test_every_token_has_its_id_position_and_slot() -> None:
    inputs = Inputs().load(mixed_batch())
    assert inputs.tokens["token_ids"].tolist() == [100, 101, 102, 205, 206, 308, 401]
    assert inputs.tokens["positions"].tolist() == [0, 1, 2, 5, 6, 8, 1]
    assert inputs.tokens["slots"].tolist() == [20, 21, 22, 13, 14, 24, 1]
    assert inputs.sampled.tolist() == [2, 5, 6]
    assert (inputs.tokens["token_ids"].dtype, inputs.tokens["positions"].dtype, inputs.tokens["slots"].dtype) == (
        torch.int64,
        torch.int32,
        torch.int64,
    )


def test_a_chunk_may_end_behind_its_prompt() -> None:
    """Tokens that were generated before a preemption are computed with the prompt, which is packed without them."""
    seq = sequence(200, 9)
    seq.num_prompt, seq.prompt = 7, np.arange(200, 207)
    batch = replace(mixed_batch(), sequences=(sequence(100, 3), seq, sequence(300, 9), sequence(400, 2)))
    assert Inputs().load(batch).tokens["token_ids"].tolist()[3:5] == [205, 206]
    batch = replace(
        batch,
        context_lens=(3, 9, 9, 2),
        page_tables=(*batch.page_tables[:1], array("i", [2, 3, 4]), *batch.page_tables[2:]),
    )
    assert Inputs().load(batch).tokens["token_ids"].tolist()[3:5] == [207, 208]


def test_each_phase_gets_its_own_rows_with_lengths_from_zero() -> None:
    prefill, extend, decode = Inputs().load(mixed_batch()).parts
    assert [part.phase for part in (prefill, extend, decode)] == list(Phase)
    assert [part.tokens for part in (prefill, extend, decode)] == [slice(0, 3), slice(3, 5), slice(5, 7)]
    assert prefill.batch.cu_seqlens_q.tolist() == [0, 3]
    assert prefill.batch.cu_seqlens_k is not None
    assert not prefill.batch.is_paged
    assert extend.batch.context_lens is not None
    assert extend.batch.context_lens.tolist() == [7]
    assert (extend.batch.max_seqlen_q, extend.batch.max_context) == (2, 7)
    assert decode.batch.cu_seqlens_q.tolist() == [0, 1, 2]
    assert decode.batch.page_table is not None
    assert decode.batch.page_table[0, :3].tolist() == [7, 1, 6]
    assert decode.batch.page_table[1, :1].tolist() == [0]
    assert (decode.num_sequences, decode.num_tokens, decode.batch.max_context) == (2, 2, 9)


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


def test_buffers_grow_and_are_used_again() -> None:
    inputs = Inputs()
    inputs.load(mixed_batch())
    long = Batch((sequence(0, 500),), (500,), (500,), (array("i", range(125)),), (0,), num_prefill=1, num_extend=0)
    assert inputs.load(long).tokens["slots"].tolist() == list(range(500))
    assert inputs.load(mixed_batch()).tokens["token_ids"].tolist() == [100, 101, 102, 205, 206, 308, 401]
