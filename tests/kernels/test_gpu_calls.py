"""Calls on a CUDA GPU: equal bits, graphs, shared plans, odd memory, bounded memory, and arguments that are refused."""

import random
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.calls.batch import AttentionFlags
from kernels.functional import AttentionPlan, attention_paged, plan_paged, plan_varlen
from kernels.fused.rope_kv import rope_and_write_kv
from kernels.hopper.variants import LONG
from kernels.linear.first_path import multiply
from kernels.linear.weights import PlainWeight
from kernels.reference.compare import compare
from kernels.vocabulary.path import RunAttention
from support.attention.cases import BF16, CHUNKS, CUDA, PROMPTS, TOKENS, Case, made, run_of
from support.attention.inputs import NAN, POISON_PAGE, Inputs, assert_right, attend, edges, flags_for

pytestmark = pytest.mark.gpu

ONE = {"heads": (32, 8), "variant": "clusters"}  # one sequence, whose rows clusters share
DRAW = random.Random(0)
LONG_CHUNKS = tuple(DRAW.randrange(1, 900) for _ in range(12))
REPEATED = [
    *(Case("gluon.prefill", tuple(DRAW.randrange(1, 3000) for _ in range(24)), dim=d, heads=(16, 4))
      for d in (64, 128, 256)),
    *(Case("gluon.extend", LONG_CHUNKS, tuple(x + DRAW.randrange(20_000) for x in LONG_CHUNKS), dim=d, heads=(16, 4))
      for d in (64, 128, 192, 256)),
    *(Case("gluon.decode", *TOKENS, dim=d, heads=(32, 8)) for d in (64, 128, 256)),
    *(Case("gluon.decode", (1,), (2000,), dim=d, heads=heads, variant="clusters")
      for d, heads in ((64, (32, 8)), (128, (32, 8)), (256, (16, 4)))),
    *(Case("gluon.prefill.window", tuple(DRAW.randrange(1, 900) for _ in range(300)), dim=d, window=128)
      for d in (64, 128)),
]  # fmt: skip


def replayed(call: Callable[[], None]) -> Callable[[], None]:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_ten_calls_give_the_same_bits(case: Case) -> None:
    run, inputs, flags = made(case)
    first, *others = (attend(run, inputs, flags) for _ in range(10))
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("case", "several"),
    [
        (Case("gluon.extend", (64, 64), (5000, 100)), [(5000, 100), (100, 64), (4000, 90)]),
        (Case("gluon.decode", (1, 1, 1), (100, 900, 40)), [(100, 900, 40), (1, 500, 0), (7, 0, 39), (0, 0, 0)]),
        (Case("gluon.decode", (1,), (2047,), **ONE), [(2047,), (1,), (100,), (1999,), (0,)]),  # type: ignore[arg-type]
        (Case("triton.decode", (1, 1), (100, 900), page_size=16), [(100, 900), (1, 500), (7, 0)]),
    ],
    ids=str,
)
def test_a_graph_follows_the_lengths(case: Case, several: list[tuple[int, ...]]) -> None:
    run, inputs, flags = made(case)
    out, lens = torch.full_like(inputs.q, NAN), inputs.batch.context_lens
    assert lens is not None
    replay = replayed(lambda: run(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out))
    for lengths in several:
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(NAN)
        replay()
        assert compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags).is_within_rule, lengths


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    "case",
    [
        Case("gluon.prefill", PROMPTS),
        Case("gluon.extend", (30, 100), (70, 300), page_size=16),
        Case("gluon.decode", *TOKENS, heads=(32, 8)),
        Case("triton.prefill", (300, 1, 128), (300, 1, 128)),
        Case("triton.extend", (30, 100), (70, 300), page_size=16),
        Case("triton.decode", (1, 1), (100, 900), page_size=16),
    ],
    ids=str,
)
def test_a_call_never_waits_for_the_gpu(case: Case) -> None:
    run, inputs, flags = made(case)
    expected = attend(run, inputs, flags)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attend(run, inputs, flags)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nan_past_the_packed_end_reaches_no_row(dim: int) -> None:
    run, inputs, flags = made(Case("gluon.prefill", (200, 65, 1, 300, 500), dim=dim, heads=(4, 2)))
    ends = edges([200, 65, 1, 300], CUDA)
    for x in (inputs.q, inputs.k, inputs.v):
        x[566:] = NAN
    batch = replace(inputs.batch, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=300, max_context=300)
    out = attend(run, replace(inputs, batch=batch), flags)
    q, k, v = (x[:566] for x in (inputs.q, inputs.k, inputs.v))
    assert compare(out[:566], q, k, v, batch, flags).is_within_rule
    assert out[566:].isnan().all(), "rows past the last sequence are nobody's to write"


