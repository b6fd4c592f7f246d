"""Processes of ranks: their folders are removed, and rank 0 ends when it can hear no more of another."""

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, time
from pathlib import Path
from kernels.system.rank_processes import RankProcesses
ranks = RankProcesses(2, lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"], leave=print)
Path(ranks.meeting).touch()
print(ranks.meeting, flush=True)
if sys.stdin.readline():
    ranks.close()
"""

RANK = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"  # ends with rank 0
DEAF = f"""
import os, sys, time
from kernels.system.rank_processes import RankProcesses
def listen(*_):
    raise ValueError
command = lambda _, descriptor, __: [sys.executable, "-c", {RANK!r}, str(descriptor)]
RankProcesses(2, command, leave=lambda rank: os._exit(70 + rank), listen=listen)
time.sleep(60)
"""

SPOILED = """
import sys
import psutil
from kernels.system.rank_processes import RankProcesses
def command(rank, _, __):
    if rank == 3:
        assert len(psutil.Process().children()) == 2
        return ["no-such-program"]
    return [sys.executable, "-c", "import time; time.sleep(60)"]
try:
    RankProcesses(4, command, leave=print)
except FileNotFoundError as error:
    print(error.filename, psutil.Process().children())
"""


def environment_of(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def start(folder: Path) -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment_of(folder),
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
    assert list(tmp_path.iterdir()) == [used]
    living.communicate("close\n")
    assert living.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_rank_0_ends_where_a_report_cannot_be_handled(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DEAF]
    done = subprocess.run(
        command, env=environment_of(tmp_path), capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 71
    assert "what rank 1 reported could not be handled" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_ranks_before_one_that_cannot_be_started_are_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SPOILED]
    done = subprocess.run(
        command, env=environment_of(tmp_path), capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.stdout, done.returncode) == ("no-such-program []\n", 0), done.stderr
    assert list(tmp_path.iterdir()) == []
