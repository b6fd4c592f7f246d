"""`hallmark completion`: a shell's script that completes commands, flags, choices and files."""

import argparse
from pathlib import Path

import shtab

from qualification.common.flags import Commands, add_command
from server.cli.parser import commands_of, options_of

_SHELLS = ("bash", "zsh", "fish")
# Settings and arguments, all of them texts, whose value is a path.
_FOLDERS = frozenset({"cache_dir", "matrix"})
_FILES_OR_FOLDERS = frozenset({"config", "model", "positional_model", "ssl_ca_certs"})


def add_parser(commands: Commands) -> None:
    """Add `hallmark completion` to the commands of the program."""
    parser = add_command(
        commands,
        "completion",
        "print a script that completes commands and flags in a shell",
        "Print a script that completes commands, flags, choices and files of this program in a shell. In bash, "
        "and in zsh behind compinit: source <(hallmark completion bash). In fish: hallmark completion fish | source.",
        "hallmark completion bash",
    )
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))


def script_for(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for a shell, of the whole program's parser, which is for nothing else afterwards."""
    _mark_values(parser)
    script: str = shtab.complete(parser, shell)
    return script


def _mark_values(parser: argparse.ArgumentParser) -> None:
    """Give each action what shtab completes its value by: the attribute `complete` for a path, choices for others."""
    for action in options_of(parser):
        if action.dest in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.type is Path or action.dest in _FILES_OR_FOLDERS or action.dest.endswith("file"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif isinstance(action.metavar, str) and action.metavar.startswith("{"):
            action.choices = action.metavar.strip("{}").split(",")  # of settings, which stay texts when they are parsed
    for command in commands_of(parser).values():
        _mark_values(command)
