"""GET / and GET /docs, with a policy under which a browser runs nothing but the page's own scripts."""

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from server.edge.routing import PlainRoute

_FOLDER = Path(__file__).parent
PATH = "/"
DOCS = "/docs"
_HTML: dict[int | str, dict[str, Any]] = {
    200: {"description": "HTML.", "content": {"text/html": {"schema": {"type": "string"}}}}
}


def page_routes() -> APIRouter:
    """Return the pages' routes, open to everyone: they hold no secret, and ask for a key where their calls need one."""
    router = APIRouter(route_class=PlainRoute, tags=["page"])
    page, docs = _answer_of("page.html"), _answer_of("docs.html")

    async def show(request: Request) -> Response:  # noqa: ARG001 -- an endpoint of PlainRoute
        """Return a page with a chat, the plan and live figures, for a browser."""
        return page()

    async def show_docs(request: Request) -> Response:  # noqa: ARG001
        """Return a page that shows /openapi.json, for a browser."""
        return docs()

    for path, endpoint in ((PATH, show), (DOCS, show_docs)):
        router.add_api_route(path, endpoint, methods=["GET"], response_class=Response, responses=_HTML)
    return router


def _answer_of(name: str) -> Callable[[], Response]:
    """Return a function that makes the answer with a page of this folder."""
    page = whole_page(name)
    headers = {
        "content-security-policy": policy_of(page),
        "content-type": "text/html; charset=utf-8",
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    content = page.encode()
    return lambda: Response(content, headers=headers)


def whole_page(name: str) -> str:
    """Return a page with the content of the styles and scripts that it names, so that it is one answer."""

    def read(file: str) -> str:
        return _FOLDER.joinpath(file).read_text("utf-8")

    page = re.sub(
        r'<link rel="stylesheet" href="([\w.]+)">', lambda found: f"<style>\n{read(found[1])}</style>", read(name)
    )
    return re.sub(r'<script src="([\w./]+)"></script>', lambda found: f"<script>\n{read(found[1])}</script>", page)


def policy_of(page: str) -> str:
    """The Content-Security-Policy that allows the page's own styles, its own scripts and calls to its own server.

    No script may make HTML of a string: what a model writes can only become text.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_sources_of(page, 'script')}",
            f"style-src {_sources_of(page, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _sources_of(page: str, tag: str) -> str:
    """The source expressions of the elements `tag`, by the digests of their content."""
    digests = (hashlib.sha256(it.encode()).digest() for it in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
    return " ".join(f"'sha256-{base64.b64encode(it).decode()}'" for it in digests)
