"""The paths that a CPU can run, Triton's in its interpreter, against the oracle's rule, and what else they promise.

The rule asks for zeros where a query sees no key; unused slots are NaN and the tails of page tables poisoned. In the
interpreter a tile is 32 packed rows by 32 keys: lengths are one off each edge, for a group of one.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from kernels.calls.batch import AttentionBatch
from kernels.portable.decode import num_splits_for
from kernels.portable.launch_config import Tiles
from support.attention.cases import Case, made
from support.attention.inputs import NAN, POISON_PAGE, assert_right, attend, edges

FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16
ALL = ("softcap", "sinks", "spans")
GROUPS = [(8, 2), (7, 1)]
PROMPTS = (31, 1, 0, 33, 64)
CHUNKS = (1, 5, 16, 3, 0, 33), (15, 16, 17, 33, 8, 65)
# One and more splits of one and more tiles; no query, no key, and page edges.
TOKENS = (1, 1, 1, 1, 1, 0, 1, 1), (1, 15, 16, 17, 130, 5, 0, 65)
SMALL = {"dim": 64, "heads": (2, 1), "dtype": FP16, "page_size": 16}


def case(path: str, queries: tuple[int, ...], keys: tuple[int, ...] | None = None, **fields: object) -> Case:
    return Case(path, queries, keys, **(SMALL | fields))  # type: ignore[arg-type]


def prompt_cases() -> Iterator[Case]:
    path = "triton.prefill"
    for dtype in (FP16, FP32):
        yield case(path, PROMPTS, heads=(1, 1), dtype=dtype)
    for name in ALL:
        yield case(path, (40, 1, 33), flags=(name,))
    for heads in GROUPS:
        yield case(path, (9, 17), heads=heads, dim=16)
    for dim in (8, 80, 256):  # below an MMA's 16, and padded to a power of two
        yield case(path, (34, 5), dim=dim, flags=("sinks",))
    for window in (1, 32, 33, 1000):
        yield case(path, (70, 3), heads=(1, 1), window=window)
    yield case(path, PROMPTS, causal=False)
    yield case(path, (66, 5), heads=(4, 2), flags=ALL, window=7)
    for window in (None, 5):  # queries are the last positions of longer keys
        yield case(path, (3, 1, 33), (40, 33, 65), window=window)
    for flags in ((), ("sinks",)):  # some queries see no key
        yield case(path, (40, 6), (3, 0), flags=flags)


def chunk_cases() -> Iterator[Case]:
    path = "triton.extend"
    for page_size in (1, 16, 24):  # 24: neither a power of two nor a divisor of the tile
        yield case(path, *CHUNKS, page_size=page_size)
    for heads in (*GROUPS, (32, 1)):
        yield case(path, (9, 1), (20, 40), heads=heads, dim=16)
    for dim, dtype in ((80, FP16), (256, FP32)):
        yield case(path, (12, 5), (40, 5), dim=dim, dtype=dtype)
    for window in (1, 16, 17):
        yield case(path, (20, 1), (70, 33), window=window)
    for flags in (("softcap",), ("spans",), ALL):
        yield case(path, (20, 1, 7), (70, 33, 7), flags=flags, window=19 if flags == ALL else None)
    yield case(path, (20, 7), (50, 7), causal=False)
    for flags in ((), ("sinks",)):
        yield case(path, (2, 3), (0, 3), flags=flags)


def token_cases() -> Iterator[Case]:
    path = "triton.decode"
    for page_size in (1, 16, 24):
        yield case(path, *TOKENS, page_size=page_size)
    yield case(path, (1, 1), (260, 3))  # the second has one split with keys and others without
    for heads in (*GROUPS, (32, 1)):
        yield case(path, (1, 1), (70, 40), heads=heads, dim=16)
    for dim, dtype in ((80, FP16), (256, FP32)):
        yield case(path, (1, 1), (40, 75), dim=dim, dtype=dtype)
    for window in (1, 17, 130):  # a token, past the edge of a page, and the longest context
        yield case(path, (1, 1, 1), (17, 130, 1), window=window)
    for flags in (("softcap",), ("spans",), ALL):
        yield case(path, (1, 1, 1), (17, 130, 1), flags=flags, window=19 if flags == ALL else None)
    for flags in ((), ("sinks",)):
        yield case(path, (1, 1), (0, 40), flags=flags)


def wide_cases() -> Iterator[Case]:
    for dim, dtype in ((512, FP16), (512, FP32)):
        yield case("triton.prefill.wide", (33, 1), heads=(4, 1), dim=dim, dtype=dtype)
        yield case("triton.extend.wide", (5, 20), (20, 40), heads=(4, 2), dim=dim, dtype=dtype, window=19)
        yield case("triton.decode.wide", (1, 1), (40, 3), heads=(8, 1), dim=dim, dtype=dtype)


def latent_cases() -> Iterator[Case]:
    """Cases of heads that fill less and more than a tile, of latents that do not fill one, and of 256 and 512."""
    ordered = "triton.latent.ordered", "torch.attention.latent.tiles"
    for path in ("triton.latent", "sdpa.cpu.latent", "sdpa.math.latent", *ordered):
        few, many = ({"heads": (count, 1), "dim": 48, "latent": 40} for count in (3, 33))
        yield case(f"{path}.prefill" if path.startswith("triton") else path, (31, 1, 0, 33), page_size=0, **few)
        yield case(path, *CHUNKS, **few)
        yield case(path, *TOKENS, **few, page_size=24, dtype=FP32)
        yield case(path, (3, 1), (70, 1), **many)
        yield case(path, (1, 40), (70, 41), heads=(4, 2), dim=40, latent=16)
        yield case(path, (1, 9), (40, 70), heads=(2, 1), dim=320, latent=256)
        yield case(path, (1, 1), (40, 70), heads=(20, 1), dim=576, latent=512)
    for path in ("triton.latent", "sdpa.math.latent", *ordered):
        yield case(path, (20, 1, 7), (70, 33, 7), heads=(4, 1), dim=48, latent=32, flags=ALL, window=19)
        yield case(path, (1, 1), (70, 33), heads=(4, 1), dim=48, latent=32, flags=("sinks",))
    yield case(ordered[0], (8, 1), (1500, 1030), heads=(16, 1), dim=48, latent=32)  # of parts


def asymmetric_cases() -> Iterator[Case]:
    """Cases of keys that are one block and two, of values that do not fill one, and of 192 and 128."""
    paths = ("triton.asymmetric", "sdpa.cpu.asymmetric", "sdpa.math.asymmetric", "torch.attention.asymmetric.tiles")
    for path in paths:
        odd = {"heads": (6, 2), "dim": 24, "value_dim": 10}
        yield case(f"{path}.prefill" if path == "triton.asymmetric" else path, (31, 1, 0, 33), page_size=0, **odd)
        yield case(path, *CHUNKS, **odd)
        yield case(path, *TOKENS, **odd, page_size=24, dtype=FP32)
        yield case(path, *TOKENS, **odd, window=19)
        yield case(path, (3, 1), (1070, 1), heads=(33, 1), dim=16, value_dim=8)
        yield case(path, (1, 40), (70, 41), heads=(4, 2), dim=192, value_dim=128)
        yield case(path, (8, 1), (1500, 1030), heads=(16, 1), dim=192, value_dim=128, window=129)
    for path in paths[0], *paths[2:]:
        more = {"heads": (4, 1), "dim": 48, "value_dim": 32}
        yield case(path, (20, 1, 7), (70, 33, 7), flags=ALL, window=19, **more)
        yield case(path, (1, 1), (70, 33), flags=("sinks",), **more)


def sdpa_cases() -> Iterator[Case]:
    for path in ("sdpa.cpu", "sdpa.math"):
        for window in (1, 17, 256, 1000):  # over chunks of rows
            yield case(path, (600, 3), dim=16, page_size=0, window=window)
        for window, dtype in product((None, 5), (FP32, FP16, BF16)):
            chunks = (1, 5, 16, 3, 0, 40), (15, 16, 17, 33, 8, 300)
            yield case(path, *chunks, heads=(6, 2), dtype=dtype, window=window)
        for window in (None, 1, 16, 17):
            yield case(path, (1, 1, 0, 1, 1), (1, 16, 5, 130, 0), heads=(6, 2), window=window)
        yield case(path, (31, 1, 3), (31, 5, 1), page_size=0, causal=False)
        yield case(path, (66, 1), page_size=0, flags=("spans",), window=7)
        for window in (None, 2):  # some queries see no key
            yield case(path, (40, 6, 4), (3, 0, 1), page_size=0, window=window)
        yield case(path, (20,), page_size=0, dim=320, dtype=FP32)
    for flags, window in product([("softcap",), ("sinks",), ALL], (19, None)):
        yield case("sdpa.math", (20, 1, 7, 2), (70, 33, 7, 0), heads=(4, 2), flags=flags, window=window)


def sdpa_token_cases() -> Iterator[Case]:
    """Cases of a CPU's decode, which takes sequences of about the same length together."""

    def tokens(*contexts: int, **fields: object) -> Case:
        sizes = {"heads": (4, 2), "dim": 32, "dtype": FP32}
        return case("sdpa.cpu", (1,) * len(contexts), contexts, **(sizes | fields))

    for window in (None, 1, 16, 17, 100, 5000):
        yield tokens(1, 4096, 17, 16, 700, 15, 2, 1111, 690, 64, 63, 65, window=window)
    for heads, dtype in product([(1, 1), (6, 2), (8, 8), (8, 1)], (FP32, FP16, BF16)):
        yield tokens(33, 40, 3, 300, dtype=dtype, heads=heads, window=35)
    for page_size, window in product((1, 4, 64), (None, 3)):
        yield tokens(1, 4, 5, 64, 130, heads=(2, 1), dim=64, page_size=page_size, window=window)
    yield tokens(40, 90, window=7, causal=False)  # where a window means nothing
    for num in (1, 63, 64, 65, 127, 129):
        yield tokens(num, num)
    yield replace(tokens(0, 70, 90, 0, 0, 80, dim=64), queries=(1, 0, 1, 1, 0, 1))


