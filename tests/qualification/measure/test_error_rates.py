"""The two error rates of the checker: counted over right and wrong kernels, on a few of the command's own inputs."""

import sys

import msgspec
import pytest
import torch

from qualification.measure import error_rates
from qualification.measure.error_rates import Rate, is_good, merged, report, settings_here
from server.cli.main import main

CPU = torch.device("cpu")


def rate(what: str, tried: int, failed: int, largest: float, **changes: object) -> Rate:
    return Rate(
        setting="s", what=what, dtype="fp32", phase="decode", tried=tried, failed=failed, largest=largest, **changes
    )


SHAPES = list(error_rates.trial_shapes_of(CPU))


def test_no_right_kernel_fails() -> None:
    """A sample: `hallmark qualify --error-rates` measures more, under each instruction set."""
    found = error_rates.measure(range(1, 2), SHAPES[::48], device=CPU, setting="here", has_faults=False)
    assert sum(it.tried for it in found) > 80
    assert [it for it in found if it.failed] == []


def test_every_fault_is_caught() -> None:
    found = error_rates.measure(range(1, 2), SHAPES[4:5], device=CPU, setting="here", has_faults=True)
    assert len({it.what for it in found}) >= 12
    assert is_good(found)


def test_rates_of_children_add_up() -> None:
    (right,) = merged([rate("sdpa.cpu", 10, 0, 0.4), rate("sdpa.cpu", 5, 1, 1.2)])
    assert (right.tried, right.failed, right.largest) == (15, 1, 1.2)
    (wrong,) = merged([rate("NAN_ROW", 10, 10, 40.0), rate("NAN_ROW", 5, 4, 0.7)])
    assert (wrong.tried, wrong.failed, wrong.largest) == (15, 14, 0.7)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (rate("sdpa.cpu", 10, 0, 0.4), True),
        (rate("sdpa.cpu", 10, 1, 1.1), False),
        (rate("NAN_ROW", 10, 10, 9.0), True),
        (rate("NAN_ROW", 10, 9, 0.9), False),
        (rate("ONE_ROW", 10, 9, 0.9, share=0.5), True),  # smaller than what must be caught
    ],
)
def test_both_errors_of_a_checker_count(found: Rate, expected: bool) -> None:
    assert is_good([found]) is expected
    assert any(found.what in line for line in report([found]))


def test_the_command_measures_in_children_of_every_setting(
    capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_rates, "settings_here", lambda: settings_here()[:1])
    out = tmp_path / "rates.json"
    assert main(["qualify", "--error-rates", "--seeds", "1", "--time-limit", "0.1", "--out", str(out)]) == 0
    assert "checks of right kernels, 0 failed" in capsys.readouterr().out
    rates = msgspec.json.decode(out.read_bytes())["rates"]
    assert {it["setting"].split(",")[0] for it in rates} >= {"default"}
    assert all(it["largest"] <= sys.float_info.max for it in rates)
