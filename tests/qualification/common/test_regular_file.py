"""Only whole regular files are read, at once and with a limit."""

import os
from pathlib import Path

import pytest

from qualification.common.regular_file import read_regular


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"ab")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "link", max_bytes=2) == b"ab"


@pytest.mark.parametrize(("kind", "why"), [("fifo", "regular file"), ("zero", "regular file"), ("large", "3 bytes")])
def test_what_might_never_end_is_refused_at_once(kind: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"abcd")
    with pytest.raises(OSError, match=why):
        read_regular(path, max_bytes=3)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        read_regular(tmp_path)