@pytest.mark.parametrize(
    "case",
    [
        *prompt_cases(),
        *chunk_cases(),
        *token_cases(),
        *wide_cases(),
        *latent_cases(),
        *asymmetric_cases(),
        *sdpa_cases(),
        *sdpa_token_cases(),
    ],
    ids=str,
)
def test_batches_are_within_the_rule(case: Case, device: torch.device) -> None:
    assert_right(*made(case, torch.device("cpu") if case.path.startswith("sdpa") else device))


def test_a_span_reaches_before_the_window_and_past_the_tile(device: torch.device) -> None:
    run, inputs, flags = made(case("triton.prefill", (100,), heads=(1, 1), window=3), device)
    spans = torch.tensor([2, 99], dtype=torch.int32, device=device).repeat(100, 1)
    spans[:50] = 0
    assert_right(run, inputs, replace(flags, spans=spans))


def test_a_sink_of_minus_infinity_is_no_sink(device: torch.device) -> None:
    run, inputs, flags = made(case("triton.prefill", (5,)), device)
    sinks = torch.full((2,), float("-inf"), device=device)
    assert torch.equal(attend(run, inputs, replace(flags, sinks=sinks)), attend(run, inputs, flags))


def test_nan_in_one_sequence_stays_in_it(device: torch.device) -> None:
    run, inputs, flags = made(case("triton.prefill", (20, 30, 10)), device)
    inputs.k[20:50], inputs.v[20:50] = NAN, NAN
    out = attend(run, inputs, flags)
    assert torch.isfinite(out[:20]).all()
    assert torch.isfinite(out[50:]).all()
    assert torch.isnan(out[20:50]).all()


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_large_logits_do_not_overflow(scale: float, device: torch.device) -> None:
    run, inputs, flags = made(case("triton.prefill", (40,)), device)
    out = attend(run, inputs, replace(flags, scale=scale))
    assert torch.isfinite(out).all()
    assert torch.equal(out[0], inputs.v[:1].expand(2, -1, -1)[:, 0])  # one key: its value exactly


