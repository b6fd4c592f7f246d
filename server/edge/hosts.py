"""The host names that a server answers to.

A web page whose own name is made to lead to 127.0.0.1 (DNS rebinding) may read what a server on loopback answers to its
visitor's browser. The browser sends the page's name as Host, so a server on loopback that asks for no key refuses it.
"""

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache

from server.edge.redact import plain_name
from server.errors import InvalidHeader, SettingsError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
ANY = "*"
_NAME = re.compile(r"[A-Za-z0-9._~%-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\]")
_HOST = re.compile(rf"({_NAME.pattern})(?::[0-9]{{0,5}})?")


class Hosts:
    """Checks the header Host of requests. `names`: those that are allowed; None allows any."""

    def __init__(self, names: Iterable[str] | None) -> None:
        self._names = None if names is None else tuple(_normal(name) for name in names)

    def check(self, host: bytes | None, *, http_version: str, is_open: bool) -> None:
        """Raises InvalidHeader for a Host that is missing, malformed or not allowed.

        HTTP/1.0 has no Host. `is_open` paths are for probes, which ask by the address of the moment: any name will do.
        """
        if host is None:
            if http_version == "1.0":
                return
            raise InvalidHeader("The request has no Host header, HTTP/1.1 requires one.")
        text = host.decode("latin-1")
        found = _HOST.fullmatch(text)
        if found is None:
            raise InvalidHeader(
                f"The Host header {plain_name(text)!r} is no host name or address with or without a port."
            )
        if self._names is None or is_open or _normal(found[1]) in self._names:
            return
        raise InvalidHeader(
            f"This server does not answer to the host {plain_name(found[1])!r}, only to {', '.join(self._names)}; "
            "whoever runs it may allow more by --allowed-hosts."
        )


def allowed_hosts(setting: str | None, address: str, *, has_keys: bool) -> Hosts:
    """Return the hosts of `--allowed-hosts`; without it loopback names on loopback without keys, else any host.

    address  what the server listens on
    Raises SettingsError for an entry that is no host name.
    """
    if setting is None:
        is_limited = not has_keys and is_loopback(address)
        return Hosts(dict.fromkeys((*LOOPBACK_NAMES, address)) if is_limited else None)
    names = [name.strip() for name in setting.split(",")]
    for name in names:
        if name != ANY and not _NAME.fullmatch(_normal(name)):
            raise SettingsError(
                f"--allowed-hosts: {name!r} is no host name; give names or addresses without ports, separated by "
                f"commas, or {ANY} for any"
            )
    return Hosts(None if ANY in names else names)


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches a server that listens on `address`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() == "localhost"


@lru_cache(256)  # of at most 257 characters each; without it 6 us of each request
def _normal(name: str) -> str:
    """One spelling for each host: in lower case, without the root's dot, IPv6 addresses in brackets and short."""
    try:
        return f"[{ipaddress.IPv6Address(name.strip('[]')).compressed}]"
    except ValueError:
        return name.lower().removesuffix(".")
