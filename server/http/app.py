"""The application: every dependency is a parameter, so that a test can put a fake in its place."""

import asyncio
import contextlib
import difflib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from server.edge.admission import Edge
from server.edge.body_memory import Bodies
from server.edge.guard import Guard, GuardLimits
from server.edge.hosts import allowed_hosts
from server.edge.keys import NO_KEYS, Access, Keys
from server.errors import InvalidValue, MethodNotAllowed, NotFound
from server.http.common.document import document
from server.http.openai import routes as openai
from server.http.operations import routes as operations
from server.telemetry.metrics import Metrics

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})  # for probes, which have no key
_LAG_INTERVAL_S = 0.25
_LAG_SAMPLES = 20  # the gauge shows the longest of these: 5 seconds
_TRACE_CLOSE_S = 5.0


def create_app(edge: Edge, keys: Keys = NO_KEYS) -> FastAPI:
    """The API; its lifespan starts and closes the engine. Without an admin port it has the operators' routes too.

    Raises SettingsError for allowed hosts that are none, and ModelError for a tokenizer that cannot tell special tokens
    from text that spells them.
    """
    if edge.template is not None and not edge.settings.special_tokens_in_text:
        edge.tokenizer.special_tokens.mark("")  # built here, and not in the first request: a large one takes 1 s
    routers = [openai.routes(edge), openai.model_routes(edge), operations.health_routes(edge)]
    if edge.settings.admin_port is None:
        routers += _operator_routers(edge)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001 -- FastAPI's signature
        watch = asyncio.create_task(watch_loop(edge.metrics))
        await edge.engine.start()
        try:
            yield
        finally:
            await edge.engine.close()
            watch.cancel()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(edge.tracing.close), _TRACE_CLOSE_S)

    return _application(routers, edge, keys, lifespan)


def create_admin_app(edge: Edge, keys: Keys = NO_KEYS) -> FastAPI:
    """Health, metrics and the plan, for a port of its own that only operators reach; only their keys count there.

    Raises SettingsError for allowed hosts that are none.
    """
    routers = [operations.health_routes(edge), *_operator_routers(edge)]
    return _application(routers, edge, Keys(operators=keys.operators), None)


def _operator_routers(edge: Edge) -> list[APIRouter]:
    return [operations.operator_routes(edge), operations.order_routes(edge)]


def _application(routers: Sequence[APIRouter], edge: Edge, keys: Keys, lifespan: Any) -> FastAPI:
    """An application of these routes behind a guard, with its document."""
    app = FastAPI(
        title="Hallmark",
        version=edge.version,
        redirect_slashes=False,  # behind TLS a redirect leads to http
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        lifespan=lifespan,
    )
    methods: defaultdict[str, set[str]] = defaultdict(set)
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute)  # a router within another would hide its paths
            methods[route.path] |= route.methods or set()
        # Not by include_router, which would match each request's path twice.
        app.router.routes.extend(router.routes)
    of_operators = {route.path for it in _operator_routers(edge) for route in it.routes if isinstance(route, APIRoute)}
    app.add_exception_handler(HTTPException, _raiser(methods, of_operators - methods.keys()))
    edge.metrics.traffic.create_routes((*methods, "other"))
    settings = edge.settings
    access = Access(keys, OPEN_PATHS, frozenset(of_operators & methods.keys()))
    app.add_middleware(
        Guard,
        limits=GuardLimits(settings.max_body_bytes, settings.receive_timeout_s, settings.request_timeout_s),
        bodies=Bodies(settings.max_queued_bytes),
        access=access,
        hosts=allowed_hosts(settings.allowed_hosts, settings.host, has_keys=keys.tenants is not None),
        metrics=edge.metrics,
        lifecycle=edge.lifecycle,
        routes=frozenset(methods),
    )
    document(app, access, (*openai.REQUESTS, *operations.REQUESTS), openai.EVENTS)
    return app


def _raiser(
    methods: Mapping[str, set[str]], elsewhere: Container[str]
) -> Callable[[Request, Exception], Awaitable[Response]]:
    """A handler that raises what routing refuses as one of our errors, which the guard answers with.

    methods    by path, of every route
    elsewhere  paths that are on the admin port instead
    """

    async def raise_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:128]
        if path in elsewhere:
            raise NotFound(f"{path!a} is on the server's admin port.")
        if error.status_code == 404 and path not in methods:
            close = difflib.get_close_matches(path, methods, n=1, cutoff=0.8)  # /v1/embeddings is like nothing here
            raise NotFound(f"There is nothing at {path!a}{f'; did you mean {close[0]!r}?' if close else '.'}")
        if error.status_code in (404, 405):
            of_one_route = (error.headers or {}).get("Allow", "")
            allowed = ", ".join(sorted(methods.get(path, {of_one_route})))
            message = f"{path!a} does not take {request.method[:16]!a}, it takes {allowed}."
            raise MethodNotAllowed(message, allowed=allowed)
        raise InvalidValue("The request cannot be routed.")

    return raise_ours


async def watch_loop(metrics: Metrics) -> None:
    """Measure how late the event loop wakes a sleeper, for as long as this task runs."""
    loop = asyncio.get_running_loop()
    lags: deque[float] = deque(maxlen=_LAG_SAMPLES)
    while True:
        due = loop.time() + _LAG_INTERVAL_S
        await asyncio.sleep(_LAG_INTERVAL_S)
        lags.append(max(0.0, loop.time() - due))
        metrics.traffic.loop_turned(max(lags))
