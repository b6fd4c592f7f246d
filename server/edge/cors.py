"""Web pages of other origins: which of them a browser lets call this API (CORS)."""

import re
from typing import Any

from server.errors import SettingsError
from server.settings import Settings

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,*]+")
_METHODS = ("GET", "HEAD", "POST", "DELETE")
_PREFLIGHT_S = 600  # for which a browser remembers the answer
# Headers of answers that a page may read beside those that every page may.
_READABLE = (
    "retry-after",
    "traceparent",
    "x-request-id",
    "request-id",  # Anthropic's name of it
    "x-hallmark-status",
    "x-hallmark-layers",
    "x-hallmark-plan",
    "x-hallmark-receipt",
    *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
)


def cors_options(settings: Settings) -> dict[str, Any] | None:
    """Options of Starlette's CORSMiddleware; None where no origin is allowed.

    A key comes in the header Authorization, which a page sends only if it has the key: cookies and the like are
    never asked for. Raises SettingsError for an origin that is none, and for any origin beside keys.
    """
    if settings.allowed_origins is None:
        return None
    origins = [origin.strip().lower() for origin in settings.allowed_origins.split(",")]
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise SettingsError(
                f"--allowed-origins: {origin!r} is no origin; give origins such as https://app.example or "
                f"http://localhost:3000, without a path, separated by commas, or {ANY} for any"
            )
    if ANY in origins and (settings.api_key_file is not None or settings.operator_key_file is not None):
        raise SettingsError(f"--allowed-origins {ANY} is refused where there are API keys: name the origins")
    return {
        "allow_origins": origins,
        "allow_methods": _METHODS,
        "allow_headers": ["*"],
        "expose_headers": _READABLE,
        "allow_private_network": True,
        "max_age": _PREFLIGHT_S,
    }
