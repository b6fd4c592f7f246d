"""Reaching a server: its address, its key, and the model that answers there."""

from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from qualification.common.key_file import keys_of
from qualification.load.sample import Target

_PORTS = {"http": 80, "https": 443}


class DiscoveryError(Exception):
    """No OpenAI-compatible server answers at an address. The message is one line."""


def first_key(file: Path) -> str:
    """Return the first key of a key file, for the bearer token. Raises ValueError for a file without any."""
    keys = keys_of(file)
    if not keys:
        raise ValueError(f"{file} holds no key")
    return keys[0]


def client_of(url: str, *, bearer: str | None = None, timeout_s: float, trust_env: bool = True) -> httpx2.Client:
    """Return a client for requests besides the load. Raises httpx2.InvalidURL."""
    headers = {} if bearer is None else {"authorization": f"Bearer {bearer}"}
    # Reading the certificates of all authorities takes 40 ms of a core, and plain HTTP asks for none.
    is_tls = httpx2.URL(url).scheme != "http"
    return httpx2.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=trust_env, verify=is_tls)


def discover(url: str, *, bearer: str | None = None, timeout_s: float = 10.0) -> tuple[Target, int | None]:
    """The target behind `url` (with or without /v1) and its longest context, if it says so. Raises DiscoveryError."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise DiscoveryError(f"{url} is no http or https URL")
    path = parts.path.rstrip("/").removesuffix("/v1")
    try:
        port = parts.port or _PORTS[parts.scheme]
        base = f"{parts.scheme}://{parts.netloc}{path}"
        with client_of(base, bearer=bearer, timeout_s=timeout_s, trust_env=False) as client:
            response = client.get("/v1/models")
        response.raise_for_status()
        entry = response.json()["data"][0]
        name, longest = entry["id"], entry.get("max_model_len")
        if not isinstance(name, str) or not isinstance(longest, int | None):
            raise TypeError(f"id {name!r}, max_model_len {longest!r}")
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError, RecursionError) as error:
        line = (str(error).splitlines() or [""])[0]
        raise DiscoveryError(f"{url} names no model at /v1/models: {line or type(error).__name__}") from error
    return Target(parts.hostname, port, parts.scheme == "https", path, name, bearer), longest
