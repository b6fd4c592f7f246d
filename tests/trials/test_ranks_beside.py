"""Ratios of several ranks to one and to a peer, each held to its own target."""

import pytest
from ranks_beside import TARGETS, Asked, Measured, compared

from qualification.load.sample import ClientLag
from qualification.load.served import Scenario, ServedSide, ServeRow


def side(name: str, ranks: int | None, times_ms: dict[str, float]) -> Measured:
    rows = []
    for case, time_ms in times_ms.items():
        scenario = Scenario(case.split()[0])
        is_ttft = scenario is Scenario.TTFT
        rows.append(
            ServeRow(
                case=case, scenario=scenario, x=1.0, group="all", num_requests=5, num_errors=0, first_error=None,
                ttft_ms=[time_ms] * 5, ttft_p50_ms=time_ms if is_ttft else None, ttft_p90_ms=None, ttft_p99_ms=None,
                tpot_ms=[], tpot_p50_ms=None if is_ttft else time_ms, num_gaps=0, gap_p50_ms=None, gap_p99_ms=None,
                tokens_per_read=None, output_tokens=5, output_tokens_per_s=None, goodput_per_s=None, good_share=1.0,
                is_counted_by_server=True, lag=ClientLag(0.0, 0.0, 0.0, 0.0),
            )
        )  # fmt: skip
    return Measured(Asked(name, "-", ranks, None, "http://it"), ServedSide(name, "http://it", "m", rows, []), None, "1")


def test_each_ratio_is_held_to_its_own_target() -> None:
    times = {"ttft 128": 7.0, "tpot 1": 6.0}
    one, peer = {"ttft 128": 8.0, "tpot 1": 9.5}, {"ttft 128": 10.0, "tpot 1": 8.0}
    sides = [side("ours-tp2", 2, times), side("ours-tp1", 1, one), side("vllm", None, peer)]
    ttft, tpot = compared(sides, TARGETS["bf16"], {"tpot 1": 3.0})
    assert (ttft["over"]["vllm"]["target"], ttft["over"]["vllm"]["is_met"]) == (0.75, True)
    assert (ttft["over"]["ours-tp1"]["target"], ttft["over"]["ours-tp1"]["is_met"]) == (None, None)
    assert (tpot["over"]["vllm"]["target"], tpot["over"]["vllm"]["is_met"]) == (0.72, False)
    assert (tpot["over"]["ours-tp1"]["target"], tpot["over"]["ours-tp1"]["is_met"]) == (0.62, False)
    assert tpot["over"]["ours-tp1"]["ratio"] == pytest.approx(6 / 9.5, abs=1e-3)
    assert (tpot["floor_ms"], tpot["of_floor"]) == (3.0, 2.0)
