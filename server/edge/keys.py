"""API keys with names, and the paths that they open."""

import hashlib
import hmac
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from qualification.common.key_file import UNNAMED, KeyFileError, NamedKey, named_keys_of
from server.errors import Forbidden, SettingsError, Unauthorized
from server.settings import Settings

logger = logging.getLogger(__name__)


class ApiKeys:
    """Digests and names of API keys. Comparing digests takes the same time whatever was sent."""

    def __init__(self, keys: Sequence[NamedKey | str]) -> None:
        named = [it if isinstance(it, NamedKey) else NamedKey(UNNAMED, it) for it in keys]
        self._names = tuple((_digest(it.key.encode()), it.name) for it in named)

    @classmethod
    def load(cls, file: Path, flag: str = "--api-key-file") -> "ApiKeys":
        """Raises SettingsError that names the flag."""
        try:
            keys = named_keys_of(file)
        except OSError as error:
            raise SettingsError(f"{flag} {file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise SettingsError(f"{flag} {file} is not UTF-8 at byte {error.start}") from None
        except KeyFileError as error:
            raise SettingsError(f"{flag} {file}: {error}") from None
        if not keys:
            raise SettingsError(f"{flag} {file}: holds no key")
        names: dict[str, str] = {}
        for it in keys:
            if names.setdefault(it.key, it.name) != it.name:
                raise SettingsError(f"{flag} {file}: holds one key under two names, {names[it.key]} and {it.name}")
        return cls(keys)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the order of the file, each once."""
        return tuple(dict.fromkeys(name for _, name in self._names))

    def name_of(self, digest: bytes) -> str | None:
        """The name of a key; None for a digest of none."""
        matches = [(hmac.compare_digest(digest, known), name) for known, name in self._names]
        return next((name for is_same, name in matches if is_same), None)

    def overlaps(self, other: "ApiKeys") -> bool:
        return any(other.name_of(digest) is not None for digest, _ in self._names)

    def replace_by(self, other: "ApiKeys") -> None:
        """Hold the keys of `other` from now on."""
        self._names = other._names


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a server: tenants' open all but operators' routes, operators' open everything."""

    tenants: ApiKeys | None = None
    operators: ApiKeys | None = None

    @classmethod
    def load(cls, settings: Settings) -> "Keys":
        """Read the files of the settings, at the start. Raises SettingsError, also for a key that is in both files."""
        keys = cls._read(settings)
        if keys.tenants is not None and keys.operators is None and settings.admin_port is None:
            logger.warning(
                "/metrics, /attention and /version answer 403: there are API keys, and neither --operator-key-file nor "
                "--admin-port"
            )
        return keys

    def reload(self, settings: Settings) -> bool:
        """Read the files again. Where they cannot be used the keys stay as they are. Return whether they were read."""
        try:
            found = self._read(settings)
        except SettingsError as error:
            logger.error("SIGHUP: the keys stay as they were: %s", error.message)
            return False
        for mine, theirs in ((self.tenants, found.tenants), (self.operators, found.operators)):
            if mine is not None and theirs is not None:  # which files there are does not change
                mine.replace_by(theirs)
        counts = [0 if it is None else len(it) for it in (self.tenants, self.operators)]
        logger.info("SIGHUP: %d API keys and %d operators' keys are read", *counts)
        return True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of tenants' keys, then of operators', each once."""
        found = [name for it in (self.tenants, self.operators) if it is not None for name in it.names]
        return tuple(dict.fromkeys(found))

    @classmethod
    def _read(cls, settings: Settings) -> "Keys":
        files = {"--api-key-file": settings.api_key_file, "--operator-key-file": settings.operator_key_file}
        keys = cls(*[None if file is None else ApiKeys.load(Path(file), flag) for flag, file in files.items()])
        if keys.tenants is not None and keys.operators is not None and keys.tenants.overlaps(keys.operators):
            raise SettingsError(
                f"--operator-key-file {settings.operator_key_file}: holds a key of --api-key-file "
                f"{settings.api_key_file}; leave it out there, an operator's key opens everything"
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
class Caller:
    """The owner of a request's key; without names where none is needed.

    digest  of the key: requests of one digest share computed pages and a rate limit
    """

    digest: bytes = b""
    name: str | None = None
    kind: KeyKind | None = None


ANYONE = Caller()


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

    def check(self, path: str, authorization: bytes | None) -> Caller:
        """Return the owner of the request, ANYONE where no key is needed. Raises Unauthorized and Forbidden."""
        tenants, operators = self.keys.tenants, self.keys.operators
        needed = self.needed_key(path)
        if needed is None:
            return ANYONE
        digest = _digest(_bearer(authorization))
        if operators is not None and (name := operators.name_of(digest)) is not None:
            return Caller(digest, name, KeyKind.OPERATOR)
        if tenants is None or (name := tenants.name_of(digest)) is None:
            raise Unauthorized("The API key is not valid here.")
        if needed is KeyKind.OPERATOR:
            how = "start the server with --operator-key-file or --admin-port" if operators is None else "send one"
            raise Forbidden(f"{path!a} needs an operator's key, this is a tenant's: {how}.")
        return Caller(digest, name, KeyKind.TENANT)


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
