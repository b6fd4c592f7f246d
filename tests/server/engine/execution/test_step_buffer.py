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

MIXED = GraphKey(PartKey(Phase.PREFILL, 8, Bucket.LE_128), PartKey(Phase.DECODE, 4, Bucket.LE_128))


def mixed_batch() -> Batch:
    """Page size 4: a prompt of 3 tokens and a single token after 8."""
    sequences = tuple(
        Sequence(name, list(range(n)), n, SamplingParams(max_tokens=1), seed, 0.0)
        for name, n, seed in (("a", 3, 7), ("b", 9, 9))
    )
    tables = (array("i", [5]), array("i", [7, 1, 6]))
    return Batch(sequences, (3, 1), (3, 9), tables, (0, 1), num_prefill=1, num_extend=0)


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
