"""The application: every dependency is a parameter, so that a test can put a fake in its place."""

import asyncio
import contextlib
import difflib
import re
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from server.edge.body_memory import Bodies
from server.edge.context import context_of
from server.edge.cors import cors_options
from server.edge.guard import Guard, GuardLimits
from server.edge.hosts import allowed_hosts
from server.edge.keys import NO_KEYS, Access, Keys
from server.edge.rate_limits import RateLimits
from server.edge.routing import QuietFastAPI, Shortcut
from server.errors import InvalidValue, MethodNotAllowed, NotFound, SettingsError
from server.http import models
from server.http.anthropic import routes as anthropic
from server.http.common.document import document
from server.http.common.validation import RequestModel, field_names
from server.http.openai import routes as openai
from server.http.operations import routes as operations
from server.http.page.route import DOCS, page_routes
from server.http.page.route import PATH as PAGE
from server.http.peer_routes import path_here
from server.http.pooling.routes import PATHS as POOLING_PATHS
from server.http.pooling.routes import REQUESTS as POOLING_REQUESTS
from server.http.pooling.routes import pooling_routes
from server.http.responses import routes as responses
from server.http.services import Services
from server.settings import Task
from server.telemetry.metrics import Metrics

# For probes and browsers, which begin without a key.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", PAGE, DOCS})
_GENERATING = (
    "/v1/completions",
    "/v1/chat/completions",
    responses.RESPONSES,
    anthropic.MESSAGES,
    anthropic.COUNT_TOKENS,
)
_OF_ANY_TASK = ("/tokenize", "/detokenize")
_LAG_INTERVAL_S = 0.25
_LAG_SAMPLES = 20  # the gauge shows the longest of these: 5 seconds
_TRACE_CLOSE_S = 5.0


def create_app(services: Services, keys: Keys = NO_KEYS) -> FastAPI:
    """The API; its lifespan starts and closes the engine. Without an admin port it has the operators' routes too.

    Raises SettingsError for allowed hosts or origins that are none, limits of keys without keys, and a root path that
    is none; ModelError for a tokenizer that cannot distinguish special tokens from text that spells them.
    """
    settings = services.settings
    if services.model.template is not None and not settings.special_tokens_in_text:
        _ = services.model.tokenizer.special_tokens  # built here, and not in the first request: a large one takes 1 s
    routers = [
        *_task_routers(services),
        models.model_routes(services),
        operations.health_routes(services),
        operations.load_routes(services),
        page_routes(),
    ]
    if settings.admin_port is None:
        routers += _operator_routers(services)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001 -- FastAPI's signature
        watch = asyncio.create_task(watch_loop(services.telemetry.metrics))
        await services.engine.start()
        try:
            yield
        finally:
            await services.engine.close()
            services.grammars.close()
            if services.images is not None:
                services.images.close()
            watch.cancel()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(services.telemetry.tracing.close), _TRACE_CLOSE_S)

    limits, root_path = RateLimits.of(settings), _checked_root_path(settings.root_path)
    app = _application(routers, services, keys, lifespan, rate_limits=limits, root_path=root_path)
    cors = cors_options(settings)
    if cors is not None:  # around the guard: preflights have no key, and refusals are to be read too
        app.add_middleware(CORSMiddleware, **cors)
    services.telemetry.metrics.traffic.create_keys(keys.names)
    return app


def _task_routers(services: Services) -> list[APIRouter]:
    """The routes of what the model is served for; of others only those that need no engine."""
    generating = openai.routes(services)
    if services.model.pooling is None:
        return [generating, responses.routes(services), anthropic.routes(services)]
    any_task = APIRouter()
    any_task.routes.extend(it for it in generating.routes if isinstance(it, APIRoute) and it.path in _OF_ANY_TASK)
    return [any_task, pooling_routes(services, services.model.pooling)]


def _of_other_tasks(services: Services) -> dict[str, str]:
    """The paths that servers of other tasks have, each with why this one has not."""
    task = services.model.task
    tasks = POOLING_PATHS | dict.fromkeys(_GENERATING, Task.GENERATE)
    here = f"this one is served for {task.value!r} (--task)"
    return {
        path: f"needs a model for the task {needed.value!r}, {here}"
        for path, needed in tasks.items()
        if needed is not task
    }


