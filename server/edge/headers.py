"""Checks of a request's headers: their size, doubled Host or keys, and a JSON body."""

from collections.abc import Mapping, Sequence

from server.edge.redact import plain_name
from server.errors import HeadersTooLarge, InvalidHeader, UnsupportedMediaType

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
_SINGLE = (b"host", b"authorization", b"x-api-key")  # of two, another program may take another than we


def check_fields(fields: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises HeadersTooLarge for too many or too large headers, InvalidHeader for a doubled Host or key."""
    num_bytes = sum(len(name) + len(value) for name, value in fields)
    if len(fields) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
        raise HeadersTooLarge(
            f"At most {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes are taken, "
            f"got {len(fields)} of {num_bytes} bytes."
        )
    names = [name for name, _ in fields]
    for name in _SINGLE:
        if (count := names.count(name)) > 1:
            raise InvalidHeader(f"The request has {count} {name.decode().title()} headers, send one.")


def check_content(method: str, headers: Mapping[bytes, bytes]) -> None:
    """Raises UnsupportedMediaType for a POST that is no JSON by its headers, and for a compressed body."""
    if method == "POST":
        given = headers.get(b"content-type", b"")
        if given.partition(b";")[0].strip().lower() != b"application/json":
            # Also keeps a foreign web page from posting without a preflight.
            what = f"{_plain(given)!r}" if given else "none"
            raise UnsupportedMediaType(f"Send the header 'Content-Type: application/json', got {what}.")
    coding = headers.get(b"content-encoding", b"identity")
    if coding.strip().lower() not in (b"", b"identity"):
        raise UnsupportedMediaType(f"The body must not be compressed, its Content-Encoding is {_plain(coding)!r}.")


def _plain(value: bytes) -> str:
    """A header's value for a message."""
    return plain_name(value.decode("latin-1"))
