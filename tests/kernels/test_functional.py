"""The library's face: the right answer by name and by choice, and every disagreement refused before a launch."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.functional import ShapeError, attention_paged, attention_varlen, candidates, plan_paged, plan_varlen
from kernels.reference.compare import compare
from kernels.vocabulary.path import Reject

INT = torch.int32


def varlen_arguments(device: torch.device) -> dict[str, Any]:
    return {
        "q": torch.randn(5, 4, 16, device=device).half(),
        "k": torch.randn(7, 2, 16, device=device).half(),
        "v": torch.randn(7, 2, 16, device=device).half(),
        "cu_seqlens_q": torch.tensor([0, 3, 5], dtype=INT, device=device),
        "cu_seqlens_k": torch.tensor([0, 3, 7], dtype=INT, device=device),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }


def paged_arguments(device: torch.device) -> dict[str, Any]:
    return {
        "q": torch.randn(3, 4, 16, device=device).half(),
        "k_pages": torch.randn(6, 8, 2, 16, device=device).half(),
        "v_pages": torch.randn(6, 8, 2, 16, device=device).half(),
        "page_table": torch.tensor([[4, 1], [5, 0]], dtype=INT, device=device),
        "context_lens": torch.tensor([9, 4], dtype=INT, device=device),
        "cu_seqlens_q": torch.tensor([0, 1, 3], dtype=INT, device=device),
        "max_seqlen_q": 2,
        "max_context": 9,
    }


@cache
def call_once(device: torch.device) -> None:
    """Make the calls of these shapes known to the library, which then looks at less."""
    attention_varlen(**varlen_arguments(device))
    attention_paged(**paged_arguments(device))


def is_right(out: Tensor, arguments: dict[str, Any], flags: AttentionFlags) -> bool:
    if "k_pages" in arguments:
        k, v = arguments["k_pages"], arguments["v_pages"]
        batch = AttentionBatch(
            arguments["cu_seqlens_q"], 2, 9, page_table=arguments["page_table"], context_lens=arguments["context_lens"]
        )
    else:
        k, v = arguments["k"], arguments["v"]
        batch = AttentionBatch(arguments["cu_seqlens_q"], 3, 4, cu_seqlens_k=arguments["cu_seqlens_k"])
    return compare(out, arguments["q"], k, v, batch, flags).is_within_rule


@pytest.mark.parametrize("path", [None, "triton.prefill", "sdpa.math"])
def test_packed_attention_by_choice_and_by_name(path: str | None, device: torch.device) -> None:
    arguments = varlen_arguments(device)
    out = attention_varlen(**arguments, path=path)
    assert is_right(out, arguments, AttentionFlags(0.25))


@pytest.mark.parametrize("path", [None, "triton.extend", "sdpa.math"])
def test_paged_attention_by_choice_and_by_name(path: str | None, device: torch.device) -> None:
    arguments = paged_arguments(device)
    out = attention_paged(**arguments, path=path, window=3)
    assert is_right(out, arguments, AttentionFlags(0.25, window=3))


def test_one_query_a_sequence_is_decode(device: torch.device) -> None:
    arguments = paged_arguments(device)
    arguments.update(
        q=arguments["q"][:2], cu_seqlens_q=torch.tensor([0, 1, 2], dtype=INT, device=device), max_seqlen_q=1
    )
    out = attention_paged(**arguments, path="triton.decode")
    assert is_right(out, arguments, AttentionFlags(0.25))


def test_every_flag_reaches_the_kernel(device: torch.device) -> None:
    arguments = varlen_arguments(device)
    sinks = torch.randn(4, device=device)
    spans = torch.tensor([[0, 3]] * 5, dtype=INT, device=device)
    out = attention_varlen(**arguments, softmax_scale=0.5, window=2, softcap=1.5, sinks=sinks, spans=spans)
    assert is_right(out, arguments, AttentionFlags(0.5, True, 2, 1.5, sinks, spans))


def test_full_attention_is_asked_for_by_name(device: torch.device) -> None:
    arguments = varlen_arguments(device)
    assert is_right(attention_varlen(**arguments, causal=False), arguments, AttentionFlags(0.25, causal=False))


def test_the_output_is_written_where_it_is_asked_for(device: torch.device) -> None:
    arguments = varlen_arguments(device)
    out = torch.full_like(arguments["q"], float("nan"))
    assert attention_varlen(**arguments, out=out) is out
    assert is_right(out, arguments, AttentionFlags(0.25))


def test_an_empty_batch_is_an_empty_output(device: torch.device) -> None:
    arguments = varlen_arguments(device)
    arguments.update(q=arguments["q"][:0], cu_seqlens_q=torch.zeros(3, dtype=INT, device=device), max_seqlen_q=0)
    assert attention_varlen(**arguments).shape == (0, 4, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("max_queries", [1, 2])
def test_a_page_table_without_a_page_gives_zeros_on_every_path(
    max_queries: int, dtype: torch.dtype, device: torch.device
) -> None:
    q = torch.randn(1 + max_queries, 4, 16, device=device).to(dtype)
    k, v = torch.randn(2, 6, 16, 2, 16, device=device).to(dtype)
    starts = torch.tensor([0, 1, 1 + max_queries], dtype=INT, device=device)
    table, lens = torch.zeros(2, 0, dtype=INT, device=device), torch.zeros(2, dtype=INT, device=device)
    batch = AttentionBatch(starts, max_queries, 0, page_table=table, context_lens=lens)
    found = candidates(q, k, batch, AttentionFlags(0.25))
    names = {path.name for path, rejections in found if not rejections}
    assert {f"triton.{'decode' if max_queries == 1 else 'extend'}", "sdpa.math"} <= names
    for name in names:
        out = torch.full_like(q, float("nan"))
        attention_paged(q, k, v, table, lens, starts, max_queries, 0, path=name, out=out)
        assert not out.any(), name


def test_candidates_give_each_path_with_its_reasons(device: torch.device) -> None:
    arguments = varlen_arguments(device)
    batch = AttentionBatch(arguments["cu_seqlens_q"], 3, 4, cu_seqlens_k=arguments["cu_seqlens_k"])
    found = {
        path.name: [rejection.code for rejection in rejections]
        for path, rejections in candidates(arguments["q"], arguments["k"], batch, AttentionFlags(0.25, softcap=30.0))
    }
    assert found["triton.prefill"] == []
    assert found["triton.decode"] == [Reject.LAYOUT]
    assert Reject.SOFTCAP in found["sdpa.flash"]
    assert found["sdpa.math"] == []


@pytest.mark.parametrize(("max_queries", "is_decode"), [(1, True), (2, True), (8, True), (9, False)])
def test_a_few_queries_a_sequence_are_decode(max_queries: int, is_decode: bool, device: torch.device) -> None:
    arguments = paged_arguments(device)
    batch = AttentionBatch(
        arguments["cu_seqlens_q"], max_queries, 9, page_table=arguments["page_table"],
        context_lens=arguments["context_lens"],
    )  # fmt: skip
    found = {
        path.name: [rejection.code for rejection in rejections]
        for path, rejections in candidates(arguments["q"], arguments["k_pages"], batch, AttentionFlags(0.25))
    }
    assert (Reject.LAYOUT not in found["gluon.decode.hopper"]) == is_decode
    assert (Reject.LAYOUT in found["triton.decode"]) == (max_queries > 1)
    assert (next(iter(found)) == "gluon.decode.hopper") == (1 < max_queries <= 8)


def test_more_rows_than_a_tile_holds_are_a_chunk_first(device: torch.device) -> None:
    arguments = paged_arguments(device)
    q = torch.randn(3, 8, 16, device=device).half()
    batch = AttentionBatch(
        arguments["cu_seqlens_q"], 8, 9, page_table=arguments["page_table"], context_lens=arguments["context_lens"]
    )
    names = [path.name for path, _ in candidates(q, arguments["k_pages"], batch, AttentionFlags(0.25))]
    assert names.index("gluon.extend.hopper") < names.index("gluon.decode.hopper")


def test_a_named_path_that_cannot_serve_says_why(device: torch.device) -> None:
    with pytest.raises(ShapeError, match=r"path triton\.decode cannot serve prefill .*layout: does not serve prefill"):
        attention_varlen(**varlen_arguments(device), path="triton.decode")


def test_shapes_that_no_path_takes_are_refused(device: torch.device) -> None:
    arguments = varlen_arguments(device)
    arguments.update({name: torch.randn(7, 2, 1032, device=device) for name in ("k", "v")})
    arguments["q"] = torch.randn(5, 4, 1032, device=device)
    with pytest.raises(ShapeError, match="no path can serve prefill fp32 h4:2 d1032"):
        attention_varlen(**arguments)


PAGED = {"k_pages", "page_table", "context_lens", "max_context"}


def strided(x: Tensor) -> Tensor:
    """The same shape with a last dim of stride 2."""
    return x.repeat_interleave(2, dim=-1)[..., ::2]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda x: x[0], r"q: expected 3 dims \[tokens, heads, head_dim\], found \(4, 16\)"),
        ("q", lambda x: x.double(), r"q: expected fp32, fp16 or bf16, found torch\.float64"),
        ("q", lambda x: x.float(), r"k: expected torch\.float32 as q, found torch\.float16"),
        ("q", strided, r"q: expected a last dim of stride 1, found strides"),
        ("k", lambda x: x[None], r"k: expected 3 dims \[tokens, kv_heads, head_dim\], found \(1, 7, 2, 16\)"),
        ("k", lambda x: x[..., :8], "k: expected head_dim 16 as q, found 8"),
        ("v", lambda x: x[:6], r"v: expected shape \(7, 2, 16\) as k, found \(6, 2, 16\)"),
        ("v", lambda x: x.float(), r"v: expected torch\.float16 as q, found torch\.float32"),
        ("v", strided, r"v: expected a last dim of stride 1, found strides"),
        ("v", lambda x: x.to("meta"), "v: expected device .* as q, found meta"),
        ("cu_seqlens_q", lambda x: x.long(), r"cu_seqlens_q: expected int32, found torch\.int64"),
        ("cu_seqlens_q", lambda x: x[None], r"cu_seqlens_q: expected 1 dims, found \(1, 3\)"),
        ("cu_seqlens_q", lambda x: x[:0], "cu_seqlens_q: expected at least one element, found 0"),
        ("cu_seqlens_q", lambda x: x[:2], "q: expected at most 1 x 3 rows, found 5"),
        ("cu_seqlens_k", lambda x: x[:2], "cu_seqlens_k: expected 3 elements as cu_seqlens_q, found 2"),
        ("cu_seqlens_k", strided, r"cu_seqlens_k: expected contiguous, found strides \(2,\)"),
        ("max_seqlen_q", lambda x: x - 1, "q: expected at most 2 x 2 rows, found 5"),
        ("max_seqlen_q", lambda _: -1, "max_seqlen_q: expected at least 0, found -1"),
        ("max_seqlen_k", lambda _: -1, "the bound of the contexts: expected at least 0, found -1"),
        ("q", lambda x: x[:, :3], "k: expected a number of heads that divides q's 3, found 2"),
        ("k_pages", lambda x: x[0], r"k: expected 4 dims \[num_pages, page_size, kv_heads, head_dim\], found"),
        ("page_table", lambda x: x.long(), r"page_table: expected int32, found torch\.int64"),
        ("page_table", lambda x: x[:1], "page_table: expected 2 rows, one a sequence, found 1"),
        ("page_table", lambda x: x[0], r"page_table: expected 2 dims, found \(2,\)"),
        ("page_table", lambda x: x.t(), "page_table: expected contiguous, found strides"),
        ("context_lens", lambda x: x[:1], "context_lens: expected 2 elements, found 1"),
        ("context_lens", lambda x: x.long(), r"context_lens: expected int32, found torch\.int64"),
        ("max_context", lambda _: 17, "max_context: expected at most 16, what the page table can name, found 17"),
    ],
)
def test_arguments_that_disagree_are_refused(name: str, change: Any, message: str, device: torch.device) -> None:
    call_once(device)  # what was right before does not make this one right
    is_paged = name in PAGED
    attend, arguments = (
        (attention_paged, paged_arguments(device)) if is_paged else (attention_varlen, varlen_arguments(device))
    )
    arguments[name] = change(arguments[name])
    for _ in range(2):
        with pytest.raises(ShapeError, match=message):
            attend(**arguments)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"softmax_scale": 0.0}, r"softmax_scale: expected positive and finite, found 0\.0"),
        ({"softmax_scale": float("nan")}, "softmax_scale: expected positive and finite, found nan"),
        ({"window": 0}, "window: expected at least 1, found 0"),
        ({"window": 4, "causal": False}, "window: expected causal attention beside it, found causal=False"),
        ({"softcap": -1.0}, r"softcap: expected positive and finite, found -1\.0"),
        ({"sinks": torch.zeros(3)}, r"sinks: expected shape \(4,\), one a head, found \(3,\)"),
        ({"sinks": torch.zeros(4).half()}, r"sinks: expected fp32, found torch\.float16"),
        ({"spans": torch.zeros(5, 2)}, r"spans: expected int32, found torch\.float32"),
        ({"spans": torch.zeros(4, 2, dtype=INT)}, r"spans: expected shape \(5, 2\), found \(4, 2\)"),
        (
            {"spans": torch.zeros(5, 2, dtype=INT), "causal": False},
            "spans: expected causal attention beside them, found causal=False",
        ),
        ({"out": torch.zeros(5, 4, 8).half()}, r"out: expected shape \(5, 4, 16\) as q, found \(5, 4, 8\)"),
        ({"out": torch.zeros(5, 4, 16)}, r"out: expected torch\.float16 as q, found torch\.float32"),
    ],
)
def test_flags_that_disagree_are_refused(flags: dict[str, Any], message: str, device: torch.device) -> None:
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in flags.items()}
    call_once(device)
    with pytest.raises(ShapeError, match=message):
        attention_varlen(**varlen_arguments(device), **moved)


PLANNED = ("page_table", "context_lens", "cu_seqlens_q", "max_seqlen_q", "max_context")


def test_every_layer_of_a_plan_is_right(device: torch.device) -> None:
    """Layers of other values, of sinks of their own, and with heads of their own."""
    arguments = paged_arguments(device)
    plan = plan_paged(*(arguments[name] for name in PLANNED), window=3)
    for num_heads, has_sinks in ((4, False), (4, True), (4, True), (2, False)):
        layer = paged_arguments(device) | {"q": torch.randn(3, num_heads, 16, device=device).half()}
        sinks = torch.randn(num_heads, device=device) if has_sinks else None
        out = plan.run(layer["q"], layer["k_pages"], layer["v_pages"], sinks=sinks)
        assert is_right(out, arguments | layer, AttentionFlags(0.25, window=3, sinks=sinks))


def test_a_plan_refuses_tensors_that_disagree_with_it(device: torch.device) -> None:
    arguments = varlen_arguments(device)
    q, k, v = (arguments[name] for name in "qkv")
    plan = plan_varlen(*(arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")))
    for _ in range(2):
        plan.run(q, k, v)
        with pytest.raises(ShapeError, match=r"v: expected shape \(7, 2, 16\) as k, found \(6, 2, 16\)"):
            plan.run(q, k, v[:6])


@pytest.mark.parametrize("max_context", [-1, 17])
def test_a_bound_past_the_page_table_is_refused_after_repeats(max_context: int, device: torch.device) -> None:
    arguments = paged_arguments(device)
    for _ in range(2):
        attention_paged(**arguments)
    with pytest.raises(ShapeError, match="found"):
        attention_paged(**arguments | {"max_context": max_context})
