"""Classification of an engine process's end, and the time that a living one may be silent."""

from enum import Enum

from server.protocol.messages import EngineReady

UNREADY_AFTER_S = 5.0
KILLED_AFTER_S = 30.0
START_KILLED_AFTER_S = 600.0  # in which no rank loads 64 MiB, compiles a kernel or measures a path
_SILENCES_UNTIL_KILLED = 3  # of the longest kind: a layer that takes long on a CPU is no hang


class DeathCause(Enum):
    """Why an engine process ended. Closed: the values are metric labels."""

    EXITED = "exited"
    KILLED = "killed"  # by a signal
    DEVICE = "device"  # it reported a lost device and exited
    STALLED = "stalled"  # no heartbeat, or no progress in a start, for too long; we killed it
    PROTOCOL = "protocol"  # it sent what no message is; we killed it


def death_of(returncode: int) -> DeathCause:
    """Return the cause of an end that the engine did not report, by its exit status."""
    return DeathCause.KILLED if returncode < 0 else DeathCause.EXITED


def unready_limit_s(ready: EngineReady | None) -> float:
    """Return the seconds of silence after which requests should go elsewhere.

    An engine sends a heartbeat every 0.5 s, idle or not: between two steps, and on a CPU within them, layer by layer.
    """
    return UNREADY_AFTER_S if ready is None else max(UNREADY_AFTER_S, ready.longest_silence_s)


def kill_limit_s(ready: EngineReady | None, least_s: float = KILLED_AFTER_S) -> float:
    """Return the seconds of silence after which the engine is killed."""
    return least_s if ready is None else max(least_s, _SILENCES_UNTIL_KILLED * ready.longest_silence_s)
