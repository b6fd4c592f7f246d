"""`hallmark bench` is a checkout's: the installed package is without it and says so."""

from pathlib import Path

import pytest

from server.cli.bench import add_arguments, has_benches, run
from server.cli.parser import Parser
from server.errors import SettingsError


@pytest.mark.parametrize("has_other", [False, True])
def test_a_bench_of_the_installed_package_is_refused(has_other: bool, tmp_path: Path) -> None:
    if has_other:  # a package of this name that is not ours
        (tmp_path / "bench").mkdir()
        (tmp_path / "bench" / "command.py").write_text("raise SystemExit")
    parser = Parser(prog="hallmark bench")
    add_arguments(parser, tmp_path)
    with pytest.raises(SettingsError, match="clone the repository"):
        run(parser.parse_args(["attention", "--quick"]), {})


def test_a_checkout_has_every_bench() -> None:
    assert has_benches()
    parser = Parser(prog="hallmark bench")
    add_arguments(parser)
    assert {parser.parse_args([name]).bench for name in ("attention", "steps")} == {"attention", "steps"}
