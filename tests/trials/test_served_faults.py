"""Faults switched on in an engine that serves: a few of each kind of check, and a right engine."""

from dataclasses import replace
from pathlib import Path

import pytest
from planted_in_service import FAULTS
from served_faults.order_faults import ORDER_FAULTS, num_caught
from served_faults.plant import Fault, Kind, Model, Plant
from served_faults.served import Served

RIGHT = Fault("none", Kind.BATCH, Plant)
# By what sees it: a shadow check, a replay by the definition of sampling, the canary's mix.
SEEN = {
    "row 2 of decode batches is row 1's": "shadow",
    "seeds ignored": "replay",
    "position 37 rotated as 38": "canary",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(Model.LLAMA, tmp_path_factory.mktemp("served"))


@pytest.mark.parametrize("name", SEEN)
def test_a_fault_in_a_running_engine_is_seen(name: str, served: Served) -> None:
    [fault] = [it for it in FAULTS if it.name == name]
    seen = served.look(replace(fault, most_answers=8))
    assert getattr(seen, SEEN[name]) is not None


def test_nothing_is_seen_of_a_right_engine(served: Served) -> None:
    seen = served.look(replace(RIGHT, most_answers=8))
    assert not seen.is_caught
    assert min(seen.checks.values()) > 0


def test_right_kernels_of_another_order_change_every_answer(tmp_path: Path) -> None:
    served = Served(Model.LLAMA, tmp_path, reproducible=True)
    found = {name: num_caught(served, plant, 2)[0] for name, plant in ORDER_FAULTS.items()}
    assert found == {"none": 0, "products summed in two halves": 2, "attention by another right path": 2}
