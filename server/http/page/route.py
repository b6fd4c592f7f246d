"""GET /, with a policy under which a browser runs nothing but the page's own script."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from server.http.common.document import PlainRoute

PATH = "/"
_FILE = Path(__file__).with_name("page.html")


def page_routes() -> APIRouter:
    """Return the page's route, open to everyone: it holds no secret, and asks for a key where its calls need one."""
    router = APIRouter(route_class=PlainRoute, tags=["page"])
    page = _FILE.read_bytes()
    headers = {
        "content-security-policy": policy_of(page.decode()),
        "content-type": "text/html; charset=utf-8",
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def show(request: Request) -> Response:  # noqa: ARG001 -- an endpoint of PlainRoute
        """Return a page with a chat, the plan and live figures, for a browser."""
        return Response(page, headers=headers)

    html: dict[int | str, dict[str, Any]] = {
        200: {"description": "HTML.", "content": {"text/html": {"schema": {"type": "string"}}}}
    }
    router.add_api_route(PATH, show, methods=["GET"], response_class=Response, responses=html)
    return router


def policy_of(page: str) -> str:
    """The Content-Security-Policy that allows the page's one style, its one script and calls to its own server.

    No script may make HTML of a string: what a model writes can only become text.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_source_of(page, 'script')}",
            f"style-src {_source_of(page, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _source_of(page: str, tag: str) -> str:
    """The source expression of the only element `tag`, by the digest of its content."""
    [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