@pytest.mark.parametrize(
    "case",
    [
        *(
            Case("gluon.prefill", (190, 65, 300), dim=dim, heads=(4, 2), flags=flags, window=window)
            for dim in (64, 128, 256)
            for flags, window in (((), None), ((), 90), (("spans",), None))
        ),
        *(Case("gluon.prefill.window", (190, 65, 300), dim=dim, heads=(4, 2), window=128) for dim in (64, 128)),
        Case("gluon.extend", (90, 65, 30), (5000, 400, 3000)),
    ],
    ids=str,
)
def test_a_sequence_of_nan_reaches_no_other(case: Case) -> None:
    run, inputs, flags = made(case)
    clean = attend(run, inputs, flags)
    mine = slice(case.queries[0], case.queries[0] + case.queries[1])
    table = inputs.batch.page_table
    if table is None:
        inputs.q[mine], inputs.k[mine], inputs.v[mine] = NAN, NAN, NAN
    else:
        inputs.k[table[1, :7]], inputs.v[table[1, :7]] = NAN, NAN  # all of its 400 keys
    is_other = torch.ones(inputs.q.shape[0], dtype=torch.bool, device=CUDA)
    is_other[mine] = False
    assert torch.equal(attend(run, inputs, flags)[is_other], clean[is_other])


@pytest.mark.parametrize(
    ("case", "num_unread"),
    [
        (Case("gluon.decode", (1,), (1000,), window=100), (14,)),
        # The first queries see keys from 87 and from 927 on.
        (Case("gluon.extend", (4, 64), (100, 1000), page_size=16, window=10), (5, 57)),
    ],
    ids=str,
)
def test_pages_behind_the_window_are_not_read(case: Case, num_unread: tuple[int, ...]) -> None:
    """A cache may have given them to another sequence, or filled them with anything."""
    run, inputs, flags = made(case)
    expected = attend(run, inputs, flags)
    table = inputs.batch.page_table
    assert table is not None
    if case.path == "gluon.decode":  # the window's first page, before the window
        inputs.k[table[0, 14].item(), : 900 - 14 * 64] = NAN
        inputs.v[table[0, 14].item(), : 900 - 14 * 64] = NAN
    for sequence, pages in enumerate(num_unread):
        table[sequence, :pages] = POISON_PAGE
    assert torch.equal(attend(run, inputs, flags), expected)


@pytest.mark.parametrize("layout", ["head first", "keys beside values"])
def test_pages_of_other_strides_give_the_same_bits(layout: str) -> None:
    run, inputs, flags = made(Case("gluon.extend", *CHUNKS))
    if layout == "head first":
        k, v = (pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (inputs.k, inputs.v))
    else:
        k, v = torch.stack([inputs.k, inputs.v], 1).unbind(1)
    assert torch.equal(attend(run, replace(inputs, k=k, v=v), flags), attend(run, inputs, flags))


@pytest.mark.parametrize("dim", [64, 128])
def test_slices_of_a_fused_projection_need_no_copy(dim: int) -> None:
    run, inputs, flags = made(Case("gluon.prefill", (100, 333), dim=dim, heads=(4, 2)))
    fused = torch.randn(433, 8, dim, device=CUDA, dtype=BF16)
    assert_right(run, replace(inputs, q=fused[:, :4], k=fused[:, 4:6], v=fused[:, 6:]), flags)


