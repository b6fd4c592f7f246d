"""Reports of measured steps: curves and cliffs, tables, charts, and the file."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench.steps.fit import CLIFF, off_curve, slope
from bench.steps.report import cliffs, derived, report_lines
from bench.steps.row import SCHEMA, DecodeRow, Inside, LoadRow, PrefillRow, Samples, StepsFile, Sweep, load, save
from server.engine.scheduling.step_parts import Part

LENGTHS = [2**k for k in range(4, 13)]


def both(x: float) -> float:
    return 10 + 0.05 * x + 1e-5 * x * x


def samples(ms: float) -> Samples:
    return Samples(ms, 0.01, [1.1 * ms, ms])


def inside(host_ms: float) -> Inside:
    return Inside({part.value: 1.0 for part in Part} | {"forward": 4.0}, samples(host_ms), 0.9)


def file(
    times: Sequence[float], *, cpus: Sequence[float] | None = None, device: str = "cuda", floor_ms: float | None = None
) -> StepsFile:
    """Prompts that take `times`, and decode steps that take them of as many rows."""
    cpus = times if cpus is None else cpus
    rows = list(zip(LENGTHS, times, cpus, strict=True))
    return StepsFile(
        schema=SCHEMA,
        command="hallmark bench steps",
        at="2026-11-22T00:00:00+00:00",
        commit="abc",
        machine={"device": device, "gpu": "some machine"},
        model={"name": "some model"},
        ceilings=None,
        skipped=["decode of 8 x 9: no room"],
        prefill=[PrefillRow(n, 1, samples(ms), samples(cpu), floor_ms, ["a.path"]) for n, ms, cpu in rows],
        decode=[
            DecodeRow(Sweep.BATCH, n, 64, 64.0, samples(ms), samples(cpu), floor_ms, ["a.path"], inside(1 + n / 100))
            for n, ms, cpu in rows
        ],
        load=[LoadRow(3, 64, 16, 123.0, samples(5.0), inside(1.0))],
    )


@pytest.mark.parametrize(
    "cost",
    [
        both,
        lambda x: max(10, 0.05 * x),  # a roofline's corner
        lambda x: max(10, 0.02 * x) + 2e-5 * x * x,
        lambda _: 3.0,
        lambda x: 0.2 * x,
        lambda x: (5 + 12 * x) ** 0.5,
    ],
)
def test_costs_that_grow_as_they_should_have_no_cliff(cost: Callable[[float], float]) -> None:
    assert max(off_curve(LENGTHS, [cost(x) for x in LENGTHS])) < 1.2


@pytest.mark.parametrize("place", range(len(LENGTHS)))
def test_cell_of_three_times_its_cost_is_the_only_cliff(place: int) -> None:
    costs = [both(x) * (3 if index == place else 1) for index, x in enumerate(LENGTHS)]
    offs = off_curve(LENGTHS, costs)
    assert [index for index, off in enumerate(offs) if off > CLIFF] == [place]


@pytest.mark.parametrize("place", range(1, len(LENGTHS)))
def test_a_cost_that_triples_for_good_is_a_cliff_where_it_does(place: int) -> None:
    offs = off_curve(LENGTHS, [both(x) * (3 if index >= place else 1) for index, x in enumerate(LENGTHS)])
    assert max(offs) == offs[place] > CLIFF


def test_four_cells_make_no_curve_to_be_off() -> None:
    assert off_curve([1, 2, 4, 8], [1.0, 9.0, 1.0, 1.0]) == [1.0] * 4


def test_the_slope_is_the_power_of_the_size() -> None:
    assert slope(LENGTHS, [7 * x**1.5 for x in LENGTHS]) == pytest.approx(1.5)
    assert slope([16], [1.0]) is None


def test_a_gpu_is_judged_by_time_and_a_cpu_by_processor_time() -> None:
    smooth = [both(x) for x in LENGTHS]
    disturbed = [ms * (4 if n == 128 else 1) for n, ms in zip(LENGTHS, smooth, strict=True)]
    assert cliffs(file(disturbed, cpus=smooth, device="cpu")) == []
    on_gpu = cliffs(file(disturbed, cpus=smooth))
    assert [cliff.split(":")[0] for cliff in on_gpu] == ["a prompt of 128", "decode of 128 x 64"]
    assert all(cliff.endswith("x the smooth curve") for cliff in on_gpu)


def test_the_table_says_slopes_cliffs_and_what_is_missing() -> None:
    costs = [0.1 * n * (4 if n == 128 else 1) for n in LENGTHS]
    lines = report_lines(file(costs, floor_ms=1.0))
    assert sum("CLIFF" in line for line in lines) == 4  # two cells, and what is said of them below
    row = next(line for line in lines if line.startswith("4096"))
    assert row.split()[:7] == ["4096", "1", "409.6", "1", "%", "2", "409.6"]
    assert row.split()[-1] == "a.path"
    assert any("prefill slope from 512: 1.0" in line for line in lines)
    assert lines[-1] == "not measured: decode of 8 x 9: no room"


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = file([both(x) for x in LENGTHS])
    save(tmp_path / "steps.json", written, derived(written))
    assert load(tmp_path / "steps.json") == written
    assert max(map(len, (tmp_path / "steps.json").read_text().splitlines())) < 1000
