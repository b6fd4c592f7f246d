"""Server-sent events of a completion, read no further than counting them takes: JSON is parsed in the last one only."""

import re

import msgspec

# Keys of an event that is more than text. Inside a JSON string a quote is escaped, so no text can look like these.
_SPECIAL = re.compile(rb'"choices":\s*\[\s*\]|"error":\s*[{"]|^data:\s*\[DONE\]')
_MAX_ERROR_CHARS = 300


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None


class _Special(msgspec.Struct, frozen=True):
    """The fields of an event that is more than text."""

    usage: _Usage | None = None
    error: object = None


class EventReader:
    """Parser of a body as it comes."""

    def __init__(self) -> None:
        self.num_events = 0  # that may hold text
        self.num_tokens: int | None = None  # as the server counts them
        self.error: str | None = None
        self._rest = b""

    def feed(self, data: bytes) -> bool:
        """Return whether `data` completed an event with text."""
        data = self._rest + data
        if b"\r" in data:  # looked for with the rest: a read may end between the two
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        num_before = self.num_events
        for event in events:
            if not event.startswith(b"data:"):
                continue  # a comment that keeps the connection alive, or another field
            if _SPECIAL.search(event) is None:
                self.num_events += 1
            else:
                self._read_special(event[len(b"data:") :].strip())
        return self.num_events > num_before

    def _read_special(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            return
        try:
            found = msgspec.json.decode(payload, type=_Special)
        except (msgspec.DecodeError, RecursionError):
            self.error = "an event is no JSON of a completion"
            return
        if found.error is not None:
            self.error = error_text(payload)
        elif found.usage is not None and found.usage.completion_tokens is not None:
            self.num_tokens = found.usage.completion_tokens


def error_text(payload: bytes) -> str:
    """The message in an error's envelope, or what there is, in one line."""
    try:
        error = msgspec.json.decode(payload)
    except msgspec.DecodeError:
        error = payload.decode(errors="replace")
    if isinstance(error, dict):
        error = error.get("error") or error
    if isinstance(error, dict):
        error = error.get("message") or error
    return " ".join(str(error).split())[:_MAX_ERROR_CHARS] or "an empty error"
