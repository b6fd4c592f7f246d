"""Files of keys, as the server reads them at its start."""

import logging
from pathlib import Path

import pytest

from server.edge.keys import Keys
from server.errors import SettingsError
from server.settings import Settings


def files(folder: Path, **keys: str) -> dict[str, str]:
    """Settings that name files with these keys."""
    for name, text in keys.items():
        (folder / name).write_text(text)
    return {name: str(folder / name) for name in keys}


def test_a_key_in_both_files_stops_the_start(tmp_path: Path) -> None:
    settings = Settings(**files(tmp_path, api_key_file="a\nboth\n", operator_key_file="both\nb\n"))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"--operator-key-file .*: holds a key of --api-key-file"):
        Keys.load(settings)


def test_a_file_of_operators_keys_without_one_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^--operator-key-file .*: holds no key"):
        Keys.load(Settings(**files(tmp_path, operator_key_file="# none\n")))  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [{}, {"operator_key_file": "b"}, {"admin_port": 0}], ids=["neither", "file", "port"])
def test_closed_operators_routes_are_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: dict[str, object]
) -> None:
    named = files(
        tmp_path, **{"api_key_file": "a"} | {name: str(text) for name, text in more.items() if "file" in name}
    )
    ports = {name: value for name, value in more.items() if "port" in name}
    with caplog.at_level(logging.WARNING):
        Keys.load(Settings(**named, **ports))  # type: ignore[arg-type]
    assert any("--operator-key-file" in record.getMessage() for record in caplog.records) == (not more)
