"""How long an engine may be silent: it sends a heartbeat every 0.5 s between two steps, idle or not."""

from server.protocol.messages import EngineReady

UNREADY_AFTER_S = 5.0
KILLED_AFTER_S = 30.0
_STEPS_UNTIL_KILLED = 3  # of the longest ones: a long step on a CPU is no hang


def unready_limit_s(ready: EngineReady | None) -> float:
    """After so long requests should go elsewhere."""
    return UNREADY_AFTER_S if ready is None else max(UNREADY_AFTER_S, ready.longest_step_s)


def kill_limit_s(ready: EngineReady | None, least_s: float = KILLED_AFTER_S) -> float:
    """After so long the engine hangs."""
    return least_s if ready is None else max(least_s, _STEPS_UNTIL_KILLED * ready.longest_step_s)
