"""A rank that reports what the test wants, as `failing_rank.py` is told by its environment."""

import os
import socket
import sys

import msgspec

from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.system.hang_up import wait_for_hang_up
from server.engine.execution.commands import RankDecided, RankFailed, RankFallbacks, RankProgress, Reports, receive


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    reports = Reports(connection)
    reports.send(RankProgress("loading", 3))
    reports.send(RankFallbacks({MatmulFallback.LIBRARY_REFUSED: 1}))
    reports.send(RankFallbacks({MatmulFallback.LIBRARY_REFUSED: 1, MatmulFallback.LAUNCH_FAILED: 2}))
    failed = msgspec.json.decode(os.environ["FAILED"], type=RankDecided | RankFailed | None)
    if failed is not None:
        receive(connection)  # decisions
        reports.send(failed)
        wait_for_hang_up(connection, 60.0)  # rank 0 does not wait for the end


if __name__ == "__main__":
    main()
