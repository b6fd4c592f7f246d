"""API keys, and the paths that they open."""

import hashlib
import hmac
import logging
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from qualification.common.key_file import keys_of
from server.errors import Forbidden, SettingsError, Unauthorized
from server.settings import Settings

logger = logging.getLogger(__name__)


class ApiKeys:
    """Holds digests only. Comparing them takes the same time whatever was sent."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @classmethod
    def load(cls, file: Path, flag: str = "--api-key-file") -> "ApiKeys":
        """Raises SettingsError that names the flag."""
        try:
            keys = keys_of(file)
        except OSError as error:
            raise SettingsError(f"{flag} {file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise SettingsError(f"{flag} {file} is not UTF-8 at byte {error.start}") from None
        if not keys:
            raise SettingsError(f"{flag} {file}: holds no key")
        return cls(keys)

    def __contains__(self, digest: bytes) -> bool:
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)

    def overlaps(self, other: "ApiKeys") -> bool:
        return any(digest in other for digest in self._digests)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a server: tenants' open all but operators' routes, operators' open everything."""

    tenants: ApiKeys | None = None
    operators: ApiKeys | None = None

    @classmethod
    def load(cls, settings: Settings) -> "Keys":
        """Raises SettingsError, also for a key that is in both files."""
        files = {"--api-key-file": settings.api_key_file, "--operator-key-file": settings.operator_key_file}
        keys = cls(*[None if file is None else ApiKeys.load(Path(file), flag) for flag, file in files.items()])
        if keys.tenants is not None and keys.operators is not None and keys.tenants.overlaps(keys.operators):
            raise SettingsError(
                f"--operator-key-file {settings.operator_key_file}: holds a key of --api-key-file "
                f"{settings.api_key_file}; leave it out there, an operator's key opens everything"
            )
        if keys.tenants is not None and keys.operators is None and settings.admin_port is None:
            logger.warning(
                "/metrics, /attention and /version answer 403: there are API keys, and neither --operator-key-file nor "
                "--admin-port"
            )
        return keys


NO_KEYS = Keys()


class KeyKind(Enum):
    """Owners of keys; an operator's key opens a tenant's routes too."""

    TENANT = "tenants"
    OPERATOR = "operators"

    def opens(self, needed: "KeyKind") -> bool:
        return self in (needed, KeyKind.OPERATOR)


@dataclass(frozen=True, slots=True)
class Access:
    """The key that each path needs.

    open_paths      for probes; they need no key
    operator_paths  show or change the whole server (metrics, plan, attestation, quarantine): they need an operator's
                    key where any key is known
    Every other path, known or not, needs a tenant's or an operator's key where tenants' keys are known.
    """

    keys: Keys
    open_paths: frozenset[str]
    operator_paths: frozenset[str]

    def needed_key(self, path: str) -> KeyKind | None:
        """Return the kind of key that a path needs, or None."""
        tenants, operators = self.keys.tenants, self.keys.operators
        if path in self.open_paths or (tenants is None and operators is None):
            return None
        if path in self.operator_paths:
            return KeyKind.OPERATOR
        return None if tenants is None else KeyKind.TENANT

    def check(self, path: str, authorization: bytes | None) -> bytes:
        """The tenant: the digest of the key, empty where none is needed. Raises Unauthorized and Forbidden."""
        tenants, operators = self.keys.tenants, self.keys.operators
        needed = self.needed_key(path)
        if needed is None:
            return b""
        digest = _digest(_bearer(authorization))
        if operators is not None and digest in operators:
            return digest
        if tenants is None or digest not in tenants:
            raise Unauthorized("The API key is not valid here.")
        if needed is KeyKind.OPERATOR:
            how = "start the server with --operator-key-file or --admin-port" if operators is None else "send one"
            raise Forbidden(f"{path!a} needs an operator's key, this is a tenant's: {how}.")
        return digest


def cache_salt_of(tenant: bytes, salt: str | None) -> bytes:
    """Digest of a request's tenant and its own salt, which keeps its computed pages apart; empty without both."""
    if not tenant and salt is None:
        return b""
    return hashlib.sha256(tenant + b"/" + (salt or "").encode("utf-8", "surrogatepass")).digest()


def _bearer(authorization: bytes | None) -> bytes:
    scheme, _, key = (authorization or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        raise Unauthorized("This server needs an API key: send the header 'Authorization: Bearer KEY'.")
    return key.strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
