"""The program's parser: what is mistyped is one line, with the name that was meant."""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from server.cli.peer_flags import advice
from server.errors import SettingsError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations, which break when flags come, that raises SettingsError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"allow_abbrev": False} | options))

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}{_hint_of_choice(message)} (see {self.prog} --help)")


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of `argv`. Raises SettingsError, which suggests a flag of the command for one it does not have."""
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        command = command_of(parser, argv)
        flags = [flag for action in options_of(command) for flag in action.option_strings]
        names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        meant = advice(names, flags) or _hint(names, flags)
        command.error(f"unrecognized arguments: {' '.join(_with_values(unknown, argv))}{meant}")
    return arguments


def _with_values(unknown: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Unknown words, with the values of unknown flags, which argparse takes for a command's positional argument."""
    words: list[str] = []
    for word, following in zip(unknown, (*unknown[1:], None), strict=True):
        words.append(word)
        value = next(iter(argv[argv.index(word) + 1 :]), None)
        if word.startswith("-") and "=" not in word and value not in (None, following) and not value.startswith("-"):
            words.append(value)
    return words


def command_of(parser: argparse.ArgumentParser, argv: Iterable[str]) -> argparse.ArgumentParser:
    """The parser of the innermost command that the first words of `argv` name."""
    for word in argv:
        inner = commands_of(parser)
        if word not in inner:
            return parser
        parser = inner[word]
    return parser


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the actions of a command: its flags with their help, its own commands as one."""
    return list(parser._actions)


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's own commands by name."""
    found = [action.choices for action in options_of(parser) if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def _hint_of_choice(message: str) -> str:
    """Return the nearest choice from argparse's error; Python 3.11 quotes the choices, 3.12 does not."""
    found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    return "" if found is None else _hint([found[1]], re.findall(r"[\w.-]+", found[2]))


def _hint(names: Iterable[str], known: Sequence[str]) -> str:
    close = [match for name in names for match in difflib.get_close_matches(name, known, n=1)]
    return f"; did you mean {' '.join(close)}?" if close else ""