def test_tensors_that_tma_cannot_address_are_still_right() -> None:
    """Rows of 130 bytes, no multiple of 16."""
    run, inputs, flags = made(Case("gluon.prefill", (100, 200), dim=64, heads=(4, 2)))
    wide = torch.randn(300, 4, 65, device=CUDA, dtype=BF16)
    assert_right(run, replace(inputs, q=wide[..., :64], k=wide[:, :2, 1:], v=wide[:, 2:, :64]), flags)
    window = replace(flags, window=128)
    assert_right(
        run_of("gluon.prefill.window"), replace(inputs, q=wide[..., :64], k=wide[:, :2, 1:], v=wide[:, 2:, :64]), window
    )
    run, inputs, flags = made(Case("gluon.extend", *CHUNKS, dim=64))
    wide = torch.empty(*inputs.k.shape[:3], 65, dtype=BF16, device=CUDA)
    wide[..., :64] = inputs.k
    assert_right(run, replace(inputs, k=wide[..., :64]), flags)


def test_decode_copies_queries_and_refuses_odd_pages() -> None:
    run, inputs, flags = made(Case("gluon.decode", (1, 1), (100, 3)))
    expected = attend(run, inputs, flags)
    wide = torch.empty(2, 8, 131, dtype=BF16, device=CUDA)[..., 1:129]
    wide.copy_(inputs.q)
    assert torch.equal(attend(run, replace(inputs, q=wide), flags), expected)
    pages = torch.empty(*inputs.k.shape[:3], 129, dtype=BF16, device=CUDA)[..., :128]
    with pytest.raises(ValueError, match="whole 16 bytes"):
        attend(run, replace(inputs, k=pages), flags)


def test_a_batch_of_empty_sequences_writes_nothing() -> None:
    run, inputs, flags = made(Case("gluon.prefill", (256,), heads=(4, 2)))
    batch = replace(inputs.batch, cu_seqlens_q=edges([0, 0], CUDA), cu_seqlens_k=edges([0, 0], CUDA))
    out = attend(run, replace(inputs, batch=batch), flags)
    torch.cuda.synchronize()
    assert out.isnan().all()


def test_rows_past_two_billion_elements_are_right() -> None:
    lengths = (2000,) * 270  # 2.2e9 elements of q, and of k and of v
    run, inputs, flags = made(Case("gluon.prefill", lengths, heads=(32, 32), window=64))
    out = attend(run, inputs, flags)
    rows = torch.arange(sum(lengths) - 200, sum(lengths), 7, device=CUDA)
    assert compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags, rows=rows).is_within_rule


