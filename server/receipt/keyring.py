"""The private key that signs receipts, and the public ones that are listed."""

import contextlib
import logging
import os
import stat
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from kernels.system.whole_file import write_whole
from qualification.common.regular_file import read_regular
from qualification.receipt.keys import PublicKey, public_key_of
from server.errors import SettingsError
from server.settings import Settings

logger = logging.getLogger(__name__)

OWN_FILE = "receipt_key.pem"  # in the cache folder
FLAG = "--receipt-key-file"
_MAX_BYTES = 64 * 1024
_OTHERS = (
    stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
)  # a mounted secret may be readable by its group, as Kubernetes does


class KeyRing:
    """Signs with the current key. Keys of before stay listed until the process ends."""

    def __init__(self, private: Ed25519PrivateKey, file: Path | None = None, *, is_own: bool = True) -> None:
        """file    that the key is read from again; None: it is kept nowhere
        is_own  whether the server makes the key; else an operator does"""
        self._private = private
        self._file = file
        self._is_own = is_own
        self._keys = [public_key_of(private)]  # the current one first

    @classmethod
    def load(cls, settings: Settings) -> "KeyRing":
        """Read the key, or make the first one. Raises SettingsError for a file that holds none, or is open to others.

        Where the cache folder cannot be written to, the key is of this process alone, and a warning says so.
        """
        if settings.receipt_key_file is not None:
            file = Path(settings.receipt_key_file)
            return cls(_read(file, FLAG), file, is_own=False)
        file = settings.cache_path / OWN_FILE
        if not os.path.lexists(file):
            try:
                _write_first(file, Ed25519PrivateKey.generate())
            except OSError as error:
                logger.warning(
                    "the key of receipts cannot be kept in %s (%s): after a restart there is another one; %s names a "
                    "file that holds one",
                    *(file.parent, error.strerror or error, FLAG),
                )
                return cls(Ed25519PrivateKey.generate())
        return cls(_read(file, "the key of receipts"), file)

    @property
    def public_keys(self) -> tuple[PublicKey, ...]:
        """The current key and then those of before, the latest first."""
        return tuple(self._keys)

    @property
    def key_id(self) -> str:
        return self._keys[0].key_id

    def sign(self, data: bytes) -> bytes:
        """The 64 bytes of a signature of the current key."""
        return self._private.sign(data)

    def rotate(self) -> bool:
        """Take another key, on SIGHUP: the one that is in the file now, or a new one where the server makes them.

        Where none can be read or written, the key stays as it is. Returns whether it has changed.
        """
        try:
            private = self._next()
        except (SettingsError, OSError) as error:
            logger.error("SIGHUP: receipts are signed by the key of before: %s", error)
            return False
        found = public_key_of(private)
        if found == self._keys[0]:
            logger.info("SIGHUP: the key of receipts is still %s", found.key_id)
            return False
        before = self.key_id
        self._private = private
        self._keys = [found, *(key for key in self._keys if key != found)]
        logger.info(
            "SIGHUP: receipts are signed by key %s; %s stays listed until the server ends", found.key_id, before
        )
        return True

    def _next(self) -> Ed25519PrivateKey:
        if self._file is None:
            return Ed25519PrivateKey.generate()
        if not self._is_own:
            return _read(self._file, FLAG)
        with contextlib.suppress(SettingsError):
            found = _read(self._file, "the key of receipts")
            if public_key_of(found) != self._keys[0]:  # another server of this folder has made a new one
                return found
        private = Ed25519PrivateKey.generate()
        write_whole(self._file, _pem(private), mode=0o600)
        return private


def _read(file: Path, what: str) -> Ed25519PrivateKey:
    """The private key of a PEM file. Raises SettingsError, which repeats nothing of the file."""
    try:
        data = read_regular(file, max_bytes=_MAX_BYTES)
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError as error:
        raise SettingsError(f"{what} {file} cannot be read: {error.strerror or error}") from None
    if mode & _OTHERS:
        raise SettingsError(
            f"{what} {file} has mode {mode:04o}, so that others may read or change it: expected 0600 (chmod 600 {file})"
        )
    try:
        found = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise SettingsError(
            f"{what} {file} holds no private key in PEM without a password; make one with "
            f"`openssl genpkey -algorithm ed25519 -out {file}`"
        ) from None
    if not isinstance(found, Ed25519PrivateKey):
        raise SettingsError(f"{what} {file} holds a key of another algorithm than Ed25519")
    return found


def _write_first(file: Path, private: Ed25519PrivateKey) -> None:
    """Write a key where there is none; one that another process writes at the same time stays. Raises OSError."""
    with TemporaryDirectory(dir=_made(file.parent), prefix=f".{file.name}.") as folder:
        beside = Path(folder) / file.name
        write_whole(beside, _pem(private), mode=0o600)
        with contextlib.suppress(FileExistsError):
            os.link(beside, file)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _pem(private: Ed25519PrivateKey) -> bytes:
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
