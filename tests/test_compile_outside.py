"""The kept cache of compiled kernels does not grow for ever."""

import os
from pathlib import Path

from support.compiled.compile_outside import KEPT_S, remove_old_entries


def test_only_entries_of_the_last_days_are_kept(tmp_path: Path) -> None:
    for name, made_at in (("old", 0), ("new", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.ptx").write_text("")
        os.utime(tmp_path / name, (made_at, made_at))
    remove_old_entries(tmp_path, KEPT_S + 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["new"]
