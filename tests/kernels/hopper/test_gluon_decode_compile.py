"""`gluon.decode.hopper` without a GPU: the machine code for sm_90, and what a call launches."""

from pathlib import Path
from typing import Any

import pytest
from compile_outside import run_outside

from kernels.batch import AttentionFlags
from kernels.hopper.decode.variants import variant_of

pytestmark = pytest.mark.sm90

HERE = Path(__file__).parent
SHARED_BYTES_OF_A_PROCESSOR = 228 * 1024
MOST_SHARED_BYTES = 232_448  # of one program
RESERVED_BYTES = 1024  # that the hardware adds to every program
PLAIN = AttentionFlags(0.1)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, dict[str, Any]]]:
    return dict(run_outside(HERE / "gluon_decode_compile.py"))


@pytest.fixture
def code(compiled: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of split and combine, for many sequences."""
    return compiled["split"]


@pytest.fixture
def cluster(compiled: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of one sequence."""
    return compiled["cluster"]


@pytest.fixture(scope="module")
def calls() -> dict[str, Any]:
    return dict(run_outside(HERE / "gluon_decode_calls.py"))


def test_no_kernel_spills_registers(code: dict[str, dict[str, Any]]) -> None:
    assert {name: case["spills"] for name, case in code.items() if any(case["spills"])} == {}


def test_registers_and_shared_memory_suffice_a_cluster(cluster: dict[str, dict[str, Any]]) -> None:
    for name, case in cluster.items():
        assert case["spills"] == 0, name
        assert case["shared_bytes"] <= MOST_SHARED_BYTES, name


def test_programs_of_a_processor_fit_its_shared_memory(code: dict[str, dict[str, Any]]) -> None:
    for name, case in code.items():
        taken = case["per_processor"] * (case["shared_bytes"] + RESERVED_BYTES)
        waiting = case["per_processor"] * case["heads"]  # programs of the second launch
        beside = waiting * (case["combine_shared_bytes"] + RESERVED_BYTES)
        assert taken + beside <= SHARED_BYTES_OF_A_PROCESSOR, name


def test_keys_come_by_tma_and_reach_the_tensor_cores_as_matrices(
    code: dict[str, dict[str, Any]], cluster: dict[str, dict[str, Any]]
) -> None:
    assert all(case["tma_loads"] > 0 for case in code.values())
    assert all(case["vectors_sent"] > 0 for case in cluster.values()), "sums are sent by four"
    for name, case in (*code.items(), *cluster.items()):
        assert case["mma"] > 0, name
        assert case["matrix_loads"] >= case["mma"] / 2, f"{name}: shared memory is read word by word"


def test_launches_read_lengths_before_the_wait_and_copy_after(code: dict[str, dict[str, Any]]) -> None:
    for name, case in code.items():
        lengths, wait, copy, next_launch = case["places"][0]
        assert 0 < lengths < wait < copy < next_launch, name
        next_launch, lengths, wait = (case["places"][1][i] for i in (3, 0, 1))
        assert 0 < next_launch < lengths < wait, name


def test_a_cluster_reads_lengths_first_and_exchanges_parts_last(cluster: dict[str, dict[str, Any]]) -> None:
    for name, case in cluster.items():
        assert case["places"][0] > 0, name
        assert case["places"] == sorted(case["places"]), name


def test_a_call_is_two_launches_and_both_may_start_early(calls: dict[str, Any]) -> None:
    for name in ("short", "long", "wide"):
        assert [launch["name"] for launch in calls[name]] == ["hallmark_gluon_decode", "hallmark_gluon_decode_combine"]
        assert [launch["is_dependent"] for launch in calls[name]] == [True, True]


def test_a_launch_passes_as_many_arguments_as_its_kernel_has(calls: dict[str, Any]) -> None:
    for name in ("short", "long", "wide"):
        assert [launch["given"] for launch in calls[name]] == [launch["taken"] for launch in calls[name]]


def test_launches_depend_on_shapes_and_not_on_lengths(calls: dict[str, Any]) -> None:
    assert calls["short"] == calls["long"]


def test_the_first_grid_is_the_same_for_every_batch(calls: dict[str, Any]) -> None:
    assert calls["wide"][0]["grid"] == calls["short"][0]["grid"]


def test_all_kernels_are_compiled_by_the_first_call(calls: dict[str, Any]) -> None:
    after_the_first, after_all = calls["compiled"]
    assert after_the_first == after_all == 2


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


def test_layers_with_plans_repeat_launches_over_their_pages(calls: dict[str, Any]) -> None:
    alone_too, outputs, scratch = 2, 2, 1
    assert calls["by_layers"] == {"launches": 6 * 2 * alone_too, "wrong": [], "kept": outputs + scratch}


def test_layers_that_repeat_nothing_share_scratch_memory(calls: dict[str, Any]) -> None:
    assert calls["scratch"] == {"launches": 5 * 2, "scratch": 1}


def test_a_page_table_without_a_column_is_read_by_no_launch(calls: dict[str, Any]) -> None:
    assert calls["no_columns"] == {"names": [], "is_zero": True}


def test_without_room_for_clusters_rows_are_split_by_tiles(calls: dict[str, Any]) -> None:
    """Whether the driver says so by a number, of 8 programs here, or by an error."""
    for whole, part in zip(calls["whole"], calls["slice"], strict=True):
        assert whole["names"] == ["hallmark_gluon_decode_cluster"]
        assert part["names"] == ["hallmark_gluon_decode", "hallmark_gluon_decode_combine"]


def test_one_sequence_is_one_launch_in_clusters(calls: dict[str, Any]) -> None:
    of_one = calls["of_one"]
    assert (of_one["wrong"], of_one["kept"], len(of_one["launches"])) == ([], 1, 4 * 2)
    for launch in of_one["launches"]:
        assert (launch["name"], launch["is_dependent"]) == ("hallmark_gluon_decode_cluster", True)
        assert (launch["grid"], launch["cluster"]) == ([4, 1, 1], 16)  # clusters, one a KV head, and their programs
        assert launch["given"] == launch["taken"]
        assert launch["numbers"][-5:-2] == [8 * 64, 64, 16]  # strides of the output, and the page table's width
