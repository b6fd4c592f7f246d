"""Places of images in a conversation: as marks within a message's text, which become parts for the chat template.

All that changes messages works on texts. So a text with images has a mark for each, of a name that no request can
spell, and is cut at the marks when the template gets it.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.text.request_text import RequestText, joined


@dataclass(frozen=True, slots=True)
class Marks:
    """Names, made for one request, that stand in a text for an image and for the border of two texts."""

    image: str = field(default_factory=lambda: f"<image-{secrets.token_hex(16)}>")
    border: str = field(default_factory=lambda: f"<border-{secrets.token_hex(16)}>")

    def text_of(self, parts: Sequence[str | None]) -> str:
        """Return the text of parts, of which None is an image."""
        pieces: list[str] = []
        was_text = False
        for part in parts:
            if part is None:
                pieces.append(self.image)
            else:
                pieces += [self.border, part] if was_text else [part]
            was_text = part is not None
        return "".join(pieces)

    def parts_of(self, text: str) -> str | list[dict[str, str]]:
        """Return the parts of a text as chat templates take them; one without images stays a text."""
        if self.image not in text:
            return text
        parts: list[dict[str, str]] = []
        for i, between in enumerate(text.split(self.image)):
            parts += [{"type": "image"}] if i else []
            parts += [{"type": "text", "text": piece} for piece in between.split(self.border) if piece]
        return parts

    def with_parts(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages, those with images as lists of parts."""
        return [
            {**it, "content": self.parts_of(it["content"])} if isinstance(it.get("content"), str) else {**it}
            for it in messages
        ]


def replaced_in_template(text: str, old: str, new: str) -> str:
    """Replace a text where the template has written it; what a request has spelled stays."""
    if not isinstance(text, RequestText):
        return text.replace(old, new)
    pieces: list[str] = []
    done = 0
    for start, end in text.template_runs():
        at = str.find(text, old, start, end)
        while at >= 0:
            pieces += [text[done:at], new]
            done = at + len(old)
            at = str.find(text, old, done, end)
    return joined([*pieces, text[done:]])
