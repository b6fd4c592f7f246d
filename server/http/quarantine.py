"""The operator's switch: takes a kernel path out of service at once, for one shape or for all, and puts it back."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from server.edge.admission import Edge
from server.edge.redact import plain_name
from server.errors import RETRY_AFTER_S, Conflict, InvalidValue, NotFound, NotReady, UnknownField
from server.http.json_body import parse_json
from server.protocol.messages import EngineReady, Overridden


def switch_routes(edge: Edge) -> APIRouter:
    """POST takes out, DELETE lifts; both are answered when the engine has done it, between two steps."""
    router = APIRouter()

    @router.post("/attention/quarantine")
    async def take_out(request: Request) -> Response:
        pairs = named_pairs(parse_json(await request.body()), edge.require_ready())
        return _answer(edge, await edge.engine.orders.give(take_out=pairs))

    @router.delete("/attention/quarantine")
    async def lift(request: Request) -> Response:
        pairs = named_pairs(parse_json(await request.body()), edge.require_ready())
        return _answer(edge, await edge.engine.orders.give(lift=pairs))

    return router


def named_pairs(body: dict[str, Any], ready: EngineReady) -> list[tuple[str, str]]:
    """The (path, shape) pairs that an order means: of one shape, or of every shape of the plan.

    Raises UnknownField, InvalidValue, and NotFound for a path or a shape that the plan does not hold.
    """
    for name in body:
        if name not in ("path", "shape"):
            field = plain_name(name)
            raise UnknownField(f"There is no field {field!r} here; there are: path, shape.", param=field)
    path, shape = body.get("path"), body.get("shape")
    if not isinstance(path, str):
        raise InvalidValue("path must be the name of a kernel path.", param="path")
    if shape is not None and not isinstance(shape, str):
        raise InvalidValue("shape must be a shape as GET /attention writes it, or absent for all.", param="shape")
    shapes = [row.shape for row in ready.plan]
    paths = sorted({name for row in ready.plan for name in (row.path, *row.rejected) if name is not None})
    if path not in paths:
        raise NotFound(f"No path {path[:128]!r} is known here; known are: {', '.join(paths)}.", param="path")
    if shape is not None and shape not in shapes:
        raise NotFound(f"The plan has no shape {shape[:256]!r}; it has: {'; '.join(shapes)}.", param="shape")
    return [(path, each) for each in shapes if shape in (None, each)]


def _answer(edge: Edge, answer: Overridden | None) -> Response:
    """Raises Conflict for an order that would leave a shape without a path, NotReady without an answer."""
    if answer is None:
        raise NotReady("The engine did not answer; GET /attention tells what serves.", retry_after_s=RETRY_AFTER_S)
    if answer.stranded:
        shapes = "; ".join(answer.stranded)
        raise Conflict(f"Nothing was changed: no other path may serve {shapes}.", param="path")
    ready = edge.engine.ready
    body = {
        "overridden": [{"path": path, "shape": shape} for path, shape in answer.overridden],
        "fallbacks": [
            {"shape": row.shape, "path": row.path, "wanted": row.wanted, "reasons": row.fallback_reasons}
            for row in (ready.plan if ready else [])
            if row.fallback_reasons
        ],
    }
    return Response(msgspec.json.encode(body), media_type="application/json")
