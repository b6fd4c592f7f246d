"""Reasons to restart this process, and to send requests elsewhere."""

import time

from server.http.services import Services
from server.protocol.liveness import kill_limit_s, unready_limit_s
from server.protocol.messages import PlanRow
from server.protocol.plan_rows import rejections_here
from server.supervisor.client import EngineState

LOOP_LIMIT_S = 10.0


def why_not_alive(services: Services) -> list[str]:
    """Reasons to restart this process; none while it makes progress."""
    reasons = []
    now = time.monotonic()
    loop_age_s = now - services.telemetry.metrics.traffic.loop_seen_at
    if loop_age_s > LOOP_LIMIT_S:
        reasons.append(f"the event loop has not turned for {loop_age_s:.1f} s, the limit is {LOOP_LIMIT_S:g} s")
    return reasons + _why_silent(services, kill_limit_s(services.engine.ready))


def why_not_ready(services: Services) -> list[str]:
    """Reasons to send requests elsewhere."""
    reasons = why_not_alive(services) or _why_silent(services, unready_limit_s(services.engine.ready))
    if services.lifecycle.is_draining:
        reasons.append("the server is shutting down")
    if services.engine.state is not EngineState.READY:
        reasons.append(services.why_not_ready())
        refused = services.engine.refused
        return reasons + _why_unserved(refused.plan if refused else [])
    # A path that is quarantined in service may leave a shape without one: under --reproducible often, for only paths
    # of one order may serve, and that may have no second. The next start ends so too.
    return reasons + _why_unserved(services.engine.ready.plan if services.engine.ready else [])


def _why_unserved(plan: list[PlanRow]) -> list[str]:
    return [f"no path may serve {row.shape}: {_why_refused(row)}" for row in plan if row.path is None]


def _why_silent(services: Services, limit_s: float) -> list[str]:
    """A reason where the last heartbeat of a ready engine is older than the limit."""
    engine = services.engine
    if engine.state is not EngineState.READY or engine.last_heartbeat is None:
        return []
    age_s = time.monotonic() - engine.last_heartbeat.sent_at
    if age_s <= limit_s:
        return []
    return [f"the engine's last heartbeat is {age_s:.1f} s old, the limit is {limit_s:.3g} s"]


def _why_refused(row: PlanRow) -> str:
    """GET /attention has what stands against the other paths too."""
    reasons = [f"{path}: {detail}" for path, why in rejections_here(row).items() for _, detail in why]
    return "; ".join(reasons) or row.status
