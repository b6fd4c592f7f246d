"""Images on other hosts: fetched from those alone that an operator has named, within limits.

A URL of a request must not reach what is behind the server's firewall. So a host must be named by
--allowed-media-hosts, each of its addresses must be a public one, the connection goes to an address that was checked (a
name may resolve to another one a moment later), and a redirect is checked like the URL itself.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx2

from server.errors import InvalidValue, SettingsError
from server.http.images.source import ImageSource

MAX_REDIRECTS = 3
TIMEOUT_S = 10.0  # for a whole image, redirects included
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[\w.-]{1,255}")  # in any script
_GLOBAL_UNICAST, _NAT64 = ipaddress.IPv6Network("2000::/3"), ipaddress.IPv6Network("64:ff9b::/96")
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # from host and port to addresses


class _Refused(Exception):
    """A URL that is not fetched, or an answer that is no image."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_public(address: str) -> bool:
    """Return whether an address may be connected to: a global one that is not multicast, nor leads to another.

    Of IPv6 those are of 2000::/3, and those that a gateway turns into a public address of IPv4 (RFC 4291, 3056, 6052).
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv4Address):
        return _is_global(found)
    inner = found.ipv4_mapped or found.sixtofour or (_last_32_bits(found) if found in _NAT64 else None)
    if inner is not None:
        return _is_global(inner)
    return found in _GLOBAL_UNICAST and _is_global(found)


def _is_global(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_global and not address.is_multicast


def _last_32_bits(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class MediaFetcher:
    """Fetches images.

    hosts      that may be fetched from, in lower case
    max_bytes  of an image
    resolve, is_allowed, transport   of tests
    """

    hosts: frozenset[str]
    max_bytes: int
    timeout_s: float = TIMEOUT_S
    resolve: Resolve = resolve
    is_allowed: Callable[[str], bool] = is_public
    transport: httpx2.AsyncBaseTransport | None = None

    @classmethod
    def of(cls, allowed: str | None, max_bytes: int) -> "MediaFetcher":
        """`allowed`: names separated by commas. Raises SettingsError for one that no URL's host can be."""
        names = [name.strip().lower() for name in (allowed or "").split(",") if name.strip()]
        for name in names:
            if not _NAME.fullmatch(name) and not _is_address(name):
                raise SettingsError(
                    f"--allowed-media-hosts: {name!r} is no host name; give whole names or addresses, without scheme, "
                    "port, path or *, separated by commas"
                )
        return cls(frozenset(names), max_bytes)

    async def fetch(self, source: ImageSource) -> bytes:
        """Return an image's file. Raises InvalidValue."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._followed(source.url)
        except _Refused as error:
            reason = str(error)
        except TimeoutError:
            reason = f"it was not there within {self.timeout_s:g} s"
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError, ValueError) as error:
            reason = f"it cannot be fetched ({type(error).__name__})"
        raise InvalidValue(f"{source.place}: the image's URL is refused: {reason}.", param=source.place)

    async def _followed(self, url: str) -> bytes:
        async with httpx2.AsyncClient(transport=self.transport, trust_env=False, follow_redirects=False) as client:
            for _ in range(MAX_REDIRECTS + 1):
                found = await self._fetched(client, httpx2.URL(url))
                if isinstance(found, bytes):
                    return found
                url = str(httpx2.URL(url).join(found))
        raise _Refused(f"it has more than {MAX_REDIRECTS} redirects")

    async def _fetched(self, client: httpx2.AsyncClient, url: httpx2.URL) -> bytes | str:
        """Return the body, or where a redirect leads."""
        host, port = url.host.lower(), url.port or _PORTS.get(url.scheme)
        if port is None or url.userinfo:
            raise _Refused("only http and https without a user's name are fetched")
        if host not in self.hosts:
            allowed = "its host is not one of --allowed-media-hosts" if self.hosts else "this server fetches no images"
            raise _Refused(f"{allowed}; send the image as a data: URL")
        addresses = await self.resolve(host, port)
        if not addresses or not all(map(self.is_allowed, addresses)):
            raise _Refused("its host has an address that is not public")
        pinned = url.copy_with(host=addresses[0])
        headers = {"host": url.netloc.decode("ascii"), "accept": "image/*", "accept-encoding": "identity"}
        extensions = {"sni_hostname": host} if url.scheme == "https" else {}
        async with client.stream("GET", pinned, headers=headers, extensions=extensions) as answer:
            if answer.is_redirect:
                return answer.headers["location"]
            if answer.status_code != httpx2.codes.OK:
                raise _Refused(f"its host answers with status {answer.status_code}")
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise _Refused("its host sends it compressed, which was not asked for")
            body = bytearray()
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > self.max_bytes:
                    raise _Refused(f"it has more than {self.max_bytes} bytes")
            return bytes(body)
