"""The end of a process whose other side is gone."""

import select
import socket
from collections.abc import Callable


def leave_with(connection: socket.socket, leave: Callable[[int], None]) -> None:
    """Call `leave` with 0 when the other side is closed, whatever the other threads do; read nothing.

    Without the process that gives it work this one has no use: a step that hangs, or a long qualification, must not
    keep it alive.
    """
    wait_for_hang_up(connection)
    leave(0)


def wait_for_hang_up(connection: socket.socket, timeout_s: float | None = None) -> None:
    """Return when the other side is closed, or after so many seconds; read nothing."""
    poll = select.poll()
    poll.register(connection, 0)  # a hang-up is always reported
    poll.poll(None if timeout_s is None else 1000 * timeout_s)
