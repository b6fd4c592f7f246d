"""Additions to a file that others write too, from threads, which lock each other out as processes do."""

import threading
import time
from pathlib import Path

import pytest

from kernels.system.shared_folder import only_writer


def test_only_one_is_inside_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "count"

    def count() -> None:
        for _ in range(20):
            with only_writer(file.parent):
                number = int(file.read_text()) if file.exists() else 0
                time.sleep(0.0005)
                file.write_text(str(number + 1))

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_text() == "60"


def test_one_that_hangs_inside_stops_no_other_for_good(tmp_path: Path) -> None:
    began = time.monotonic()
    with only_writer(tmp_path), only_writer(tmp_path, patience_s=0.1):
        assert time.monotonic() - began >= 0.1


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), only_writer(tmp_path / "file"):
        pass
