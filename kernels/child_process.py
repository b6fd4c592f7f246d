"""Processes of our own modules, which import what the process that starts them imports."""

import sys


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module: `-m` alone would import a random.py of the folder we were started in.

    Our `sys.path` goes in the code, not in PYTHONPATH, which programs between us and the module would read too: ncu
    has a Python of another version within.
    """
    code = f"import runpy, sys; sys.path[:] = {sys.path!r}; runpy.run_module(sys.argv.pop(1), None, '__main__', True)"
    return (sys.executable, "-P", "-c", code, module, *arguments)
