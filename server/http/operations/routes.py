"""Routes for probes and operators."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from qualification.receipt.keys import ALGORITHM
from server.edge.context import context_of
from server.edge.routing import PlainRoute
from server.errors import RETRY_AFTER_S, Conflict, NotFound, NotReady
from server.http.common.document import answers_with, takes
from server.http.common.json_body import parse_json
from server.http.common.validation import read
from server.http.operations.attention import attention_report, named_pairs, order_report
from server.http.operations.health import why_not_alive, why_not_ready
from server.http.operations.schemas import (
    AttentionReport,
    Attestation,
    AttestRequest,
    Health,
    Load,
    QuarantineReport,
    QuarantineRequest,
    Version,
)
from server.http.services import Services
from server.telemetry.scrape import OPENMETRICS, TEXT, content_type_of, scrape

REQUESTS = (AttestRequest, QuarantineRequest)
ANSWERS = answers_with(NotReady)
_UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not so, and why."}}
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "OpenMetrics, with exemplars, where the header Accept asks for it.",
        "content": {kind.partition(";")[0]: {"schema": {"type": "string"}} for kind in (TEXT, OPENMETRICS)},
    }
}


def health_routes(services: Services) -> APIRouter:
    """Return the routes for probes, open to everyone."""
    router = APIRouter(route_class=PlainRoute, tags=["probes"])

    async def livez(request: Request) -> Response:  # noqa: ARG001 -- an endpoint of PlainRoute
        """Return whether this process makes progress; restart it where it does not."""
        return _verdict(why_not_alive(services))

    async def readyz(request: Request) -> Response:  # noqa: ARG001 -- an endpoint of PlainRoute
        """Return whether requests are served; send them elsewhere where they are not."""
        return _verdict(why_not_ready(services))

    for path, endpoint in (("/livez", livez), ("/readyz", readyz), ("/health", readyz), ("/ping", readyz)):
        router.add_api_route(path, endpoint, methods=["GET"], response_model=Health, responses=_UNAVAILABLE)
    return router


def load_routes(services: Services) -> APIRouter:
    """Return the routes for routers in front of several servers."""
    router = APIRouter(route_class=PlainRoute, tags=["probes"])

    @router.get("/load", response_model=Load)
    async def load(request: Request) -> Response:  # noqa: ARG001 -- an endpoint of PlainRoute
        """Return how many requests that generate are under way."""
        total, num_waiting = services.telemetry.metrics.traffic.num_inflight, services.admission.num_requests
        counts = {"server_load": total, "num_running": total - num_waiting, "num_waiting": num_waiting}
        return _json(200, counts)

    return router


def operator_routes(services: Services) -> APIRouter:
    """Return the routes for operators, behind their key or on a port of their own."""
    router = APIRouter(tags=["operators"])

    @router.get("/metrics", response_class=Response, responses=_METRICS)
    def metrics(request: Request) -> Response:
        """Return the metrics for Prometheus."""
        content_type = content_type_of(request.headers.get("accept", ""))
        return Response(
            scrape(services.telemetry.metrics.registry, content_type), headers={"content-type": content_type}
        )

    def plan() -> Response:
        """Return the decision for each shape of every operator, its evidence, and what has been launched since."""
        return _json(200, attention_report(services))

    for path in ("/plan", "/attention"):  # the second is the older name
        router.add_api_route(path, plan, methods=["GET"], response_model=AttentionReport, openapi_extra=ANSWERS)

    @router.get("/version", response_model=Version)
    def version() -> Response:
        """Return the version of the server, the fingerprint of the machine, and the keys that sign receipts."""
        ready, receipts = services.engine.ready, services.receipts
        keys = () if receipts is None else receipts.keys.public_keys
        return _json(
            200,
            {
                "version": services.program.version,
                "fingerprint": ready.fingerprint if ready else None,
                "receipt_keys": [
                    {"key_id": key.key_id, "algorithm": ALGORITHM, "public_key": key.text, "is_current": key is keys[0]}
                    for key in keys
                ],
            },
        )

    return router


def order_routes(services: Services) -> APIRouter:
    """Orders to the engine; answered when it has carried them out, between two steps."""
    router = APIRouter(route_class=PlainRoute, tags=["operators"])
    quarantine = takes(QuarantineRequest, NotFound, Conflict, NotReady)

    @router.post(
        "/attention/attest", response_model=Attestation, openapi_extra=takes(AttestRequest, NotReady, is_required=False)
    )
    async def attest(request: Request) -> Response:
        """Look at the kernels that a forward pass of each path launches now, and compare them with the evidence."""
        body = context_of(request.scope).body.take()
        read(AttestRequest, parse_json(body) if body.strip() else {})
        services.require_ready()
        report = await services.engine.attestations.ask()
        if report is None:
            raise NotReady("The engine did not answer with an attestation.", retry_after_s=RETRY_AFTER_S)
        return _json(200, msgspec.to_builtins(report))

    @router.post("/attention/quarantine", response_model=QuarantineReport, openapi_extra=quarantine)
    async def take_out(request: Request) -> Response:
        """Take a kernel path out of service, for one shape or for all."""
        pairs = _pairs(services, request)
        return _json(200, order_report(await services.engine.quarantine.ask(add=pairs), services.engine.ready))

    @router.delete("/attention/quarantine", response_model=QuarantineReport, openapi_extra=quarantine)
    async def lift(request: Request) -> Response:
        """Put a kernel path back into service."""
        pairs = _pairs(services, request)
        return _json(200, order_report(await services.engine.quarantine.ask(lift=pairs), services.engine.ready))

    return router


def _pairs(services: Services, request: Request) -> list[tuple[str, str]]:
    fields = read(QuarantineRequest, parse_json(context_of(request.scope).body.take()))
    return named_pairs(fields.path, fields.shape, services.require_ready())


def _verdict(reasons: list[str]) -> Response:
    if not reasons:
        return _json(200, {"status": "ok"})
    return _json(503, {"status": "unavailable", "reasons": reasons}, {"retry-after": str(RETRY_AFTER_S)})


def _json(status: int, body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
