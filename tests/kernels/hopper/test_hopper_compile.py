"""The machine code of the attention kernels for Hopper, compiled for sm_90 without a GPU, and its scanners."""

from functools import cache
from typing import Any

import pytest

from kernels.portable.launch_config import SHARED_BYTES_HOPPER
from support.compiled.compile_outside import run_outside
from support.compiled.gluon_ptx import arrivals_in_flight, early_arrivals
from support.compiled.gluon_ring import strays
from support.compiled.gluon_sass import barrier_offsets, hazards, overlapped_exponentials

pytestmark = pytest.mark.sm90

SHARED_BYTES_OF_A_PROCESSOR = 228 * 1024
RESERVED_BYTES = 1024  # that the hardware adds to every program
# A few words at a tile's end, none in a step: at 128 two blocks of scores leave no register, and the producer of extend
# has 32 registers, too few for eight pages a block; each of three consumers has 160. Nothing else may spill.
SPILLS_ALLOWED = {
    "prefill": {"d128": 8, "d96 fp16": 8, "d128 spans": 8, "d256 window spans": 8},
    "full": {"d128": 4},
    "window": dict.fromkeys(("d64 sinks", "d64 fp16", "d64 narrow", "d128 sinks"), 4),
    "extend": {"d96 page 16 group 7": 8, "d64 long": 4, "d128 whole": 2},
    "wide": {"page 16 group 6": 8},
    "wide decode": dict.fromkeys(("two heads", "one head", "few", "8 queries"), 8),  # mostly where parts are combined
    "ordered": {"d64 few": 32, "d128 prompts": 8, "d128 page 64": 12},  # where parts and tiles end
}
# Variants where ptxas moves the exponentials behind P V, and which yet are faster than what has them beside it (H200).
SUNK = {"prefill": {"d256 window softcap"}, "extend": {"d128 page 64"}}
POLYNOMIALS = {"d64 long softcap"}  # compute a quarter of the weights
# wgmma of one step, between two fences; 1 where they are serialised. In two parts the second one is narrow, at 136 of
# 16 columns.
LEAST_WGMMA = {
    "prefill": dict.fromkeys(("d80", "d96 fp16", "d192", "d192 offset window spans"), 4),
    "full": {"d72": 4, "d80": 4},
    "window": dict.fromkeys(("d64 sinks", "d64 fp16", "d64 narrow", "d128 sinks"), 4),
    "extend": dict.fromkeys(("d80", "d96 whole", "d192 page 64", "d192 page 16 group 7"), 4) | {"d136 page 64": 3},
}
ROLES = pytest.mark.parametrize(
    "kind", ["prefill", "full", "window", "extend", "wide", "ordered"]
)  # kernels of specialised warps
TOKENS = pytest.mark.parametrize("kind", ["decode", "wide decode", "clusters"])


@cache
def code(kind: str) -> dict[str, dict[str, Any]]:
    """Facts of the compiled variants, by case; compiled outside the interpreter."""
    found = dict(run_outside("hopper_compile.py", kind))
    assert found, f"no variant of {kind} was compiled"
    return found


@pytest.mark.parametrize(
    "kind", ["prefill", "full", "window", "extend", "wide", "ordered", "decode", "wide decode", "clusters"]
)
def test_no_variant_spills_registers(kind: str) -> None:
    allowed = SPILLS_ALLOWED.get(kind, {})
    assert {name: case["spills"] for name, case in code(kind).items() if case["spills"] > allowed.get(name, 0)} == {}


@pytest.mark.parametrize("kind", ["prefill", "full", "window", "extend", "wide", "ordered", "wide decode", "clusters"])
def test_every_variant_fits_the_shared_memory_of_one_program(kind: str) -> None:
    assert max(case["shared_bytes"] for case in code(kind).values()) <= SHARED_BYTES_HOPPER


def test_programs_of_a_processor_fit_its_shared_memory() -> None:
    for name, case in (code("decode") | code("wide decode")).items():
        taken = case["per_processor"] * (case["shared_bytes"] + RESERVED_BYTES)
        waiting = case["per_processor"] * case["heads"]  # programs of the second launch
        beside = waiting * (case["combine_shared_bytes"] + RESERVED_BYTES)
        assert taken + beside <= SHARED_BYTES_OF_A_PROCESSOR, name


