"""`hallmark bench` is a checkout's: the installed package is without it and says so."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from server.cli.bench import add_arguments, has_benches, run
from server.cli.parser import Parser
from server.errors import SettingsError

ROOT = Path(__file__).resolve().parents[3]


def test_the_wheel_holds_the_server_and_no_bench() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert has_benches(ROOT)
    shipped = {path.name for path in ROOT.iterdir() if any(fnmatch(path.name, pattern) for pattern in patterns)}
    assert shipped == {"kernels", "qualification", "server"}


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
    parser = Parser(prog="hallmark bench")
    add_arguments(parser)
    assert {parser.parse_args([name]).bench for name in ("attention", "steps")} == {"attention", "steps"}
