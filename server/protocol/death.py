"""How an engine process ended."""

from enum import Enum


class DeathCause(Enum):
    """Why an engine process ended. Closed: the values are metric labels."""

    EXITED = "exited"
    KILLED = "killed"  # by a signal
    DEVICE = "device"  # it reported a lost device and exited
    STALLED = "stalled"  # no heartbeat for too long; we killed it
    PROTOCOL = "protocol"  # it sent what no message is; we killed it


def death_of(returncode: int) -> DeathCause:
    """What an exit status tells."""
    return DeathCause.KILLED if returncode < 0 else DeathCause.EXITED
