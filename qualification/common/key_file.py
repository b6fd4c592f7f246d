"""API keys in a file, as the server, the canary and the load generator read them."""

from pathlib import Path


def keys_of(file: Path) -> list[str]:
    """One key a line; blank lines and lines that begin with # are skipped. Raises OSError and UnicodeDecodeError."""
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]
