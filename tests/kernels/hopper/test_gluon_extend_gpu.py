"""`gluon.extend.hopper` on an sm_90 GPU: against the oracle's rule, and against `triton.extend`."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_inputs import (
    FIXED_SEEDS,
    NAN,
    POISON_PAGE,
    Inputs,
    assert_right,
    attend,
    errors_of,
    flags_for,
    fresh_seeds,
    paged,
)

from kernels.hopper.extend.launch import launches_of, run_extend, work_of
from kernels.hopper.extend.variants import extend_variant_of, longer
from kernels.portable.extend import run_extend as run_triton_extend
from kernels.processors import num_processors
from kernels.reference.compare import compare

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("_hopper")]

CUDA = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
QUERIES = [1, 63, 0, 130, 5, 64, 129, 300, 2, 33]
CONTEXTS = [300, 63, 17, 257, 128, 64, 1000, 2049, 4000, 0]


def ragged(dim: int, heads: tuple[int, int] = (8, 2), page_size: int = 64, dtype: torch.dtype = BF16) -> Inputs:
    return paged(QUERIES, CONTEXTS, CUDA, heads=heads, head_dim=dim, dtype=dtype, page_size=page_size)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [40, 64, 80, 96, 112, 128, 136, 192, 256])
def test_ragged_chunks_are_within_the_rule(dim: int, dtype: torch.dtype) -> None:
    inputs = ragged(dim, dtype=dtype)
    assert_right(run_extend, inputs, flags_for(inputs))


@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 1), (14, 2), (6, 1), (64, 1), (128, 1)])
def test_groups_of_any_size_are_within_the_rule(heads: tuple[int, int]) -> None:
    inputs = ragged(64, heads)
    assert_right(run_extend, inputs, flags_for(inputs))


@pytest.mark.parametrize("dim", [40, 80, 96, 112, 136, 160, 192])
def test_padded_head_dims_with_all_flags_are_within_the_rule(dim: int) -> None:
    inputs = ragged(dim)
    assert_right(run_extend, inputs, flags_for(inputs, "softcap", "sinks", "spans", window=200))


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 96, 128, 256])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_page_sizes_are_within_the_rule(dim: int, page_size: int) -> None:
    inputs = ragged(dim, page_size=page_size)
    assert_right(run_extend, inputs, flags_for(inputs))


def flag_cases() -> Iterator[tuple[str, tuple[str, ...], int | None]]:
    for window in (1, 15, 63, 64, 65, 127, 128, 129, 1000, 100_000):
        yield f"window {window}", (), window
    for name in ("softcap", "sinks", "spans"):
        yield name, (name,), None
    yield "window spans", ("spans",), 100
    yield "all", ("softcap", "sinks", "spans"), 200


@pytest.mark.parametrize(("names", "window"), [case[1:] for case in flag_cases()], ids=[c[0] for c in flag_cases()])
@pytest.mark.parametrize(("dim", "heads"), [(64, (8, 2)), (128, (8, 2)), (192, (8, 2)), (256, (8, 2)), (128, (6, 2))])
def test_flags_are_within_the_rule(
    dim: int, heads: tuple[int, int], names: tuple[str, ...], window: int | None
) -> None:
    inputs = ragged(dim, heads)
    assert_right(run_extend, inputs, flags_for(inputs, *names, window=window))


@pytest.mark.parametrize("names", [(), ("sinks",)], ids=str)
@pytest.mark.parametrize(("queries", "contexts"), [([16], [40_000]), ([100, 3], [9000, 70_000]), ([1], [131_072])])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 136, 192, 256])
def test_keys_in_parts_are_within_the_rule(
    dim: int, queries: list[int], contexts: list[int], names: tuple[str, ...]
) -> None:
    inputs = paged(queries, contexts, CUDA, heads=(8, 2), head_dim=dim, dtype=BF16, page_size=64)
    errors = errors_of(run_extend, inputs, flags_for(inputs, *names))
    assert errors.is_within_rule, errors


@pytest.mark.parametrize("names", [(), ("sinks",), ("softcap",)], ids=str)
@pytest.mark.parametrize(("tokens", "context", "page_size"), [(512, 3000, 64), (500, 700, 16), (1030, 1030, 128)])
@pytest.mark.parametrize("dim", [112, 128])
def test_whole_tiles_are_within_the_rule(
    dim: int, tokens: int, context: int, page_size: int, names: tuple[str, ...]
) -> None:
    inputs = paged([tokens], [context], CUDA, heads=(32, 8), head_dim=dim, dtype=BF16, page_size=page_size)
    flags = flags_for(inputs, *names)
    variant = extend_variant_of(dim, page_size, 4, flags)
    assert work_of(tokens, 32, 8, inputs.batch, variant, num_processors(CUDA)).max_parts == 0
    assert_right(run_extend, inputs, flags)


@pytest.mark.parametrize("names", [(), ("sinks",)], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (14, 2)])
def test_three_consumers_are_within_the_rule(heads: tuple[int, int], names: tuple[str, ...]) -> None:
    for inputs in (
        ragged(64, heads),
        paged([700], [30_000], CUDA, heads=heads, head_dim=64, dtype=BF16, page_size=64),
    ):
        flags = flags_for(inputs, *names)
        variant = longer(extend_variant_of(64, 64, heads[0] // heads[1], flags))
        out = torch.full_like(inputs.q, NAN)
        launches = launches_of(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out, variant=variant)
        assert launches.over((inputs.k.data_ptr(), inputs.v.data_ptr()), flags.sinks)
        errors = compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags)
        assert errors.is_within_rule, errors


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize(("tokens", "context"), [(300, 8000), (512, 70_000), (1280, 20_000)])
def test_gifts_agree_with_triton(tokens: int, context: int, dim: int) -> None:
    inputs = paged([tokens], [context], CUDA, heads=(32, 8), head_dim=dim, dtype=BF16, page_size=64)
    flags = flags_for(inputs)
    difference = (attend(run_extend, inputs, flags).float() - attend(run_triton_extend, inputs, flags).float()).abs()
    # An ulp of outputs up to 2**-3, as these means of thousands of values are. A lost gift would be ten times as much.
    assert difference.max() <= 2**-10, difference.max()


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_queries_before_the_first_key_give_zero(dim: int) -> None:
    inputs = paged([300, 5], [60, 0], CUDA, heads=(4, 1), head_dim=dim, dtype=BF16, page_size=64)
    out = attend(run_extend, inputs, flags_for(inputs))
    assert out[:240].abs().max() == 0, "rows before the first key"
    assert out[300:].abs().max() == 0, "a sequence without keys"
    assert errors_of(run_extend, inputs, flags_for(inputs)).is_within_rule


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_large_logits_are_within_the_rule(dim: int) -> None:
    inputs = ragged(dim)
    loud = replace(inputs, q=inputs.q * 15)
    assert errors_of(run_extend, loud, flags_for(loud)).is_within_rule


def test_pages_behind_the_window_are_never_read() -> None:
    inputs = paged([4, 64], [100, 1000], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=16)
    flags = flags_for(inputs, window=10)
    expected = attend(run_extend, inputs, flags)
    table = inputs.batch.page_table
    assert table is not None
    table[0, :5], table[1, :57] = POISON_PAGE, POISON_PAGE  # the first queries see keys from 87 and from 927 on
    assert torch.equal(attend(run_extend, inputs, flags), expected)


@pytest.mark.parametrize("layout", ["head first", "keys beside values"])
def test_pages_of_other_strides_give_the_same_bits(layout: str) -> None:
    inputs = ragged(128)
    flags = flags_for(inputs)
    if layout == "head first":
        k, v = (pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (inputs.k, inputs.v))
    else:
        k, v = torch.stack([inputs.k, inputs.v], 1).unbind(1)
    out = attend(run_extend, replace(inputs, k=k, v=v), flags)
    assert torch.equal(out, attend(run_extend, inputs, flags))


def test_pages_that_tma_cannot_address_are_still_right() -> None:
    inputs = ragged(64)
    wide = torch.empty(*inputs.k.shape[:3], 65, dtype=BF16, device=CUDA)  # rows of 130 bytes, not a multiple of 16
    wide[..., :64] = inputs.k
    assert_right(run_extend, replace(inputs, k=wide[..., :64]), flags_for(inputs))


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_ten_repeats_are_bit_equal(dim: int) -> None:
    rng = random.Random(0)
    queries = [rng.randrange(1, 900) for _ in range(12)]
    contexts = [queries[i] + rng.randrange(20_000) for i in range(12)]
    inputs = paged(queries, contexts, CUDA, heads=(16, 4), head_dim=dim, dtype=BF16, page_size=64)
    flags = flags_for(inputs)
    first = attend(run_extend, inputs, flags)
    assert first.isfinite().all()
    for _ in range(9):
        assert torch.equal(first, attend(run_extend, inputs, flags))


def test_a_sequence_of_nan_reaches_no_other() -> None:
    inputs = paged([90, 65, 30], [5000, 400, 3000], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)
    flags = flags_for(inputs)
    clean = attend(run_extend, inputs, flags)
    table = inputs.batch.page_table
    assert table is not None
    inputs.k[table[1, :7]], inputs.v[table[1, :7]] = NAN, NAN
    dirty = attend(run_extend, inputs, flags)
    others = torch.tensor([*range(90), *range(155, 185)], device=CUDA)
    assert torch.equal(clean[others], dirty[others])


def test_a_cuda_graph_follows_the_lengths() -> None:
    inputs = paged([64, 64], [5000, 100], CUDA, heads=(8, 2), head_dim=128, dtype=BF16, page_size=64)
    flags = flags_for(inputs)
    lens = inputs.batch.context_lens
    assert lens is not None
    out = attend(run_extend, inputs, flags)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_extend(inputs.q, inputs.k, inputs.v, inputs.batch, flags, out)
    for lengths in ([5000, 100], [100, 64], [4000, 90]):
        lens.copy_(torch.tensor(lengths, dtype=torch.int32, device=CUDA))
        out.fill_(NAN)
        graph.replay()
        assert compare(out, inputs.q, inputs.k, inputs.v, inputs.batch, flags).is_within_rule


def check_against_triton(seed: int) -> None:
    """Compare both kernels on a random batch."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dim, kv_heads = rng.choice([64, 128, 192, 256]), rng.choice([1, 2, 4])
    queries = [rng.choice([0, 1, rng.randrange(1, 200), rng.randrange(1, 1500)]) for _ in range(rng.randrange(1, 20))]
    queries[0] = max(1, queries[0])
    contexts = [max(1, length + rng.choice([0, 1, 129, 1000, rng.randrange(20_000), -3])) for length in queries]
    given = rng.choice(["", "", "window", "sinks", "softcap", "spans"])  # few: each is compiled
    heads = (kv_heads * 4, kv_heads)
    inputs = paged(queries, contexts, CUDA, heads=heads, head_dim=dim, dtype=BF16, page_size=64)
    names = [given] if given in ("sinks", "softcap", "spans") else []
    flags = flags_for(inputs, *names, window=rng.randrange(1, 1500) if given == "window" else None)
    difference = (attend(run_extend, inputs, flags).float() - attend(run_triton_extend, inputs, flags).float()).abs()
    # Two roundings of outputs up to 4 units large (an ulp of 2 ** -6 there), and of the weights before.
    assert difference.max() <= 2**-5, difference.max()


@pytest.mark.parametrize("seed", FIXED_SEEDS)
def test_gluon_agrees_with_triton_on_random_ragged_batches(seed: int) -> None:
    check_against_triton(seed)


def test_gluon_agrees_with_triton_on_fresh_seeds() -> None:
    for seed in fresh_seeds():
        check_against_triton(seed)