@ROLES
def test_every_variant_uses_tma_and_batched_wgmma(kind: str) -> None:
    for name, case in code(kind).items():
        assert case["tma_loads"] > 0, name
        least = LEAST_WGMMA.get(kind, {}).get(name, 5)
        assert case["wgmma"] >= least * case["wgmma_fences"], f"{name}: ptxas serialised wgmma"


def test_a_page_of_16_keys_is_a_copy_of_its_own() -> None:
    # Queries: 2 consumers x 2 halves of 128 dims; keys and values: 8 pages of 16 a block, in 2 halves.
    assert code("extend")["d96 page 16 group 7"]["tma_loads"] == 4 + 2 * 8 * 2
    # 2 consumers x 3 parts of 64 dims; 4 pages a block, in 3 parts.
    assert code("extend")["d192 page 16 group 7"]["tma_loads"] == 6 + 2 * 4 * 3


@pytest.mark.parametrize("kind", ["prefill", "extend", "ordered"])  # a short window has no steps
def test_the_exponentials_of_every_steady_step_run_beside_wgmma(kind: str) -> None:
    for name in code(kind).keys() - SUNK.get(kind, set()):
        case = code(kind)[name]
        step = 32 if name[:4] in ("d136", "d192", "d256") else 64  # of one thread: block_n / 4 columns of 2 rows
        step -= step // 4 if name in POLYNOMIALS else 0
        steady = [count for count in case["overlapped"] if count >= step - 4]  # four at most before the first issue
        assert len(steady) >= 2, f"{name}: {case['overlapped']} of {step} overlap"  # at least one loop a consumer
        if name in POLYNOMIALS:
            assert max(steady) <= step + 4, f"{name}: {case['overlapped']} where {step} are enough"


def test_no_barrier_lies_where_tma_writes() -> None:
    """Triton lays an allocation that no role uses over a live one; what it is initialised with lands in the queries."""
    for name, case in (code("prefill") | code("window")).items():
        assert len(case["barriers"]) > 10, name
        assert min(case["barriers"]) >= case["copied_bytes"], name
        assert len(set(case["barriers"])) == len(case["barriers"]), name


@ROLES
@pytest.mark.parametrize(
    "fault",
    [
        "hazards",  # a register of a wgmma in flight is touched
        "early_arrivals",  # a role hands on what not all of its threads are done with; racecheck cannot tell
        "arrivals_in_flight",  # what a product may still read is given back
        "strays",  # the ring is accessed not between wait and arrival: in PTX, or since ptxas sank a read
    ],
)
def test_machine_code_has_no_race_that_its_text_shows(kind: str, fault: str) -> None:
    assert min(case["arrivals"] for case in code(kind).values()) >= 10  # tiles and their wish, queries, often keys
    assert {name: case[fault] for name, case in code(kind).items() if case[fault]} == {}


@TOKENS
def test_keys_come_by_tma_and_reach_tensor_cores_whole(kind: str) -> None:
    for name, case in code(kind).items():
        assert case["tma_loads"] > 0, name
        assert case["mma"] > 0, name
        assert case["matrix_loads"] >= case["mma"] / 2, f"{name}: shared memory is read word by word"
        assert (case["sent"] > 0) == (kind == "clusters"), f"{name}: sums are sent by four"


def test_launches_read_lengths_before_the_wait_and_copy_after() -> None:
    for name, case in (code("decode") | code("wide decode")).items():
        lengths, wait, copy, next_launch = case["places"][0]
        assert 0 < lengths < wait < copy < next_launch, name
        lengths, wait, _, next_launch = case["places"][1]
        assert 0 < next_launch < lengths < wait, name
    for name, case in code("clusters").items():  # and parts are exchanged last
        assert case["places"][0] > 0, name
        assert case["places"] == sorted(case["places"]), name


@pytest.mark.parametrize("missing", ["the barrier", "a barrier of all warps"])
def test_the_scanner_finds_an_arrival_that_nothing_orders(missing: str) -> None:
    role = ["setmaxnreg.dec.sync.aligned.u32 240;", "wgmma.wait_group.sync.aligned 0;", "ld.shared.b32 %r1, [ring];"]
    arrive = "\t@%p1 mbarrier.arrive.shared::cta.b64 _, [%r2];"
    between = [] if missing == "the barrier" else ["bar.warp.sync -1;"]
    assert list(early_arrivals("\n".join([*role, *between, arrive]))) == [
        f"{len(role + between) + 1}: {arrive.strip()}"
    ]
    assert list(early_arrivals("\n".join([*role, "bar.sync 2, 128;", arrive]))) == []


