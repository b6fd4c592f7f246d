import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.collective.shape import CollectiveShape, Follows
from kernels.experts.kinds import ClampedSwiglu, ExpertFormat
from kernels.experts.shape import ExpertsShape
from kernels.fused.activation_kind import Activation
from kernels.fused.capped_kind import CappedSilu
from kernels.fused.ungated_kind import Ungated
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.operators import AnyShape
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import AttentionShape, Dtype, Mask, Phase
from qualification.evidence.shape_text import parse_shape

SHAPES = st.builds(
    AttentionShape,
    phase=st.sampled_from(Phase),
    dtype=st.sampled_from(Dtype),
    kv_dtype=st.sampled_from([*Dtype, FP8]),
    num_heads=st.integers(1, 256),
    num_kv_heads=st.integers(1, 256),
    head_dim=st.integers(1, 1024),
    query_bucket=st.sampled_from(Bucket),
    context_bucket=st.sampled_from(Bucket),
    page_size=st.none() | st.integers(1, 1024),
    window=st.none() | st.integers(1, 2**20),
    softcap=st.none() | st.sampled_from((20.0, 30.0, 50.0, 0.5, 1e6)),
    sinks=st.booleans(),
    mask=st.sampled_from(Mask),
)


EXPERTS = st.builds(
    ExpertsShape,
    dtype=st.sampled_from(Dtype),
    format=st.just(ExpertFormat.PLAIN),
    num_experts=st.integers(8, 512),
    num_active=st.integers(1, 8),
    hidden=st.integers(1, 10**5),
    width=st.integers(1, 10**5),
    activation=st.sampled_from((*Activation, *Ungated))
    | st.builds(ClampedSwiglu, st.floats(0.01, 9), st.floats(1e-9, 1e9))
    | st.builds(CappedSilu, st.floats(1e-9, 1e9)),
    has_bias=st.booleans(),
    rows=st.sampled_from(TokenRows),
)


COLLECTIVES = st.builds(
    CollectiveShape,
    dtype=st.sampled_from(Dtype),
    columns=st.integers(1, 10**5),
    world=st.integers(2, 8),
    follows=st.sampled_from(Follows),
    rows=st.sampled_from(TokenRows),
)


@given(SHAPES | EXPERTS | COLLECTIVES)
def test_a_shape_is_read_back_from_its_line(shape: AnyShape) -> None:
    assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prefill",
        "prefill bf16 h32:8 d128 q-le_128 c-le_128",
        "prefill bf16 h32:8 d0128 q-le_128 c-le_128 causal",
        "prefill bf16 h32:8 d128 q-le_128 c-le_129 causal",
        "prefill bf16/kv-bf16 h32:8 d128 q-le_128 c-le_128 causal",
        "prefill bf16 h32:8 d128 q-le_128 c-le_128 causal sinks window3",
        "experts",
        "experts bf16 plain e8:2 h64 w32 silu",
        "experts bf16 plain e8:2 h64 w32 silu r-le_100",
        "experts bf16 plain e8:02 h64 w32 silu r-le_16",
        "experts bf16 plain e8:9 h64 w32 silu r-le_16",
        "collective bf16 c64 ranks2 r-le_16",
        "collective bf16 c064 ranks2 sum r-le_16",
        "collective bf16 c64 ranks1 sum r-le_16",
    ],
)
def test_what_is_no_line_of_a_shape_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"no attention shape|no shape of (experts|a collective)|not a valid|experts of a token|two ranks",
    ):
        parse_shape(text)
