"""The kernels of `gluon.decode.hopper`, run in numpy over poisoned pages, and the choice of their variant."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.calls.batch import AttentionFlags
from kernels.hopper.decode.stream import SEQS
from kernels.hopper.decode.variants import DecodeVariant, variant_of
from support.attention.cases import Case, batch_of
from support.attention.inputs import Inputs, assert_right, flags_for
from support.emulator.cluster_by_numpy import run_clusters
from support.emulator.gluon_by_numpy import numpy_runner

CPU = torch.device("cpu")
PLAIN = AttentionFlags(0.1)
# No key, no query, tile and page edges, and one context much longer than the others.
RAGGED = (1, 1, 1, 1, 1, 1, 1, 0, 1, 1), (1, 15, 16, 17, 33, 0, 65, 64, 300, 2)
Options = dict[str, int]  # programs of the first launch, parts that one of the second combines at once, heads a row


def case(queries: tuple[int, ...], contexts: tuple[int, ...], **fields: object) -> Case:
    sizes = {"dim": 64, "heads": (4, 2), "dtype": torch.float32, "page_size": 32} | fields
    return Case("gluon.decode", queries, contexts, **sizes)  # type: ignore[arg-type]


def cases() -> Iterator[tuple[Case, Options]]:
    for programs in (1, 7, 61):
        yield case(*RAGGED), {"programs": programs}
    for parts in (1, 16, 64):  # of the longest context there are from 2 parts, which registers hold, to some 25
        yield case(*RAGGED, heads=(6, 2)), {"programs": 23, "parts": parts}
    yield case(*RAGGED, heads=(8, 4)), {"programs": 9, "heads": 2}  # neighbouring heads together
    for window in (1, 17, 301):
        yield case(*RAGGED, window=window), {"programs": 5}
    yield case(*RAGGED, flags=("softcap", "sinks"), window=40), {"programs": 11}
    for heads in ((34, 1), (66, 2)):  # a group too large for one row
        yield case(*RAGGED, heads=heads, flags=("sinks",), variant="parts 2"), {"programs": 13}
    for most in (2, 3, 8):
        few = (most, 0, 1, most - 1, 2), (most, 5, 70, 90, 1)
        yield case(*few, heads=(8, 2)), {"programs": 6}
        yield case(*few, heads=(8, 2), flags=("sinks",), window=20), {"programs": 6}
    # A part of a row's columns holds no query.
    in_chunks = {"dim": 136, "flags": ("softcap",), "window": 50, "variant": "chunks 3"}
    yield case((3, 0, 1), (70, 5, 130), heads=(6, 2), **in_chunks), {"programs": 5}
    for dim, chunks in ((40, 1), (192, 3), (200, 4)):  # padded
        yield case(*RAGGED, dim=dim, flags=("sinks",), variant=f"chunks {chunks}"), {"programs": 4}
    for num in (32, 33, 64, 65):  # each way to look at sequences
        contexts = tuple(1 + 13 * n % 50 for n in range(num))
        yield case((1,) * num, contexts, heads=(1, 1), page_size=16), {"programs": 19}
    draw, num = random.Random(3), 2 * SEQS.value + 40  # more than are looked at together
    contexts = tuple(draw.choice([0, 1, 5, 40]) for _ in range(num))
    queries = tuple(draw.choice([0, 1, 1]) for _ in range(num))
    yield case(queries, contexts, heads=(1, 1), page_size=16), {"programs": 37}
    draw = random.Random(11)
    for _ in range(3):
        contexts = tuple(int(2 ** draw.uniform(0, 8)) for _ in range(draw.randint(1, 9)))
        drawn = case((1,) * len(contexts), contexts, page_size=16, window=draw.choice([None, 30]))
        yield drawn, {"programs": draw.randint(1, 40)}


def small(inputs: Inputs, flags: AttentionFlags) -> DecodeVariant:
    """A variant of few keys a tile, so that short contexts have many."""
    batch, heads = inputs.batch, (inputs.q.shape[1], inputs.k.shape[2])
    sizes = (inputs.q.shape[2], inputs.k.shape[1], heads, max(1, batch.max_seqlen_q), batch.num_seqs, batch.max_context)
    return replace(variant_of(*sizes, flags), heads=1, block_n=16, stages=2)


@pytest.mark.parametrize(("case", "options"), list(cases()), ids=str)
def test_batches_are_within_the_rule(case: Case, options: Options) -> None:
    inputs = batch_of(case, CPU)
    flags = flags_for(inputs, *case.flags, window=case.window)
    variant = small(inputs, flags)
    expected = {"": True, "parts 2": variant.parts > 1}
    assert expected.get(case.variant, case.variant == f"chunks {variant.chunks}")
    variant = replace(variant, heads=options.get("heads", 1))
    assert_right(numpy_runner(variant, options["programs"], options.get("parts", 16)), inputs, flags)


def one(context: int, **fields: object) -> Case:
    return case((1,), (context,), **({"heads": (8, 4), "page_size": 16} | fields))


@pytest.mark.parametrize(
    ("case", "cluster"),
    [
        *((one(context), 4) for context in (1, 16, 17, 33, 128, 129, 400)),  # boxes, tiles and turns
        *((one(150, page_size=page_size), 4) for page_size in (32, 48, 128)),
        *((one(70, flags=("softcap", "sinks")), cluster) for cluster in (8, 16)),  # programs without a tile
        (replace(one(90, heads=(16, 4), flags=("sinks",)), queries=(2,)), 4),
        (one(40, variant="no key"), 4),
    ],
    ids=str,
)
def test_clusters_are_within_the_rule(case: Case, cluster: int) -> None:
    inputs = batch_of(case, CPU)
    flags, batch = flags_for(inputs, *case.flags), inputs.batch
    variant = variant_of(64, case.page_size, case.heads, batch.max_seqlen_q, 1, batch.max_context, flags)
    assert variant.cluster > 1
    few = replace(variant, cluster=cluster, block_n=32, key_groups=2, stages=2)  # several turns of the ring
    if case.variant:
        inputs = replace(inputs, batch=replace(batch, context_lens=torch.zeros(1, dtype=torch.int32)))
    assert_right(lambda *arguments: run_clusters(*arguments, few), inputs, flags)


@pytest.mark.parametrize(
    ("heads", "num_seqs", "queries", "context", "window"),
    [
        ((32, 8), 2, 1, 2048, None), ((32, 8), 1, 8, 2048, None), ((32, 8), 1, 1, 2049, None),
        ((32, 8), 1, 1, 2048, 100), ((32, 16), 1, 1, 2048, None), ((8, 2), 1, 1, 2048, None),
    ],
)  # fmt: skip
def test_other_calls_are_shared_by_tiles(
    heads: tuple[int, int], num_seqs: int, queries: int, context: int, window: int | None
) -> None:
    flags = AttentionFlags(0.1, window=window)
    assert variant_of(128, 64, heads, queries, num_seqs, context, flags).cluster == 1
    assert variant_of(128, 64, (32, 8), 1, 1, 2048, PLAIN).cluster == 8


@pytest.mark.parametrize(
    ("heads", "queries", "columns", "parts"),
    [((32, 8), 1, 8, 1), ((7, 1), 1, 8, 1), ((16, 1), 1, 16, 1), ((64, 1), 1, 32, 2), ((32, 8), 3, 16, 1),
     ((32, 8), 8, 32, 1), ((64, 8), 8, 32, 2)],
)  # fmt: skip
def test_queries_of_a_group_take_as_few_rows_as_possible(
    heads: tuple[int, int], queries: int, columns: int, parts: int
) -> None:
    variant = variant_of(128, 64, heads, queries, 8, 4096, PLAIN)
    assert (variant.columns, variant.parts) == (columns, parts)


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128])
def test_a_tile_never_crosses_the_border_of_a_page(page_size: int) -> None:
    assert page_size % variant_of(128, page_size, (32, 8), 1, 8, 4096, PLAIN).block_n == 0


@pytest.mark.parametrize(
    ("head_dim", "page_size", "queries"), [(320, 64, 1), (100, 64, 1), (128, 24, 1), (128, 64, 17)]
)
def test_what_no_variant_takes_is_refused(head_dim: int, page_size: int, queries: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        variant_of(head_dim, page_size, (32, 8), queries, 8, 4096, PLAIN)
