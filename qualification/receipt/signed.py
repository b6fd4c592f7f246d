"""A receipt as clients have it: the content, the id of the key that signed it, and the signature."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from qualification.receipt.content import (
    READ_VERSIONS,
    Content,
    ReceiptAnswer,
    canonical,
    digest,
    digest_of_ids,
)
from qualification.receipt.keys import SIGNATURE_BYTES, PublicKey

MAX_BYTES = 8 * 2**20  # as a server's --max-body-bytes; ids of a million tokens take 7 MB
FIELD = "receipt"  # of the answer that a receipt is part of


class ReceiptError(ValueError):
    """A receipt that cannot be used. The message is one line and repeats no text of it."""


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    content: dict[str, Any]
    key_id: str
    signature: str  # base64


@dataclass(frozen=True, slots=True)
class Receipt:
    """A well-formed receipt, whose signature is yet to be looked at."""

    content: Content
    signed: bytes  # the canonical content, as it came
    key_id: str
    signature: bytes
    answer: Mapping[str, Any] | None = None  # that it came in

    @property
    def digest(self) -> str:
        return digest(self.signed)


def sealed(content: bytes, key_id: str, signature: bytes) -> bytes:
    """The JSON of a receipt, of canonical content and its signature."""
    text = base64.b64encode(signature)
    return b'{"content":%b,"key_id":"%b","signature":"%b"}' % (content, key_id.encode(), text)


def parse_receipt(data: bytes) -> Receipt:
    """Read a receipt, or the whole answer or stream of events that it is part of. Raises ReceiptError."""
    if len(data) > MAX_BYTES:
        raise ReceiptError(f"it has more than {MAX_BYTES} bytes, the limit of a receipt")
    is_stream = data.lstrip()[:6] in (b"data: ", b"event:")
    try:
        found = msgspec.json.decode(_event_with_receipt(data) if is_stream else data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReceiptError(f"it is not JSON: {_line(error)}") from None
    except RecursionError:
        raise ReceiptError("it is nested too deeply for a receipt") from None
    receipt = receipt_of(found)
    return replace(receipt, answer=None) if is_stream else receipt


def _event_with_receipt(data: bytes) -> bytes:
    """The data of the last event that has a receipt; empty where none has."""
    events = [line[6:] for line in data.splitlines() if line.startswith(b"data: ") and b'"receipt":{' in line]
    return events[-1] if events else b""


def receipt_of(found: object) -> Receipt:
    """A receipt of parsed JSON, or of the answer that it is part of. Raises ReceiptError."""
    answer = None
    if isinstance(found, dict) and FIELD in found:
        answer, found = found, found[FIELD]
    if not isinstance(found, dict) or not isinstance(found.get("content"), dict):
        raise ReceiptError("it is no receipt: an object with content, key_id and signature")
    version = found["content"].get("version")
    if version not in READ_VERSIONS or isinstance(version, bool):
        known = " and ".join(map(str, READ_VERSIONS))
        what = f"version {version}" if isinstance(version, int) else "no version"
        raise ReceiptError(f"it has {what}, this program reads versions {known}: use the program of that server")
    try:
        envelope = msgspec.convert(found, _Envelope)
        content = msgspec.convert(envelope.content, Content)
        signed = canonical(envelope.content)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ReceiptError(f"it is malformed: {_line(error)}") from None
    except RecursionError:
        raise ReceiptError("it is nested too deeply for a receipt") from None
    try:
        signature = base64.b64decode(envelope.signature, validate=True)
    except ValueError:
        raise ReceiptError("its signature is not base64") from None
    if len(signature) != SIGNATURE_BYTES:
        raise ReceiptError(f"its signature has {len(signature)} bytes, those of Ed25519 have {SIGNATURE_BYTES}")
    return Receipt(content, signed, envelope.key_id, signature, answer)


def check_signature(receipt: Receipt, keys: Sequence[PublicKey]) -> PublicKey:
    """Return the key that has signed it. Raises ReceiptError where none of `keys` has, or a byte has changed."""
    named = [key for key in keys if key.key_id == receipt.key_id]
    for key in named or keys:
        if key.has_signed(receipt.signed, receipt.signature):
            return key
    if named:
        raise ReceiptError(f"its signature is wrong: it was changed since key {receipt.key_id} signed it")
    known = ", ".join(key.key_id for key in keys) or "none"
    raise ReceiptError(f"key {_name(receipt.key_id)} signed it, the keys at hand are {known}: give --key FILE")


def check_consistent(content: Content) -> None:
    """Raises ReceiptError where counts or digests are of other token ids than those that it holds."""
    for place, prompt in enumerate(content.prompts):
        _check_ids(f"prompts[{place}]", prompt.token_ids, prompt.num_tokens, prompt.token_ids_digest)
    for place, answer in enumerate(content.answers):
        where = f"answers[{place}]"
        _check_ids(where, answer.token_ids, answer.num_tokens, answer.token_ids_digest)
        if not 0 <= answer.prompt < len(content.prompts):
            raise ReceiptError(f"it is malformed: {where}.prompt names none of the prompts")
        bindings = answer.sampling.bindings
        if bindings is not None and digest(canonical(bindings)) != answer.sampling.bindings_digest:
            raise ReceiptError(f"it is malformed: {where} has other bindings than its digest says")
        logprobs_of(answer, where)


def logprobs_of(answer: ReceiptAnswer, where: str = "answers") -> bytes | None:
    """Packed log probabilities of an answer's tokens, fp32, little endian. Raises ReceiptError."""
    if answer.logprobs is None:
        return None
    try:
        packed = base64.b64decode(answer.logprobs, validate=True)
    except ValueError:
        raise ReceiptError(f"it is malformed: {where}.logprobs is not base64") from None
    if len(packed) != 4 * answer.num_tokens:
        raise ReceiptError(f"it is malformed: {where}.logprobs has {len(packed)} bytes, not 4 for each token")
    return packed


def _check_ids(where: str, token_ids: list[int] | None, num_tokens: int, expected: str) -> None:
    if token_ids is None:
        return
    if not all(0 <= token_id < 2**32 for token_id in token_ids):
        raise ReceiptError(f"it is malformed: {where} has a token id that is none")
    if len(token_ids) != num_tokens or digest_of_ids(token_ids) != expected:
        raise ReceiptError(f"it is malformed: {where} has other token ids than its count and digest say")


def _name(key_id: str) -> str:
    return key_id if key_id.isalnum() and len(key_id) <= 64 else "of a malformed name"


def _line(error: Exception) -> str:
    """One line of a decoder's error, which repeats names of fields at most."""
    return " ".join(str(error).split())[:200].encode("ascii", "backslashreplace").decode()
