"""A rank that reports what the test wants, and ends, or waits for the end where it has reported why.

`failing_rank DESCRIPTOR`; `failing_rank OUT RUNNING` is rank 0 beside it, which would wait for ever.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import msgspec

from kernels.linear.library.fallback_reason import MatmulFallback
from kernels.system.device_lost import DeviceLost
from kernels.system.hang_up import wait_for_hang_up
from server.engine.execution.commands import (
    Decide,
    RankDecided,
    RankFailed,
    RankFallbacks,
    RankProgress,
    Reports,
    receive,
)
from server.engine.execution.followers import Followers, RankListener
from support.ranks.forks import STUB


def fail(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    reports = Reports(connection)
    reports.send(RankProgress("loading", 3))
    reports.send(RankFallbacks({MatmulFallback.LIBRARY_REFUSED: 1}))
    reports.send(RankFallbacks({MatmulFallback.LIBRARY_REFUSED: 1, MatmulFallback.LAUNCH_FAILED: 2}))
    failed = msgspec.json.decode(os.environ["FAILED"], type=RankDecided | RankFailed | None)
    if failed is not None:
        receive(connection)  # decisions
        reports.send(failed)
        wait_for_hang_up(connection, 60.0)  # rank 0 does not wait for the end


def lead(out: Path, running: list[tuple[str, str]]) -> None:
    """Write what is heard to a file, line by line. `running`: (path, shape) of steps that are not done."""
    with out.open("w") as file:

        def write(heard: object) -> None:
            print(json.dumps(heard), file=file, flush=True)

        def failed(lost: DeviceLost) -> None:
            write([str(lost), lost.suspects])
            for _ in range(2):
                write({reason.value: count for reason, count in followers.take_fallbacks().items()})

        listener = RankListener(
            on_progress=lambda rank, it: write([rank, it.stage, it.count]),
            on_failure=failed,
            on_refusal=lambda code, message: write([code, message]),
        )
        followers = Followers(2, STUB, listener)
        followers.blamed = lambda: running
        followers.send(Decide([("a shape", "path.b"), ("another", None)]))
        time.sleep(60)


def main() -> None:
    if len(sys.argv) == 2:
        fail(int(sys.argv[1]))
    else:
        lead(Path(sys.argv[1]), [(path, shape) for path, shape in json.loads(sys.argv[2])])
