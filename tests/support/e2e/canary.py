"""The canary as a user runs it."""

import subprocess
import sys


def canary(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "server.cli", "canary", "--url", url, *flags]
    return subprocess.run(program, capture_output=True, text=True, timeout=500, check=False)
