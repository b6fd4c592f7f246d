"""The host's part of a call of the paths for Hopper: the kernels that it finds, and the arguments that it passes."""

from functools import cache
from typing import Any

import pytest

from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.sm90

SPLIT, COMBINE, CLUSTER = "hallmark_gluon_decode", "hallmark_gluon_decode_combine", "hallmark_gluon_decode_cluster"


@cache
def seen(phase: str) -> dict[str, Any]:
    return dict(run_outside("hopper_launches.py", phase))


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("prefill", [2] * 3),
        # Of two and of three consumers; the splitting program in three sizes.
        ("extend", [2 * (1 + 3 + 1 + 1)] * 3),
        ("decode", [2] * 2),
    ],
)
def test_the_first_call_compiles_what_tritons_binder_finds(phase: str, expected: list[int]) -> None:
    """Call after the first call, after the binder's of the small kernels, and after other calls."""
    assert seen(phase)["compiled"] == expected


@pytest.mark.parametrize("phase", ["prefill", "extend", "decode", "ordered"])
def test_a_launch_passes_as_many_arguments_as_its_kernel_has(phase: str) -> None:
    found = seen(phase)
    launches = [launch for name in ("short", "long", "wide", "one") for launch in found.get(name, [])]
    counts = found.get("arguments", [[launch["taken"], launch["given"]] for launch in launches])
    assert len(counts) >= 2
    assert all(taken == given for taken, given in counts)


def test_arguments_stand_where_the_kernels_look_for_them() -> None:
    for phase in ("prefill", "extend"):
        assert seen(phase)["maps"] == [True, True, True]
    prefill, extend = seen("prefill"), seen("extend")
    assert prefill["plan_tensors"]
    assert prefill["out"]
    assert prefill["strides"] == [8 * 128, 128]
    assert prefill["heads"] == [8, 4, 8], "query heads, those of a KV head, those of an L2 group"
    assert extend["table"]
    assert extend["rows_of_a_page"] == [128, 128], "keys lie beside values: a page is two pages from the next"
    assert extend["heads"] == [2, 1, 2], "heads of tiles, those of a KV head, those of an L2 group"


@pytest.mark.parametrize(
    ("phase", "layers", "launches", "kept"),
    [
        ("prefill", "by_layers", 12 + 2, 2 + 2 * 2),  # a plan for each window, of two outputs
        ("extend", "by_layers", 6 * 2 + 1, 1 + 2),  # one plan, two outputs
        ("decode", "by_layers", 6 * 2, 2 + 1),  # two outputs, scratch memory
        ("decode", "apart", 5 * 2, 5 + 1),
        ("decode", "of_one", 4, 1),
        ("ordered", "by_layers", 6 + 2, 1 + 2),  # one plan of two launches, two outputs
        ("ordered", "of_prompts", 6 + 1, 1 + 2),
    ],
)
def test_layers_with_plans_repeat_launches_over_their_pages(phase: str, layers: str, launches: int, kept: int) -> None:
    found = seen(phase)[layers]
    assert (found["launches"], found["wrong"], found["kept"]) == (launches, [], kept)


def test_a_call_of_a_library_plan_repeats_launches() -> None:
    """The list of work and the attention, then the attention alone; both in a call without a plan."""
    assert (seen("prefill")["of_plan"], seen("prefill")["alone"]) == ([2, 1, 1], 2)


def test_parts_in_a_fixed_order_are_folded_where_they_were_split() -> None:
    """Chunks by a kernel of its own, tokens by the last one that stores a part; what is no part is stored at once."""
    plan, split, attention = "hallmark_gluon_extend_plan", "hallmark_gluon_ordered_split", "hallmark_gluon_ordered"
    chunks, tokens, short, prompt = seen("ordered")["names"]
    assert tokens == [plan, split, attention]
    assert chunks == [*tokens, "hallmark_gluon_ordered_combine"]
    assert (short, prompt) == ([plan, attention], ["hallmark_gluon_plan", attention])


def test_layers_that_repeat_nothing_share_scratch_memory() -> None:
    assert seen("decode")["apart"]["scratch"] == 1


def test_few_sequences_are_planned_and_split_by_one_launch() -> None:
    """Compare with many sequences, and with a short context, which is planned and attended only."""
    assert seen("extend")["launches"] == [3, 4, 2]


def test_decode_is_two_launches_that_may_start_early() -> None:
    for name in ("short", "long", "wide"):
        launches = seen("decode")[name]
        assert [(launch["name"], launch["is_dependent"]) for launch in launches] == [(SPLIT, True), (COMBINE, True)]


def test_launches_depend_on_shapes_and_not_on_lengths() -> None:
    calls = seen("decode")
    assert calls["short"] == calls["long"]
    assert calls["wide"][0]["grid"] == calls["short"][0]["grid"], "the first grid is the same for every batch"


def test_a_page_table_without_a_column_is_read_by_no_launch() -> None:
    assert seen("decode")["no_columns"] == {"names": [], "is_zero": True}


def test_without_room_for_clusters_rows_are_split_by_tiles() -> None:
    """The driver says so by a number, of 8 programs here, or by an error."""
    for whole, part in zip(seen("decode")["whole"], seen("decode")["slice"], strict=True):
        assert whole["names"] == [CLUSTER]
        assert part["names"] == [SPLIT, COMBINE]


def test_one_sequence_is_one_launch_in_clusters() -> None:
    [launch] = seen("decode")["one"]
    assert (launch["name"], launch["is_dependent"]) == (CLUSTER, True)
    assert (launch["grid"], launch["cluster"]) == ([4, 1, 1], 16)  # clusters, one a KV head, and their programs
    assert launch["numbers"][-5:-2] == [8 * 64, 64, 16]  # strides of the output, and the page table's width
