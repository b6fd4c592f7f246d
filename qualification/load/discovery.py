"""Which model answers at a URL."""

from urllib.parse import urlsplit

import httpx

from qualification.load.sample import Target

_PORTS = {"http": 80, "https": 443}


class DiscoveryError(Exception):
    """Nobody answers there as an OpenAI-compatible server does; one line."""


def discover(url: str, *, bearer: str | None = None, timeout_s: float = 10.0) -> tuple[Target, int | None]:
    """The target behind `url` (with or without /v1) and its longest context, if it says so. Raises DiscoveryError."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise DiscoveryError(f"{url} is no http or https URL")
    path = parts.path.rstrip("/").removesuffix("/v1")
    headers = {} if bearer is None else {"authorization": f"Bearer {bearer}"}
    try:
        port = parts.port or _PORTS[parts.scheme]
        base = f"{parts.scheme}://{parts.netloc}{path}"
        response = httpx.get(f"{base}/v1/models", headers=headers, timeout=timeout_s, trust_env=False)
        response.raise_for_status()
        entry = response.json()["data"][0]
        name, longest = entry["id"], entry.get("max_model_len")
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        line = (str(error).splitlines() or [""])[0]
        raise DiscoveryError(f"{url} names no model at /v1/models: {line or type(error).__name__}") from error
    return Target(parts.hostname, port, parts.scheme == "https", path, name, bearer), longest
