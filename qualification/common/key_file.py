"""API keys in a file, as the server, the canary and the load generator read them."""

import re
from dataclasses import dataclass, field
from pathlib import Path

UNNAMED = "unnamed"
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


class KeyFileError(ValueError):
    """A line of a key file is neither a key nor a name and a key. The message holds no key."""


@dataclass(frozen=True, slots=True)
class NamedKey:
    name: str
    key: str = field(repr=False)


def named_keys_of(file: Path) -> list[NamedKey]:
    """One `key` or `name:key` a line; blank lines and lines that begin with # are skipped.

    Several keys may have one name. Raises OSError, UnicodeDecodeError and KeyFileError.
    """
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [_named(number, line) for number, line in enumerate(lines, start=1) if line and not line.startswith("#")]


def keys_of(file: Path) -> list[str]:
    """The keys of a file without their names. Raises OSError, UnicodeDecodeError and KeyFileError."""
    return [it.key for it in named_keys_of(file)]


def _named(number: int, line: str) -> NamedKey:
    name, colon, key = line.partition(":")
    if not colon:
        return NamedKey(UNNAMED, line)
    key = key.strip()
    if not _NAME.fullmatch(name) or not key:
        raise KeyFileError(
            f"line {number}: expected `key` or `name:key`, the name of 1 to 64 letters, digits, '.', '_', '@' and '-'"
        )
    return NamedKey(name, key)