def test_queries_beyond_2_to_the_31_elements_are_addressed() -> None:
    run, inputs, flags = made(Case("triton.prefill", (100,), (100,)))
    expected = attend(run, inputs, flags)
    stride = 2**25
    wide = torch.empty(2 * 50 * stride + 50 * stride, dtype=BF16, device=CUDA)
    q = wide.as_strided((100, 8, 128), (stride, 128, 1))
    out = wide.as_strided((100, 8, 128), (stride, 128, 1), storage_offset=4096)
    q.copy_(inputs.q)
    run(q, inputs.k, inputs.v, inputs.batch, flags, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("library", ["gluon", "triton"])
@pytest.mark.parametrize("phase", ["prefill", "extend", "decode"])
@pytest.mark.usefixtures("_hopper")
def test_peak_memory_is_linear_in_tokens(phase: str, library: str) -> None:
    """Scores of one KV head alone would be 3 GiB in the larger batch; parts of split keys are at most some 16 MiB."""
    peaks = []
    for tokens in (4096, 32_768):
        lengths = {
            "prefill": ((tokens,), (tokens,)),
            "extend": ((tokens,), (2 * tokens,)),
            "decode": ((1,) * 8, (tokens // 8,) * 8),
        }
        run, inputs, flags = made(Case(f"{library}.{phase}", *lengths[phase]))
        out = torch.empty_like(inputs.q)
        run(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)  # compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 8 * peaks[0] + 2**24, peaks


@pytest.mark.parametrize(
    ("message", "case", "causal"),
    [
        ("causal", Case("gluon.prefill", (70,), (70,)), False),
        ("head_dim: .* found 36", Case("gluon.prefill", (70,), (70,), dim=36), True),
        ("head_dim: .* found 264", Case("gluon.prefill", (70,), (70,), dim=264), True),
        ("causal: ", Case("gluon.extend", (70,), (140,)), False),
        ("page_size: .* found 24", Case("gluon.extend", (70,), (140,), page_size=24), True),
        ("mask", Case("gluon.decode", (1,) * 8, (8,) * 8), False),
        ("page_size: .* found 40", Case("gluon.decode", (1,) * 8, (8,) * 8, page_size=40), True),
        ("max_seqlen_q: .* found 17", Case("gluon.decode", (17,), (100,)), True),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(message: str, case: Case, causal: bool) -> None:
    run, inputs, _ = made(case)
    out = torch.full_like(inputs.q, NAN)
    with pytest.raises(ValueError, match=message):
        run(inputs.q, inputs.k, inputs.v, inputs.batch, AttentionFlags(0.1, causal=causal), out)
    assert out.isnan().all()


def test_the_library_serves_a_few_queries_by_decode() -> None:
    run, inputs, flags = made(Case("gluon.decode", (3, 1, 0, 4), (500, 1, 9, 64)))
    batch = inputs.batch
    assert batch.page_table is not None
    assert batch.context_lens is not None
    out = attention_paged(
        inputs.q, inputs.k, inputs.v, batch.page_table, batch.context_lens, batch.cu_seqlens_q, 4, batch.max_context
    )
    assert torch.equal(out, attend(run, inputs, flags))


def test_two_graphs_replayed_at_once_are_independent() -> None:
    """No workspace and no counter is shared."""
    several = [made(Case("gluon.decode", *TOKENS, heads=(32, 8))) for _ in range(2)]
    outs = [torch.full_like(inputs.q, NAN) for _, inputs, _ in several]
    replays = [
        replayed(lambda run=run, i=i, f=f, o=o: run(i.q, i.k, i.v, i.batch, f, o))  # type: ignore[misc]
        for (run, i, f), o in zip(several, outs, strict=True)
    ]
    expected = [attend(*each) for each in several]
    streams = [torch.cuda.Stream() for _ in several]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, replay in zip(streams, replays, strict=True):
            with torch.cuda.stream(stream):
                replay()
    torch.cuda.synchronize()
    for out, right in zip(outs, expected, strict=True):
        assert torch.equal(out, right)


@pytest.mark.parametrize(("dim", "heads"), [(64, (32, 8)), (128, (32, 8)), (256, (16, 4))])
def test_layers_of_a_step_share_scratch_memory(dim: int, heads: tuple[int, int]) -> None:
    """One right behind the other, each starts before the one before has ended."""
    run, inputs, plain = made(Case("gluon.decode", (1,) * 5, (3000, 70, 1, 640, 300), dim=dim, heads=heads))
    pages = [(inputs.k.roll(n, 2), inputs.v.roll(n, 2)) for n in range(12)]
    flags = [replace(plain, window=500 if n % 3 == 2 else None) for n in range(12)]
    flags = [replace(each, sinks=torch.randn(heads[0], device=CUDA)) for each in flags]
    outs = [torch.full_like(inputs.q, NAN) for _ in flags]

    def compute(plans: dict[Hashable, Any] | None) -> None:
        batch = replace(inputs.batch, plans=plans)
        for (k, v), of_layer, out in zip(pages, flags, outs, strict=True):
            run(inputs.q, k, v, batch, of_layer, out)

    compute(None)
    torch.cuda.synchronize()
    expected = [out.clone() for out in outs]
    plans: dict[Hashable, Any] = {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute(plans)
    assert len([key for key in plans if key[0] == "decode scratch"]) == 1  # type: ignore[index]
    for _ in range(100):
        for out in outs:
            out.fill_(NAN)
        graph.replay()
        assert all(map(torch.equal, outs, expected))


def decoder_layers(run: RunAttention, inputs: Inputs) -> Callable[[Callable[[], object]], Tensor]:
    """Six layers of a decoder over one sequence's token each, which waits between its launches as it is told.

    The new keys come from the launch right before, queries too; the output is the next launch's input.
    """
    q, batch = inputs.q, inputs.batch
    assert batch.page_table is not None
    assert batch.context_lens is not None
    (num_seqs, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, inputs.k.shape
    hidden_size, heads = num_heads * head_dim, (num_heads, num_kv_heads, num_kv_heads)
    positions = batch.context_lens - 1
    pages = batch.page_table.gather(1, (positions // page_size)[:, None].long())[:, 0]
    slots = pages.long() * page_size + positions % page_size
    flags, cos_sin = flags_for(inputs), torch.randn(1024, head_dim, device=q.device)

    def weight(rows: int) -> Tensor:
        return torch.randn(rows, hidden_size, device=q.device).to(q.dtype) / hidden_size**0.5

    weights = [(weight(sum(heads) * head_dim), weight(hidden_size)) for _ in range(6)]
    start = torch.randn(num_seqs, hidden_size, device=q.device).to(q.dtype)

    def compute(wait: Callable[[], object]) -> Tensor:
        hidden = start
        for qkv, output in weights:
            q, k, v = (
                multiply(hidden, PlainWeight(qkv)).view(num_seqs, sum(heads), head_dim).split_with_sizes(heads, dim=1)
            )
            wait()
            rope_and_write_kv(q, k, v, cos_sin, positions, inputs.k, inputs.v, slots)
            wait()
            out = torch.empty_like(q)
            run(q, inputs.k, inputs.v, batch, flags, out)
            wait()
            hidden = multiply(out.flatten(1), PlainWeight(output))
            wait()
        return hidden

    return compute


@pytest.mark.parametrize(
    "case",
    [
        Case("gluon.decode", (1,) * 5, (1000, 70, 1, 64, 300)),
        Case("gluon.decode", (1,), (1000,), heads=(16, 4), variant="clusters"),
    ],
    ids=str,
)
def test_early_launches_read_what_earlier_ones_write(case: Case) -> None:
    """Launches of a graph start early: the bits are those of launches that the host waits for."""
    run, inputs, _ = made(case)
    compute = decoder_layers(run, inputs)
    torch.cuda.synchronize()
    expected = compute(torch.cuda.synchronize)
    assert torch.isfinite(expected).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute(lambda: None)
    for _ in range(30):
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, expected)


FLAGS = (AttentionFlags(0.1), AttentionFlags(0.1, window=100))
PLANNED = [
    Case("gluon.prefill", (100,)),  # fewer tiles than multiprocessors
    Case("gluon.prefill", (3000, 0, 1, 2048, 129)),
    Case("gluon.prefill", (LONG + 9, 100), dim=64, variant="three consumers"),
    Case("gluon.prefill", (128,), heads=(132, 132)),  # one tile a multiprocessor
    Case("gluon.extend", (100,), (300,)),
    Case("gluon.extend", (100, 3), (9000, 30_000)),  # in parts
    Case("gluon.extend", (3000, 0, 2048), (4000, 10, 2048)),
    Case("gluon.decode", (1, 1, 0, 1), (9000, 1, 30, 100)),
]


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_twelve_layers_of_one_plan_give_the_bits_of_a_plan_each(case: Case) -> None:
    run, inputs, _ = made(case)
    alone = [attend(run, inputs, flags) for flags in FLAGS]
    batch = replace(inputs.batch, plans={})
    for layer in range(12):
        out = torch.full_like(inputs.q, NAN)
        run(inputs.q, inputs.k, inputs.v, batch, FLAGS[layer % 2], out)
        assert torch.equal(out, alone[layer % 2]), layer
    assert batch.plans is not None
    num_plans = sum(isinstance(key[0], str) for key in batch.plans)  # type: ignore[index]
    assert num_plans == (1 if case.path == "gluon.decode" else 2), "decode's scratch, or one plan of each window"
    assert len(batch.plans) > num_plans, "launches to repeat"


def test_a_graph_of_layers_plans_once_a_replay() -> None:
    run, inputs, _ = made(Case("gluon.prefill", (1000, 24)))
    inputs = replace(inputs, batch=replace(inputs.batch, max_seqlen_q=1023, max_context=1023))
    outs = [torch.zeros_like(inputs.q) for _ in range(4)]
    run(inputs.q, inputs.k, inputs.v, inputs.batch, FLAGS[0], outs[0])  # compiles
    batch, graph = replace(inputs.batch, plans={}), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            run(inputs.q, inputs.k, inputs.v, batch, FLAGS[0], out)
    for lengths in ([1000, 24], [500, 524], [1, 1023]):
        inputs.batch.cu_seqlens_q.copy_(torch.tensor([0, lengths[0], 1024]))
        expected = attend(run, inputs, FLAGS[0])
        for out in outs:
            out.fill_(NAN)
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs), lengths


def planned(path: str | None, inputs: Inputs) -> AttentionPlan:
    batch = inputs.batch
    bounds: dict[str, Any] = {"softmax_scale": FLAGS[0].scale, "path": path}
    if batch.page_table is None or batch.context_lens is None:
        assert batch.cu_seqlens_k is not None
        starts = (batch.cu_seqlens_q, batch.cu_seqlens_k)
        return plan_varlen(*starts, batch.max_seqlen_q, batch.max_context, **bounds)
    pages = (batch.page_table, batch.context_lens, batch.cu_seqlens_q)
    return plan_paged(*pages, batch.max_seqlen_q, batch.max_context, **bounds)


LIBRARY = [
    Case("gluon.prefill", (100, 1, 300, 27)),
    Case("gluon.extend", (100, 1, 30, 27), (3000, 1, 64, 100)),
    Case("gluon.decode", (1, 1, 1, 1), (3000, 1, 64, 100)),
]


@pytest.mark.parametrize("case", LIBRARY, ids=str)
def test_calls_of_a_plan_give_the_bits_of_run(case: Case) -> None:
    """Layers with tensors of their own; on another stream, and in a graph, by a plan of their own."""
    run, inputs, _ = made(case)
    layers = [replace(inputs, q=inputs.q.roll(n, 0), k=inputs.k.roll(n, -1), v=inputs.v.roll(n, -1)) for n in range(4)]
    expected = [attend(run, layer, FLAGS[0]) for layer in layers]
    path = f"{case.path}.hopper"

    def compute() -> list[Tensor]:
        plan = planned(path, inputs)
        return [plan.run(layer.q, layer.k, layer.v) for _ in range(3) for layer in layers]

    outs, stream = compute(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        outs += compute()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[at % 4]) for at, out in enumerate([*outs, *captured]))


@pytest.mark.timed
@pytest.mark.parametrize("case", LIBRARY, ids=str)
def test_a_repeated_call_of_a_plan_takes_the_host_25_us(case: Case) -> None:
    """The driver's part too, the least mean of some rounds. `pytest -s` prints it, and that of calls without a plan."""
    _, inputs, _ = made(case)
    plan = planned(None, inputs)

    def least_us(call: Callable[[], object]) -> float:
        means = []
        for _ in range(8):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):  # fewer than the launches that the driver queues before it waits
                call()
            means.append((time.perf_counter() - start) / 100 * 1e6)
        return min(means)

    repeated = least_us(lambda: plan.run(inputs.q, inputs.k, inputs.v))
    alone = least_us(lambda: planned(None, inputs).run(inputs.q, inputs.k, inputs.v))
    print(f"\n{case}: {repeated:.1f} us of the host a repeated call, {alone:.1f} with a plan of its own")
    assert repeated < 25