def test_slices_of_one_tensor_are_read_by_their_strides(device: torch.device) -> None:
    run, inputs, flags = made(case("triton.prefill", (33,), heads=(2, 2)), device)
    q, k, v = torch.cat([inputs.q, inputs.k[:33], inputs.v[:33]], dim=1).split(2, dim=1)
    out = torch.full((33, 5, 64), NAN, dtype=q.dtype, device=device)
    run(q, k, v, inputs.batch, flags, out[:, 1:3])
    assert torch.equal(out[:, 1:3], attend(run, inputs, flags))
    assert torch.isnan(out[:, 0]).all()
    assert torch.isnan(out[:, 3:]).all()


def test_loose_host_bounds_change_nothing(device: torch.device) -> None:
    run, inputs, flags = made(case("triton.prefill", (33, 2)), device)
    loose = replace(inputs, batch=replace(inputs.batch, max_seqlen_q=300, max_context=999))
    assert torch.equal(attend(run, loose, flags), attend(run, inputs, flags))


def test_a_sequence_alone_gives_the_bits_it_gives_in_a_batch(device: torch.device) -> None:
    run, inputs, flags = made(case("triton.prefill", (33, 40)), device)
    batch = AttentionBatch(edges([40], device), 40, 40, cu_seqlens_k=edges([40], device))
    alone = replace(inputs, q=inputs.q[33:], k=inputs.k[33:], v=inputs.v[33:], batch=batch)
    assert torch.equal(attend(run, alone, flags), attend(run, inputs, flags)[33:])


