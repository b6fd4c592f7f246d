"""API keys: who may call what needs one."""

import hashlib
import hmac
from pathlib import Path

from server.errors import SettingsError, Unauthorized


class ApiKeys:
    """Holds digests only. Comparing them takes the same time whatever was sent."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @classmethod
    def load(cls, file: Path) -> "ApiKeys":
        """One key a line; blank lines and lines that begin with # are skipped. Raises SettingsError."""
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--api-key-file {file}: cannot be read: {error}") from None
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise SettingsError(f"--api-key-file {file}: holds no key")
        return cls(keys)

    def check(self, authorization: bytes | None) -> bytes:
        """The tenant: the digest of his key. Raises Unauthorized unless the header is `Bearer` and one of the keys."""
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized("This server needs an API key: send the header 'Authorization: Bearer KEY'.")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise Unauthorized("The API key is not valid here.")
        return digest


def cache_salt_of(tenant: bytes, salt: str | None) -> bytes:
    """What keeps a request's computed pages apart: its tenant, empty where nobody needs a key, and its own salt."""
    if not tenant and salt is None:
        return b""
    return hashlib.sha256(tenant + b"/" + (salt or "").encode("utf-8", "surrogatepass")).digest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
