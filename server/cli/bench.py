"""`hallmark bench`, whose programs are in a checkout's folder `bench` and not in the installed package."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from qualification.common.flags import Commands, add_command
from server.errors import SettingsError

_ROOT = Path(__file__).resolve().parents[2]


def has_benches(root: Path = _ROOT) -> bool:
    """Return whether a folder is a checkout; where the package is installed, a `bench` beside it is another's."""
    return (root / "bench" / "command.py").is_file() and (root / "pyproject.toml").is_file()


def add_parser(commands: Commands) -> None:
    """Add `hallmark bench` to the commands of the program."""
    add_arguments(
        add_command(
            commands,
            "bench",
            "measure attention paths, servers or steps",
            "Measure attention paths beside other libraries, servers beside others, or the engine's own steps.",
            "hallmark bench attention --quick",
            "hallmark bench serve --url http://127.0.0.1:8000 --quick",
        )
    )


def add_arguments(parser: argparse.ArgumentParser, root: Path = _ROOT) -> None:
    """Add the benches of the checkout at `root`; without one, any words, for `run` to refuse."""
    if not has_benches(root):
        parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        return
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))  # the programs' own processes look there too
    from bench import command

    command.add_arguments(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run a bench and return its exit code. Raises SettingsError where there is none."""
    if not hasattr(args, "bench"):
        raise SettingsError(
            "bench is not part of the installed package: clone the repository, run `pip install --editable .` there, "
            "and `hallmark bench` has it"
        )
    from bench import command

    return command.run(args, environ)
