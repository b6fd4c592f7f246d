"""The short way of a request to its endpoint, past what the framework does for each request and nothing here uses."""

from collections.abc import Awaitable, Callable, Iterable

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from server.edge.context import context_of
from server.http.common.document import PlainRoute


class QuietFastAPI(FastAPI):
    """FastAPI without telemetry of its own: it would read the environment for each request, and at the start."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Starlette.__call__(self, scope, receive, send)


class Shortcut:
    """ASGI middleware right behind the guard: a POST to the path of a `PlainRoute` goes to its endpoint at once.

    The router would look at each route in turn, and put eight frames around the endpoint for exceptions that no
    endpoint raises: a quarter of a request's time in Python.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._endpoints: dict[str, Callable[[Request], Awaitable[Response]]] = {
            route.path: route.endpoint
            for route in routes
            if isinstance(route, PlainRoute) and route.methods == {"POST"} and "{" not in route.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(context_of(scope).path)
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
