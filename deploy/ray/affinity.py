"""Choice of a request's replica: the one that has computed the beginning of its prompt before."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

_PROMPT_BYTES = 1024  # of a prompt that is one text: whoever continues it sends these again
_KEY_CHARS = 32


class _Keyed(msgspec.Struct):
    """The fields of a request by which it is routed; others are skipped unread."""

    prompt_cache_key: msgspec.Raw = msgspec.Raw(b"null")
    system: msgspec.Raw = msgspec.Raw(b"null")
    instructions: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")
    input: msgspec.Raw = msgspec.Raw(b"null")
    prompt: msgspec.Raw = msgspec.Raw(b"null")


class _Message(msgspec.Struct):
    role: str = ""


def key_of(body: bytes | bytearray, headers: Mapping[bytes, bytes]) -> str | None:
    """The same text for requests that share a computed prefix; None where the body does not say.

    In this order: the client's header X-Session-Id, its field `prompt_cache_key`, its messages up to the first of the
    user, the first KiB of its prompt. Callers with different keys share no pages, so theirs differ.
    """
    caller = headers.get(b"authorization", b"") or headers.get(b"x-api-key", b"")
    session = headers.get(b"x-session-id")
    if session:
        return _digest(caller, b"session", session)
    try:
        fields = msgspec.json.decode(body, type=_Keyed)
    except (msgspec.DecodeError, ValueError):
        return None  # the replica says what is wrong with it
    if bytes(fields.prompt_cache_key) != b"null":
        return _digest(caller, b"key", bytes(fields.prompt_cache_key))
    for conversation in (fields.messages, fields.input, fields.prompt):
        if bytes(conversation) != b"null":
            return _digest(caller, bytes(fields.system), bytes(fields.instructions), *_beginning(conversation))
    return None


def _beginning(conversation: msgspec.Raw) -> list[bytes]:
    """The parts that every later turn sends again."""
    try:
        messages = msgspec.json.decode(conversation, type=list[msgspec.Raw])
        begun = []
        for message in messages:
            begun.append(bytes(message))
            if msgspec.json.decode(message, type=_Message).role == "user":
                return begun
    except (msgspec.DecodeError, ValueError):
        pass
    return [bytes(conversation)[:_PROMPT_BYTES]]


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=_KEY_CHARS // 2)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def ranked(key: str, replicas: Iterable[str]) -> list[str]:
    """The replicas in the order of this key (rendezvous hashing): one that comes or goes moves only its own keys."""
    return sorted(replicas, key=lambda name: hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest())


def chosen(key: str | None, loads: Mapping[str, int], max_excess: int) -> Sequence[Sequence[str]]:
    """Ranks of replicas to try, each rank's least loaded first; `loads` are requests of each replica.

    The key's own replica, where it has at most `max_excess` requests more than the least loaded one; then any.
    """
    everyone = list(loads)
    if key is None or not everyone:
        return [everyone]
    own = ranked(key, everyone)[0]
    if loads[own] - min(loads.values()) > max_excess:
        return [everyone]
    return [[own], everyone]
