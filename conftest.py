"""Options of the whole test run."""

import os
import time
from collections.abc import Generator

import pytest

BEGUN = pytest.StashKey[float]()  # when this process began, of time.monotonic()
REAL_PROGRAMS = ("tests/deploy/", "tests/e2e/")  # tests that drive programs which a machine may lack


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-tools",
        action="store_true",
        help="fail, instead of skipping, the tests of tests/deploy and tests/e2e whose programs are missing (CI)",
    )
    parser.addoption("--begin-within", type=float, metavar="S", help="skip, by name, tests not begun after S seconds")
    parser.addoption("--first", type=int, default=0, metavar="N", help="begin with the N-th test, modulo their number")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # or the hub's client asks it who calls
    config.stash[BEGUN] = time.monotonic()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first = config.getoption("--first") % max(1, len(items))
    items[:] = items[first:] + items[:first]


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit_s = item.config.getoption("--begin-within")
    if limit_s is not None and time.monotonic() - item.config.stash[BEGUN] > limit_s:
        pytest.skip(f"NOT RUN, {limit_s:g} s had passed: {item.name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_program_test = item.nodeid.startswith(REAL_PROGRAMS)
    if report.skipped and is_program_test and item.config.getoption("--require-tools"):
        reason = call.excinfo.value if call.excinfo else "no reason given"
        report.outcome = "failed"
        report.longrepr = f"skipped, which --require-tools forbids: {reason}"
    return report
