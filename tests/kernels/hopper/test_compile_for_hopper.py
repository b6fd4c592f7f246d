"""Every shipped Triton configuration compiled for sm_90, which needs no GPU, and what ptxas made of it."""

import pytest

from kernels.portable.launch_config import SHARED_BYTES_HOPPER
from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.sm90

Report = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def report() -> Report:
    """Compile in a process of its own: this one's kernels are imported for the interpreter."""
    return dict(run_outside("compile_for_hopper.py"))


def test_the_report_covers_each_phase_at_each_head_dim(report: Report) -> None:
    assert len(report) == (5 + 3 * 2 + 1) * (3 * 2 + 1)  # of heads, of latents and in one order, of narrow values


def test_no_configuration_spills_registers_but_those_of_many_columns(report: Report) -> None:
    """An accumulator of 64 queries by 512 dimensions takes half of the registers of 256 threads, of latents too.

    So do two of 64 by 128 of 128 threads: of narrow values a part's is folded into another one.
    """
    spilled = {
        name: found["STACK"]
        for name, found in report.items()
        if " ordered " not in name and (found["STACK"] or found["LOCAL"])
    }
    known = ("prefill d512", "extend d512", "decode l", "prefill d192/128")
    assert all(name.startswith(known) for name in spilled), spilled
    assert all(count <= 128 for count in spilled.values()), spilled


def test_latents_in_one_order_spill_between_parts_alone(report: Report) -> None:
    """A part's accumulator and the one that it is folded into take all registers: one waits outside of the loop."""
    ordered = {name: found for name, found in report.items() if " ordered " in name and not name.startswith("combine")}
    assert len(ordered) == 3 * 3 * 2
    assert {name: found["in_loop"] for name, found in ordered.items() if found["in_loop"]} == {}
    assert all(found["STACK"] <= 1100 for found in ordered.values()), ordered


def test_every_configuration_fits_the_shared_memory_of_hopper(report: Report) -> None:
    assert SHARED_BYTES_HOPPER == 227 * 1024
    assert all(found["shared"] <= SHARED_BYTES_HOPPER for found in report.values()), report
    assert all(found["shared"] for name, found in report.items() if not name.startswith("combine")), report


def test_prefill_and_extend_multiply_with_wgmma(report: Report) -> None:
    wgmma = {name: found["wgmma"] for name, found in report.items() if name.startswith(("prefill", "extend"))}
    assert len(wgmma) == 20 + 2 * 12 + 4
    assert all(wgmma.values()), wgmma