RING_PTX = """
mbarrier.try_wait.parity.shared.b64 complete, [%r1], %r2;
ld.shared.b32 %r3, [global_smem+1024];
bar.sync 0, 128;
@%p1 mbarrier.arrive.shared::cta.b64 _, [%r4];
$L__BB0_1:
mbarrier.try_wait.parity.shared.b64 complete, [%r5], %r6;
st.shared.b32 [%r7+1024], %r8;
@%p2 mbarrier.arrive.shared::cta.b64 _, [%r9];
"""
RING_CODE = """SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR9+0x440], R2
@!P1 BRA `(.L_x_1)
.L_x_2:
LDS R3, [UR9+0x400]
BAR.SYNC.DEFER_BLOCKING 0x2, 0x80
@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR9+0x450], RZ
BRA `(.L_x_3)
.L_x_1:
SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR9+0x440], R2
@!P1 BRA `(.L_x_1)
BRA `(.L_x_2)
.L_x_3:
SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R24+URZ+0x450], R2
STS [R7+UR9+0x400], R8
@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ+0x440], RZ""".splitlines()


@pytest.mark.parametrize(
    ("line", "to"),
    [(3, 4), (3, 5), (3, 6), (3, 0), (13, 14)],
    ids=["read behind the barrier", "read behind the arrival", "read in another block", "read early", "write late"],
)
def test_the_scanner_finds_accesses_outside_of_a_slots_passage(line: int, to: int) -> None:
    assert list(strays(RING_PTX, RING_CODE)) == []
    strayed = [*RING_CODE[:line], *RING_CODE[line + 1 :]]
    strayed.insert(to, RING_CODE[line])
    assert any(RING_CODE[line] in each for each in strays(RING_PTX, strayed))


@pytest.mark.parametrize(("of", "by"), [("0x450", "0x460"), ("BAR.SYNC", "NOP"), ("BRA `(.L_x_3)", "BRA `(.L_x_2)")])
def test_the_scanner_finds_wrong_barriers_and_ways_to_the_ring(of: str, by: str) -> None:
    assert list(strays(RING_PTX, "\n".join(RING_CODE).replace(of, by, 1).splitlines())) != []


def test_the_scanner_finds_what_is_given_back_under_a_product() -> None:
    issue, wait, turn = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 1;", "bar.arrive %r1, %r2;"
    given_back = ["@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];", "bar.arrive %r4, %r5;"]
    numbers = ["mov.b32 %r2, 256;", "mov.b32 %r5, 288;"]
    assert list(arrivals_in_flight("\n".join([*numbers, issue, turn, wait, *given_back]))) == []
    assert len(list(arrivals_in_flight("\n".join([*numbers, issue, turn, *given_back, wait])))) == 2


def test_the_scanner_finds_writes_to_registers_of_a_wgmma() -> None:
    issued = ["HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR8].tnspB, R88, gsb0", "MUFU.EX2 R121, R3"]
    waited = [issued[0], "WARPGROUP.DEPBAR.LE gsb0, 0x0", issued[1]]
    assert list(hazards(issued)) == ["MUFU.EX2 R121, R3"]
    assert list(hazards(waited)) == []


def test_the_scanner_finds_a_read_of_accumulators_in_flight() -> None:
    issued = ["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0", "@P0 FADD R2, R2, R30"]
    assert list(hazards(issued)) == ["@P0 FADD R2, R2, R30"]


def test_the_scanner_finds_where_barriers_are_initialised() -> None:
    elsewhere = ["SYNCS.EXCH.64 URZ, [UR3], UR6", "SYNCS.ARRIVE URZ, [UR12+0x8]"]
    code = ["SYNCS.EXCH.64 URZ, [UR12+0x25900], UR6", "@!UP1 SYNCS.EXCH.64 URZ, [UR12], UR4", *elsewhere]
    assert barrier_offsets(code) == [0x25900, 0]


def test_exponentials_below_the_wait_are_not_overlapped() -> None:
    issued = ["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"]
    sunk = [*issued, "MUFU.EX2 R1, R2", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "MUFU.EX2 R3, R4"]
    assert overlapped_exponentials(sunk) == [1]