def test_keys_beyond_2_to_the_31_elements_are_found(device: torch.device) -> None:
    """40 tokens, 2^26 elements apart: 5 GiB of addresses each, of which only the tokens' own pages are touched."""
    run, inputs, flags = made(case("triton.prefill", (40,)), device)
    stride = 2**26
    k, v = (torch.empty(40 * stride, dtype=FP16, device=device).as_strided((40, 1, 64), (stride, 64, 1)) for _ in "kv")
    k.copy_(inputs.k[:40])
    v.copy_(inputs.v[:40])
    assert torch.equal(attend(run, replace(inputs, k=k, v=v), flags), attend(run, inputs, flags))


def test_pages_behind_the_window_are_never_read(device: torch.device) -> None:
    run, inputs, flags = made(case("triton.extend", (4,), (100,), window=10), device)
    expected = attend(run, inputs, flags)
    table = inputs.batch.page_table
    assert table is not None
    # The first query, at 96, sees keys from 87: page 5 starts at 80.
    inputs.k[table[0, 5], :7], inputs.v[table[0, 5], :7] = NAN, NAN
    table[0, :5] = POISON_PAGE
    assert torch.equal(attend(run, inputs, flags), expected)


def test_pages_by_head_first_strides(device: torch.device) -> None:
    run, inputs, flags = made(case("triton.extend", (20,), (70,), heads=(4, 2)), device)
    k, v = (pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (inputs.k, inputs.v))
    assert torch.equal(attend(run, replace(inputs, k=k, v=v), flags), attend(run, inputs, flags))


@pytest.mark.parametrize(
    ("num_seqs", "heads", "max_context", "processors", "expected"),
    [
        *((num_seqs, 2, most, 132, num) for num_seqs, most, num in (
            (1, 20, 1), (1, 33, 2), (1, 100_000, 32), (4, 100_000, 32), (8, 100_000, 17), (1024, 100_000, 1))),
        (2, 1, 260, 4, 4),
        (2, 1, 500, 132, 16),
    ],
)  # fmt: skip
def test_splits_fill_the_processors_whatever_the_lengths(
    num_seqs: int, heads: int, max_context: int, processors: int, expected: int, device: torch.device
) -> None:
    for length in (1, 20):
        _, inputs, _ = made(case("triton.decode", (1,) * num_seqs, (length,) * num_seqs), device)
        batch = replace(inputs.batch, max_context=max_context)
        assert num_splits_for(batch, heads, Tiles(16, 32, 4, 1), processors=processors) == expected
