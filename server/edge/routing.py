"""Routes without what the framework does for each request and nothing here uses."""

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, cast

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from server.edge.context import context_of


class QuietFastAPI(FastAPI):
    """FastAPI without telemetry of its own: it would read the environment for each request, and at the start."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Starlette.__call__(self, scope, receive, send)


class PlainRoute(APIRoute):
    """A route whose endpoint takes the request and returns a response, by itself.

    FastAPI would parse and validate the body on the event loop, answer errors with the input in them, and take 30 us to
    find that there are no dependencies.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return cast(Callable[[Request], Coroutine[Any, Any, Response]], self.endpoint)


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
