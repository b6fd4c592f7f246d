"""The soak's verdict: what it must refuse."""

import pytest
from soak import verdict

NOTHING = {
    "requests_running": 0.0,
    "requests_waiting": 0.0,
    "kv_cache_usage_ratio": 0.0,
    "oldest_inflight_seconds": 0.0,
    "engine_restarts_total": 0.0,
    "gpu_oom_total": 0.0,
    "nonfinite_logits_total": 0.0,
}


def samples(mib_per_1000: float = 0.0, **at_the_end: float) -> list[dict[str, float]]:
    """20 samples: 30 MiB of warm-up, 1 MiB up and down, one jump of 5 MiB, and steady growth."""
    found = []
    for i in range(20):
        num = 1000.0 * i
        rss_mib = min(30.0, num / 100) + i % 2 + 5 * (i == 15) + mib_per_1000 * i
        found.append(NOTHING | {"requests": num, "api_rss_mib": rss_mib})
    found[-1] |= at_the_end
    return found


def test_what_warms_up_wanders_and_jumps_passes() -> None:
    assert verdict(samples(), {}, 5000)["failed"] == []


def test_a_leak_of_half_a_kilobyte_a_request_fails() -> None:
    [reason] = verdict(samples(0.5), {}, 5000)["failed"]
    assert reason.startswith("api_rss_mib grew by 0.5")
    assert reason.endswith("per 1,000 requests, the bound is 0.25")


@pytest.mark.parametrize("name", sorted(NOTHING))
def test_what_is_not_as_at_the_start_fails(name: str) -> None:
    [reason] = verdict(samples(**{name: 0.5}), {}, 5000)["failed"]
    assert name in reason


def test_a_wrong_answer_fails() -> None:
    assert verdict(samples(), {"chat: 500 instead of 200": 2}, 5000)["failed"] == ["2 x chat: 500 instead of 200"]
