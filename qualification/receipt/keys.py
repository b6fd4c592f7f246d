"""Public keys of receipts and their signatures (Ed25519)."""

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from qualification.common.regular_file import read_regular

ALGORITHM = "ed25519"
SIGNATURE_BYTES = 64
_KEY_BYTES = 32
_MAX_FILE_BYTES = 4096


class KeyFormatError(ValueError):
    """Data that should be a public key is none. The message is one line."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key by its 32 bytes."""

    raw: bytes

    @property
    def key_id(self) -> str:
        """The first 16 hexadecimal digits of SHA-256 of the 32 bytes."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    @property
    def text(self) -> str:
        """The 32 bytes in base64."""
        return base64.b64encode(self.raw).decode()

    def has_signed(self, data: bytes, signature: bytes) -> bool:
        """Return whether a signature is of this key and of exactly this data."""
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, data)
        except InvalidSignature:
            return False
        return True


def public_key_of(private: Ed25519PrivateKey) -> PublicKey:
    """The public half of a private key."""
    return PublicKey(private.public_key().public_bytes_raw())


def public_key_of_text(text: str) -> PublicKey:
    """The key that GET /version lists: 32 bytes in base64. Raises KeyFormatError."""
    try:
        raw = base64.b64decode(text.strip(), validate=True)
    except ValueError:
        raise KeyFormatError("a public key is 32 bytes in base64, or a PEM file; this is neither") from None
    if len(raw) != _KEY_BYTES:
        raise KeyFormatError(f"a public key has {_KEY_BYTES} bytes, this one has {len(raw)}")
    return PublicKey(raw)


def read_public_key(file: Path) -> PublicKey:
    """The public key of a file, in PEM or base64. Raises OSError and KeyFormatError."""
    data = read_regular(file, max_bytes=_MAX_FILE_BYTES)
    if b"-----BEGIN" not in data:
        return public_key_of_text(data.decode("ascii", "replace"))
    if b"PRIVATE KEY" in data:
        raise KeyFormatError("the file holds a private key; give the public one, as GET /version lists it")
    try:
        found = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise KeyFormatError("the PEM file holds no public key") from None
    if not isinstance(found, Ed25519PublicKey):
        raise KeyFormatError("the PEM file holds a public key of another algorithm than Ed25519")
    return PublicKey(found.public_bytes_raw())
