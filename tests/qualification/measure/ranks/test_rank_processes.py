"""Processes of ranks: what a killed group has left in the folder for temporary files, the next one removes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, time
from pathlib import Path
from qualification.measure.ranks.rank_processes import RankProcesses
ranks = RankProcesses(2, lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"], leave=print)
Path(ranks.meeting).touch()
print(ranks.meeting, flush=True)
if sys.stdin.readline():
    ranks.close()
"""


def start(folder: Path) -> tuple["subprocess.Popen[str]", Path]:
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip()).parent


def test_the_next_group_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    killed, left = start(tmp_path)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert left.exists()
    living, used = start(tmp_path)
    other, own = start(tmp_path)
    assert set(tmp_path.iterdir()) == {used, own}
    for process in (living, other):
        process.communicate("close\n")
        assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []
