"""The machine code of `gluon.extend.hopper`, compiled for sm_90 without a GPU."""

from pathlib import Path
from typing import Any

import pytest
from compile_outside import run_outside
from gluon_findings import excess_spills, found

from kernels.portable.launch_config import SHARED_BYTES_HOPPER

pytestmark = pytest.mark.sm90

HERE = Path(__file__).parent
# Of once a tile: the producer has 32 registers, too few for eight pages a block; each of three consumers has 160.
SPILLS_ALLOWED = {"d96 page 16 group 7": 8, "d64 long": 4, "d128 whole": 2}
# ptxas moves the exponentials behind P V, and yet it is 7-9 % faster than what has them beside it (H200).
SUNK = {"d128 page 64"}

CUT = {"d80", "d96 whole", "d192 page 64", "d192 page 16 group 7"}  # head dims of two parts, the second one narrow


@pytest.fixture(scope="module")
def code() -> dict[str, dict[str, Any]]:
    """What the compiled variants show, by case; compiled outside the interpreter."""
    return dict(run_outside(HERE / "gluon_extend_compile.py"))


def test_no_variant_spills_registers(code: dict[str, dict[str, Any]]) -> None:
    assert excess_spills(code, SPILLS_ALLOWED) == {}


def test_every_variant_fits_the_shared_memory_of_one_program(code: dict[str, dict[str, Any]]) -> None:
    assert max(case["shared_bytes"] for case in code.values()) <= SHARED_BYTES_HOPPER


def test_every_variant_uses_tma_and_batched_wgmma(code: dict[str, dict[str, Any]]) -> None:
    for name, case in code.items():
        assert case["tma_loads"] > 0, name
        # Of one step, between two fences; 1 where they are serialised. At 136 the second part is one of 16 columns.
        least = 3 if "d136" in name else 4 if name in CUT else 5
        assert case["wgmma"] >= least * case["wgmma_fences"], f"{name}: ptxas serialised wgmma"


def test_a_page_of_16_keys_is_a_copy_of_its_own(code: dict[str, dict[str, Any]]) -> None:
    # Queries: 2 consumers x 2 halves of 128 dims; keys and values: 8 pages of 16 a block, in 2 halves.
    assert code["d96 page 16 group 7"]["tma_loads"] == 4 + 2 * 8 * 2
    # 2 consumers x 3 parts of 64 dims; 4 pages a block, in 3 parts.
    assert code["d192 page 16 group 7"]["tma_loads"] == 6 + 2 * 4 * 3


def test_the_exponentials_of_every_steady_step_run_beside_wgmma(code: dict[str, dict[str, Any]]) -> None:
    for name in code.keys() - SUNK:
        case = code[name]
        step = 32 if name[:4] in ("d136", "d192", "d256") else 64  # of one thread: block_n / 4 columns of 2 rows
        steady = [count for count in case["overlapped"] if count >= step - 4]  # four at most before the first issue
        assert len(steady) >= 2, f"{name}: {case['overlapped']} of {step} overlap"  # at least one loop a consumer


def test_no_register_of_a_wgmma_in_flight_is_touched(code: dict[str, dict[str, Any]]) -> None:
    assert found(code, "hazards") == {}


def test_no_role_arrives_before_all_its_threads_are_done(code: dict[str, dict[str, Any]]) -> None:
    """What racecheck, which sees no order that needs no instruction, cannot say of the ring of posted tiles."""
    assert min(case["arrivals"] for case in code.values()) >= 10  # tiles and their wish, queries, often keys and values
    assert found(code, "early_arrivals") == {}


def test_nothing_is_given_back_while_a_product_may_still_read_it(code: dict[str, dict[str, Any]]) -> None:
    assert found(code, "arrivals_in_flight") == {}


def test_the_ring_is_accessed_between_wait_and_arrival_only(code: dict[str, dict[str, Any]]) -> None:
    """In PTX and in machine code: ptxas may give a read of the ring another line, and must not sink it any further."""
    assert found(code, "strays") == {}
