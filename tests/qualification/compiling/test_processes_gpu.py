"""Effect of compiling ahead: the run that follows compiles nothing."""

from pathlib import Path

import pytest

from support.compiled.compile_outside import run_outside

pytestmark = pytest.mark.gpu


def test_compiling_ahead_leaves_nothing_to_compile(tmp_path: Path) -> None:
    found = run_outside("ahead_run.py", cache=tmp_path)
    assert found["said"] == "compiling ahead in 4 processes, 8 of 8 calls"
    assert found["compiled"] == []
    assert len(found["loaded"]) >= 4
