"""Wrong parts of a model on the second of two ranks: processes of their own, whose layers are checked together."""

import json
import os
import subprocess
import sys
from pathlib import Path

# What is wrong on the second rank, by the program that it is.
RANK_FAULTS = {
    "queries begin one row late on a rank": "shifted_rank",
    "a rank has the part of the first one": "first_rank_again",
    "a rank adds nothing to sums": "silent_rank",
}


def section_of(program: str, folder: Path) -> str | None:
    """Return where the check of the layers finds the first difference; None where it finds none."""
    out = folder / f"{program}.json"
    command = [sys.executable, "-m", "support.ranks.ranks_engine", "2", str(out), f"support.ranks.{program}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, timeout=800, check=True)
    found = json.loads(out.read_text())["first"]
    return None if found is None else str(found).partition(", in ")[0]
