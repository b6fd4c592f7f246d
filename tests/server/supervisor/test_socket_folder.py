"""The folder of the engine's socket: private, and never longer than a Unix socket's path may be."""

import socket
import stat
from pathlib import Path

import pytest

from server.errors import SettingsError
from server.supervisor.socket_folder import SOCKET_NAME, make_socket_folder


def bind_in(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / SOCKET_NAME))
    (folder / SOCKET_NAME).unlink()
    folder.rmdir()


def padded(parent: Path, length: int) -> Path:
    """A folder whose path has exactly so many characters."""
    folder = Path(str(parent / "x").ljust(length, "x"))
    folder.mkdir()
    return folder


def test_the_folder_is_private_and_where_it_is_wanted(tmp_path: Path) -> None:
    folder = make_socket_folder(str(tmp_path), "/nowhere")
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("length", [60, 73, 74, 200])
def test_a_socket_fits_however_long_the_temporary_path_is(length: int) -> None:
    base = make_socket_folder("/tmp")
    long = padded(base, length)
    folder = make_socket_folder(str(long), str(base))
    bind_in(folder)
    assert folder.parent == (long if length <= 73 else base)
    long.rmdir()
    base.rmdir()


def test_without_a_short_folder_the_error_says_what_to_do(tmp_path: Path) -> None:
    long = padded(tmp_path, 200)
    with pytest.raises(SettingsError, match=r"have 230 bytes .* limit is 103.*set TMPDIR to a shorter folder"):
        make_socket_folder(str(long), str(tmp_path / "nothing"))
