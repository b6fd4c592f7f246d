"""The machine code of `gluon.prefill.window.hopper`, compiled for sm_90 without a GPU."""

from pathlib import Path
from typing import Any

import pytest
from compile_outside import run_outside
from gluon_findings import excess_spills, found

from kernels.portable.launch_config import SHARED_BYTES_HOPPER

pytestmark = pytest.mark.sm90

ALLOWED = 4  # words: addresses, none of them in a part's code


@pytest.fixture(scope="module")
def code() -> dict[str, dict[str, Any]]:
    """What the compiled variants show, by case; compiled outside the interpreter."""
    return dict(run_outside(Path(__file__).with_name("window_compile.py")))


def test_it_fits_a_multiprocessor_and_batches_its_products(code: dict[str, dict[str, Any]]) -> None:
    assert excess_spills(code, dict.fromkeys(code, ALLOWED)) == {}
    for name, case in code.items():
        assert case["shared_bytes"] <= SHARED_BYTES_HOPPER, name
        assert case["tma_loads"] > 0, name
        assert case["wgmma"] >= 4 * case["wgmma_fences"], f"{name}: ptxas serialised wgmma"


def test_no_barrier_lies_where_tma_writes(code: dict[str, dict[str, Any]]) -> None:
    for name, case in code.items():
        assert len(case["barriers"]) > 10, name
        assert min(case["barriers"]) >= case["copied_bytes"], name
        assert len(set(case["barriers"])) == len(case["barriers"]), name


def test_nothing_is_given_back_or_touched_too_early(code: dict[str, dict[str, Any]]) -> None:
    assert min(case["arrivals"] for case in code.values()) >= 10
    for what in ("hazards", "early_arrivals", "arrivals_in_flight", "strays"):
        assert found(code, what) == {}, what
