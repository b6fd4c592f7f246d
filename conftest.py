"""Options of the whole test run."""

from collections.abc import Generator

import pytest

REAL_PROGRAMS = ("tests/deploy/", "tests/e2e/")  # tests that drive programs which a machine may lack


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-tools",
        action="store_true",
        help="fail, instead of skipping, the tests of tests/deploy and tests/e2e whose programs are missing (CI)",
    )


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
