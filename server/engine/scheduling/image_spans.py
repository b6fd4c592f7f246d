"""The images of a prompt as spans that have embeddings of their own."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from qualification.model.tower import TowerConfig
from server.protocol.images import PromptImage, image_fault
from server.protocol.messages import EmbeddedSpan

_DIGEST_BYTES = 32


def images_refusal(images: Sequence[PromptImage], num_prompt_tokens: int, tower: TowerConfig | None) -> str | None:
    """Return why a prompt of so many tokens cannot have these images; None if it can."""
    if tower is None:
        return "this engine takes no images"
    fault = image_fault(images, num_prompt_tokens)
    faults = (tower.refusal(it.grid, len(it.pixels), it.num_tokens) for it in images)
    return fault or next((it for it in faults if it is not None), None)


def image_spans(
    images: Sequence[PromptImage], tower: TowerConfig, salt: bytes, *, has_three_positions: bool
) -> tuple[EmbeddedSpan, ...]:
    """Return the spans of images that are not refused.

    salt   of the prompt's pages: requests of different ones share no image either, whose time would tell of it
    """
    found = []
    for image in images:
        _, height, width = image.grid
        sides = height // tower.merge, width // tower.merge
        name = blake2b(image.digest, digest_size=_DIGEST_BYTES, person=b"image")
        name.update(salt)
        found.append(
            EmbeddedSpan(
                image.start,
                image.num_tokens,
                name.digest(),
                b"",
                _offsets(*sides) if has_three_positions else b"",
                max(sides) if has_three_positions else None,
                image,
                sides[1] if tower.has_line_ends else None,
            )
        )
    return tuple(found)


@lru_cache(maxsize=256)
def _offsets(height: int, width: int) -> bytes:
    """Return each token's position, counted from the image's start: time, row, column; time stands still."""
    rows, columns = np.indices((height, width), np.int32).reshape(2, -1)
    return np.stack((np.zeros_like(rows), rows, columns)).astype("<i4").tobytes()
