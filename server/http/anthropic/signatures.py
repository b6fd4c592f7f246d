"""Reasoning that a client asks not to read, in the signature that it sends back with the next turn.

The text is neither encrypted nor signed: it saves the client from reading it, and keeps no secret.
"""

import base64
import binascii

from server.http.anthropic.requests import ThinkingBlock

_PREFIX = "hallmark-thinking:"


def signature_of(thinking: str) -> str:
    """Return the signature that carries a text."""
    return _PREFIX + base64.b64encode(thinking.encode("utf-8", "replace")).decode()


def thinking_of(block: ThinkingBlock) -> str:
    """Return the text of a block: its own, else that of its signature; empty where another server has signed it."""
    if block.thinking or not block.signature.startswith(_PREFIX):
        return block.thinking
    try:
        return base64.b64decode(block.signature.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
