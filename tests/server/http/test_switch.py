"""The operator's switch, over HTTP."""

from pathlib import Path

import httpx2
import pytest

from support.api.edge_fakes import READY, Served, served

SHAPES = [row.shape for row in READY.plan]


def lift(it: Served, body: object) -> httpx2.Response:
    return it.request("DELETE", "/attention/quarantine", json=body)


def test_a_path_is_taken_out_for_all_shapes_of_the_plan(folder: Path) -> None:
    it = served(folder)
    answer = it.post("/attention/quarantine", {"path": "sdpa.cpu"})
    wanted = [{"path": "sdpa.cpu", "shape": shape} for shape in SHAPES]
    assert (answer.status_code, answer.json()["overridden"]) == (200, wanted)
    assert it.get("/attention").json()["overridden"] == wanted


def test_a_path_is_taken_out_for_one_shape_and_lifted_again(folder: Path) -> None:
    it = served(folder)
    order = {"path": "sdpa.cpu", "shape": SHAPES[0]}
    assert it.post("/attention/quarantine", order).json()["overridden"] == [order]
    assert lift(it, {"path": "sdpa.cpu"}).json()["overridden"] == []


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"path": "sdpa.gpu"}, 404, "known are: sdpa.cpu, sdpa.math, triton.prefill"),
        ({"path": "sdpa.cpu", "shape": "prefill"}, 404, f"GET /plan has its {len(SHAPES)} shapes."),
        ({"path": "sdpa.cpu", "shape": SHAPES[1][:-1]}, 404, f"did you mean {SHAPES[1]!r}?"),
        ({"path": 7}, 400, "path must be"),
        ({}, 400, "path must be"),
        ({"path": "sdpa.cpu", "shape": 7}, 400, "shape must be"),
        ({"path": "sdpa.cpu", "shapes": []}, 400, "'shapes'"),
    ],
)
def test_an_order_that_names_nothing_is_refused(folder: Path, body: dict[str, object], status: int, word: str) -> None:
    it = served(folder)
    for answer in (it.post("/attention/quarantine", body), lift(it, body)):
        assert answer.status_code == status
        assert word in answer.json()["error"]["message"]
    assert it.engine.quarantine.by_operator == []


def test_an_order_that_leaves_no_path_is_a_conflict(folder: Path) -> None:
    it = served(folder)
    it.engine.stranded = [*reversed(SHAPES)]
    answer = it.post("/attention/quarantine", {"path": "sdpa.cpu"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    assert f"{min(SHAPES)} and {len(SHAPES) - 1} more shapes" in answer.json()["error"]["message"]


def test_an_order_is_counted_and_a_wrong_method_refused(folder: Path) -> None:
    it = served(folder)
    it.post("/attention/quarantine", {"path": "sdpa.cpu"})
    assert it.value("requests_total", route="/attention/quarantine", outcome="ok") == 1
    assert it.get("/attention/quarantine").headers["allow"] == "DELETE, POST"
