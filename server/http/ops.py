"""The endpoints for operators: is it alive, may it be used, what runs, what was counted."""

import math
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from server.edge.admission import Edge
from server.edge.redact import plain_name
from server.errors import RETRY_AFTER_S, NotReady, UnknownField
from server.http.json_body import parse_json
from server.protocol.heartbeat import kill_limit_s, unready_limit_s
from server.protocol.messages import PlanRow
from server.protocol.plan_rows import rejections_here
from server.supervisor.client import EngineState
from server.telemetry.scrape import content_type_of, scrape

LOOP_LIMIT_S = 10.0


def health_routes(edge: Edge) -> APIRouter:
    """What probes ask; open to everyone."""
    router = APIRouter()

    @router.get("/livez")
    async def livez() -> Response:
        return _verdict(why_not_alive(edge))

    async def readyz() -> Response:
        return _verdict(why_not_ready(edge))

    router.add_api_route("/readyz", readyz, methods=["GET"], response_model=None)
    router.add_api_route("/health", readyz, methods=["GET"], response_model=None)
    return router


def admin_routes(edge: Edge) -> APIRouter:
    """What operators ask; behind the API key, or on a port of its own."""
    router = APIRouter()

    @router.get("/metrics")
    def metrics(request: Request) -> Response:
        content_type = content_type_of(request.headers.get("accept", ""))
        return Response(scrape(edge.metrics.registry, content_type), headers={"content-type": content_type})

    @router.get("/attention")
    def attention() -> Response:
        return _json(200, attention_report(edge))

    @router.post("/attention/attest")
    async def attest(request: Request) -> Response:
        _refuse_fields(await request.body())
        edge.require_ready()
        report = await edge.engine.attestations.ask()
        if report is None:
            raise NotReady("The engine did not answer with an attestation.", retry_after_s=RETRY_AFTER_S)
        return _json(200, msgspec.to_builtins(report))

    @router.get("/version")
    def version() -> Response:
        ready = edge.engine.ready
        return _json(200, {"version": edge.version, "fingerprint": ready.fingerprint if ready else None})

    return router


def _refuse_fields(body: bytes) -> None:
    """Raises UnknownField and InvalidJson. Every path is attested: what would ask for less must not be ignored."""
    for name in parse_json(body) if body.strip() else ():
        field = plain_name(name)
        raise UnknownField(f"There is no field {field!r} here: the body is {{}} or empty.", param=field)


def why_not_alive(edge: Edge) -> list[str]:
    """Reasons to restart this process; none while it makes progress."""
    reasons = []
    now = time.monotonic()
    loop_age_s = now - edge.metrics.traffic.loop_seen_at
    if loop_age_s > LOOP_LIMIT_S:
        reasons.append(f"the event loop has not turned for {loop_age_s:.1f} s, the limit is {LOOP_LIMIT_S:g} s")
    return reasons + _why_silent(edge, kill_limit_s(edge.engine.ready))


def why_not_ready(edge: Edge) -> list[str]:
    """Reasons to send requests elsewhere."""
    reasons = why_not_alive(edge) or _why_silent(edge, unready_limit_s(edge.engine.ready))
    if edge.lifecycle.is_draining:
        reasons.append("the server is shutting down")
    if edge.engine.state is not EngineState.READY:
        reasons.append(edge.why_not_ready())
        refused = edge.engine.refused
        for row in refused.plan if refused else ():
            if row.path is None:
                reasons.append(f"no path may serve {row.shape}: {_why_refused(row)}")
    return reasons


def _why_silent(edge: Edge, limit_s: float) -> list[str]:
    """A reason where the last heartbeat of a ready engine is older than the limit."""
    engine = edge.engine
    if engine.state is not EngineState.READY or engine.last_heartbeat is None:
        return []
    age_s = time.monotonic() - engine.last_heartbeat.sent_at
    if age_s <= limit_s:
        return []
    return [f"the engine's last heartbeat is {age_s:.1f} s old, the limit is {limit_s:.3g} s"]


def attention_report(edge: Edge) -> dict[str, Any]:
    """The plan in full, with what has been launched since the start. Raises NotReady while there is none."""
    ready, refused = edge.engine.ready, edge.engine.refused
    if ready is None and refused is None:
        raise NotReady(edge.why_not_ready(), retry_after_s=RETRY_AFTER_S)
    plan = ready.plan if ready else refused.plan if refused else []
    return {
        "model": edge.model,
        "model_digests": dict(edge.model_digests),
        "state": edge.engine.state.value,
        "on_unproven": edge.settings.on_unproven.value,
        "fingerprint": ready.fingerprint if ready else None,
        "matrix": {"digest": ready.matrix_digest, "verdict": ready.matrix_verdict} if ready else None,
        "attention_layers": ready.attention_layers if ready else None,
        "launches": edge.metrics.attention.launch_counts(),
        "attestation": msgspec.to_builtins(edge.engine.attestations.latest),
        "shadow_checks": [msgspec.to_builtins(report) for report in edge.metrics.attention.shadow_reports],
        "overridden": [{"path": path, "shape": shape} for path, shape in edge.engine.orders.overridden],
        "num_fallbacks": sum(bool(row.fallback_reasons) for row in plan),
        "shapes": [_row(row) for row in plan],
    }


def _row(row: PlanRow) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(row)
    shown["is_fallback"] = bool(row.fallback_reasons)
    shown["rejected"] = {
        path: [{"code": code, "detail": detail} for code, detail in why] for path, why in row.rejected.items()
    }
    shown["evidence"] = {name: _finite(value) for name, value in (row.evidence or {}).items()} or None
    return shown


def _finite(value: float | str | bool) -> float | str | bool | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _why_refused(row: PlanRow) -> str:
    """GET /attention has what stands against the other paths too."""
    reasons = [f"{path}: {detail}" for path, why in rejections_here(row).items() for _, detail in why]
    return "; ".join(reasons) or row.status


def _verdict(reasons: list[str]) -> Response:
    if not reasons:
        return _json(200, {"status": "ok"})
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return _json(503, {"status": "unavailable", "reasons": reasons}, headers)


def _json(status: int, body: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
