"""Processes of our own modules, which import what the process that starts them imports."""

import os
import sys
import sysconfig
from collections.abc import Sequence
from itertools import takewhile

_HOME = __name__.removesuffix("kernels.system.child_process")  # "", and "hallmark." in an installed package
_ROOMS = ("kernels", "qualification", "server")


def python_command(
    module: str,
    *arguments: str,
    environment: Sequence[str] = (),
    under: Sequence[str] = (),
    before: Sequence[str] = (),
) -> tuple[str, ...]:
    """The command that runs a module: `-m` alone would import a random.py of the folder we were started in.

    module       as a checkout names it, `server.cli`: an installed package's is below `hallmark`
    environment  NAME=value of variables that it gets beside ours
    under        a program with its flags, that starts it
    before       folders in which it looks for modules before it looks in ours
    """
    # What an interpreter adds by itself, the standard library and what is installed, stays out of PYTHONPATH: programs
    # between us and the module may have another Python within, as ncu does, which that library would break.
    given = takewhile(lambda entry: entry != sysconfig.get_path("stdlib"), sys.path)
    path = os.pathsep.join(map(os.path.abspath, (*before, *given)))
    name = f"{_HOME}{module}" if module.partition(".")[0] in _ROOMS else module
    return ("env", f"PYTHONPATH={path}", *environment, *under, sys.executable, "-P", "-m", name, *arguments)
