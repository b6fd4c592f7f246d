"""The exit codes of every command that judges something."""

from enum import IntEnum


class ExitCode(IntEnum):
    PASS = 0
    NUMERICS = 1  # wrong numbers
    PERFORMANCE = 2  # too slow
    ENVIRONMENT = 3  # the machine, the server or the kernel path is not as required
    INCONCLUSIVE = 4  # too little was measured; never a pass