def create_admin_app(services: Services, keys: Keys = NO_KEYS) -> FastAPI:
    """Health, metrics and the plan, for a port of its own that only operators reach; only their keys count there.

    Raises SettingsError for allowed hosts that are none.
    """
    routers = [operations.health_routes(services), page_routes(), *_operator_routers(services)]
    return _application(routers, services, Keys(operators=keys.operators), None)


def _operator_routers(services: Services) -> list[APIRouter]:
    return [operations.operator_routes(services), operations.order_routes(services)]


def _checked_root_path(path: str | None) -> str:
    """The path before every route, empty for none. Raises SettingsError."""
    if path is None or path == "/":
        return ""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise SettingsError(f"--root-path {path}: expected a path such as /llm, without a slash at its end")
    return path


def _application(
    routers: Sequence[APIRouter],
    services: Services,
    keys: Keys,
    lifespan: Any,
    *,
    rate_limits: RateLimits | None = None,
    root_path: str = "",
) -> FastAPI:
    """An application of these routes behind a guard, with its document."""
    app = QuietFastAPI(
        title="Hallmark",
        version=services.program.version,
        redirect_slashes=False,  # behind TLS a redirect leads to http
        docs_url=None,  # FastAPI's loads a script of others, which could read the keys of the page at /
        redoc_url=None,
        lifespan=lifespan,
    )
    methods: defaultdict[str, set[str]] = defaultdict(set)
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute)  # a router within another would hide its paths
            methods[route.path] |= route.methods or set()
        # Not by include_router, which would match each request's path twice.
        app.router.routes.extend(router.routes)
    of_operators = {
        route.path for it in _operator_routers(services) for route in it.routes if isinstance(route, APIRoute)
    }
    port = services.settings.admin_port
    on_admin_port = f"is on the server's admin port{f', {port}' if port else ''}"
    elsewhere = dict.fromkeys(of_operators - methods.keys(), on_admin_port)
    if lifespan is not None:  # the API's port
        elsewhere |= _of_other_tasks(services)
        if services.model.pooling is None:
            elsewhere |= responses.NOT_IMPLEMENTED
    app.add_exception_handler(HTTPException, _raiser(methods, elsewhere))
    services.telemetry.metrics.traffic.create_routes((*methods, "other"))
    settings = services.settings
    access = Access(keys, OPEN_PATHS, frozenset(of_operators & methods.keys()))
    app.add_middleware(Shortcut, routes=tuple(app.router.routes))
    app.add_middleware(
        Guard,
        limits=GuardLimits(settings.max_body_bytes, settings.receive_timeout_s, settings.request_timeout_s),
        bodies=Bodies(settings.max_queued_bytes),
        access=access,
        hosts=allowed_hosts(settings.allowed_hosts, settings.host, has_keys=keys.tenants is not None),
        metrics=services.telemetry.metrics,
        lifecycle=services.lifecycle,
        routes=frozenset(methods),
        fields=field_names(),
        rate_limits=rate_limits,
        root_path=root_path,
        dialect_of=models.dialect_of,
    )
    of_task: tuple[type[RequestModel], ...]
    events: tuple[type[BaseModel], ...] = models.EVENTS
    if services.model.pooling is None:
        of_task = (*openai.REQUESTS, *responses.REQUESTS, *anthropic.REQUESTS)
        events = (*openai.EVENTS, *responses.EVENTS, *anthropic.EVENTS)
    else:
        of_task = (*openai.TOKEN_REQUESTS, *POOLING_REQUESTS[services.model.pooling.task])
    document(app, access, (*of_task, *operations.REQUESTS), events)
    return app


def _raiser(
    methods: Mapping[str, set[str]], elsewhere: Mapping[str, str]
) -> Callable[[Request, Exception], Awaitable[Response]]:
    """A handler that raises what routing refuses as one of our errors, which the guard answers with.

    methods    by path, of every route
    elsewhere  paths of other ports and servers, and those that are not implemented, each with where or why
    """

    async def raise_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = context_of(request.scope).path[:128]
        if path in elsewhere:
            raise NotFound(f"{path!a} {elsewhere[path]}.")
        if error.status_code == 404 and path not in methods:
            here = path_here(path, methods)
            if here is not None:
                raise NotFound(f"There is nothing at {path!a}; use {here!r}.")
            close = difflib.get_close_matches(path, methods, n=1, cutoff=0.8)
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
