"""Prompts that come as token ids: looked at by msgspec, in a few nanoseconds an id."""

from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from server.edge.redact import shown
from server.errors import InvalidValue

_IDS = Annotated[list[int], Meta(min_length=1)]


def are_ids(value: Any, kind: Any = _IDS) -> bool:
    """Whether it is a list of integers and nothing else, at least one; `kind`: such a list with limits."""
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter of half a surrogate pair, for a text
        return False
    return isinstance(value, list)


def ids_of(value: Any, param: str) -> list[int]:
    """Token ids, at least one. Raises InvalidValue."""
    if not are_ids(value):
        raise InvalidValue(f"{param} must be a list of token ids, got {shown(value)}.", param=param)
    ids: list[int] = value
    return ids


def checked_ids(value: Any, vocab_size: int, param: str) -> list[int]:
    """Token ids within the vocabulary. Raises InvalidValue."""
    if not are_ids(value, _ids_below(vocab_size)):
        token_ids = ids_of(value, param)
        wrong = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise InvalidValue(f"{param}: token ids are 0 to {vocab_size - 1}, got {str(wrong)[:24]}.", param=param)
    ids: list[int] = value
    return ids


@cache
def _ids_below(vocab_size: int) -> Any:
    return Annotated[list[Annotated[int, Meta(ge=0, lt=vocab_size)]], Meta(min_length=1)]
