from collections.abc import Mapping
from dataclasses import replace

import pytest

from kernels.catalog import PATHS
from kernels.vocabulary.buckets import Bucket, bucket_of
from kernels.vocabulary.shape import Dtype, Phase
from qualification.decision.model_shapes import (
    AttentionSignature,
    ServingLimits,
    distinct_windows,
    shapes_needed,
    signature_of,
)
from qualification.model.families.reader import read_model

LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
}


def signature_from(config: Mapping[str, object]) -> AttentionSignature:
    return signature_of(read_model(config))


def limits(max_model_len: int, max_num_batched_tokens: int) -> ServingLimits:
    return ServingLimits(max_model_len, max_num_batched_tokens, 16, Dtype.FP32, Dtype.FP32)


def test_head_dim_and_kv_heads_follow_from_what_is_given() -> None:
    assert signature_from(LLAMA) == AttentionSignature(32, 8, 128)
    assert signature_from(LLAMA | {"head_dim": 64}).head_dim == 64
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert signature_from(config).num_kv_heads == 32


def test_distinct_windows_are_ordered_whatever_the_layers_order() -> None:
    assert distinct_windows([512, None, 128, None, 512]) == (None, 128, 512)


def test_signatures_name_themselves_differently() -> None:
    names = {
        str(signature)
        for signature in (
            AttentionSignature(32, 8, 128),
            AttentionSignature(32, 8, 128, (4096,)),
            AttentionSignature(32, 8, 128, (None, 4096)),
            AttentionSignature(32, 8, 128, softcap=50.0),
            AttentionSignature(32, 8, 128, sinks=True),
        )
    }
    assert names == {"h32-8-d128", "h32-8-d128-w4096", "h32-8-d128-wfull-4096", "h32-8-d128-cap50", "h32-8-d128-sinks"}


def test_verify_is_needed_only_where_tokens_are_drafted() -> None:
    plain = limits(600, 100)
    shapes = shapes_needed(AttentionSignature(4, 2, 64, spans=True), replace(plain, max_drafted_tokens=3))
    verified = [shape for shape in shapes if shape.phase is Phase.VERIFY]
    decoded = [replace(shape, phase=Phase.VERIFY) for shape in shapes if shape.phase is Phase.DECODE]
    assert verified == decoded
    able = {path.name for path in PATHS if path.serves(verified[0])}  # each lists its phases
    assert able > {"gluon.extend.hopper", "triton.extend", "sdpa.cpu", "torch.attention.tiles"}
    assert not able & {"gluon.decode.hopper", "gluon.prefill.hopper"}
    without = shapes_needed(AttentionSignature(4, 2, 64, spans=True), plain)
    assert without == tuple(shape for shape in shapes if shape not in verified)


@pytest.mark.parametrize(("max_model_len", "budget"), [(1, 1), (128, 64), (129, 4096), (600, 100), (9000, 2048)])
def test_shapes_are_exactly_those_that_batches_can_have(max_model_len: int, budget: int) -> None:
    """Compare with brute force over the longest query and the longest context of a batch."""
    longest_query = min(max_model_len, budget)
    interesting = sorted(
        {n for edge in (1, 128, 512, 2048, 8192, longest_query, max_model_len) for n in (edge, edge + 1)}
    )
    queries = [n for n in interesting if n <= longest_query]
    contexts = [n for n in interesting if n <= max_model_len]
    met = {(Phase.PREFILL, bucket_of(q), bucket_of(q)) for q in queries}
    met |= {(Phase.EXTEND, bucket_of(q), bucket_of(c)) for q in queries for c in contexts if c >= q}
    met |= {(Phase.DECODE, Bucket.LE_128, bucket_of(c)) for c in contexts}
    shapes = shapes_needed(AttentionSignature(4, 2, 64), limits(max_model_len, budget))
    assert len(shapes) == len(set(shapes))
    assert {(shape.phase, shape.query_bucket, shape.context_bucket) for shape in shapes} == met
    assert {shape.page_size for shape in shapes if shape.phase is not Phase.PREFILL} == {16}
    assert {shape.page_size for shape in shapes if shape.phase is Phase.PREFILL} == {None}
