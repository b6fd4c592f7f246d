"""API keys: who may call what needs one."""

import hashlib
import hmac
from pathlib import Path

from qualification.key_file import keys_of
from server.errors import SettingsError, Unauthorized


class ApiKeys:
    """Holds digests only. Comparing them takes the same time whatever was sent."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @classmethod
    def load(cls, file: Path) -> "ApiKeys":
        """Raises SettingsError."""
        try:
            keys = keys_of(file)
        except OSError as error:
            raise SettingsError(f"--api-key-file {file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise SettingsError(f"--api-key-file {file} is not UTF-8 at byte {error.start}") from None
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
