"""An image of a prompt, on its way from the API process, which has resized it, to the engine, whose tower reads it."""

import struct
from collections.abc import Iterable, Sequence

import msgspec

DIGEST_BYTES = 32
MAX_REQUEST_PIXELS = 32 * 1024 * 1024  # of a prompt's images after resizing: 96 MiB of the message that it is sent in


_WORDS = struct.Struct("<4q")  # of a digest


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """One image, and the tokens that stand for it in the prompt.

    start       index, in the prompt's token ids, of the image's first token
    num_tokens  of the image: those at [start, start + num_tokens), which are placeholders
    grid        patches: frames, height, width, before neighbours are merged; a still image has one frame
    pixels      uint8, RGB, [height, width, 3], after resizing and before any scaling of values
    digest      name of the content: the same one means the same embeddings
    """

    start: int
    num_tokens: int
    grid: tuple[int, int, int]
    pixels: bytes
    digest: bytes

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


class PromptImages:
    """The images of a prompt until they are sent to the engine: pixels are not held while an answer is streamed."""

    def __init__(self, images: tuple[PromptImage, ...]) -> None:
        self._images = images
        self.num_bytes = sum(len(image.pixels) for image in images)
        self._places = [(image.start, image.num_tokens, image.digest) for image in images]

    def take(self) -> tuple[PromptImage, ...]:
        """Return the images, once: the answers to one prompt are computed from one message."""
        images, self._images = self._images, ()
        return images

    def in_ids(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return ids that no prompt with other images has: of placeholders, as many as fit are those of the digest."""
        found = [*prompt_token_ids]
        for start, num_tokens, digest in self._places:
            words = _WORDS.unpack(digest)[:num_tokens]
            found[start : start + len(words)] = words
        return found


def image_fault(images: Iterable[PromptImage], num_prompt_tokens: int) -> str | None:
    """Return why a prompt of so many tokens cannot have these images; None if it can.

    Whether the grid fits a model's tower is not looked at.
    """
    end, num_pixels = 0, 0
    for image in images:
        if image.num_tokens < 1 or image.start < end or image.stop > num_prompt_tokens:
            return f"images must be in order, apart and within the prompt of {num_prompt_tokens} tokens"
        end = image.stop
        if len(image.digest) != DIGEST_BYTES:
            return f"an image's digest must have {DIGEST_BYTES} bytes, it has {len(image.digest)}"
        frames, height, width = image.grid
        if min(image.grid) < 1 or len(image.pixels) % (3 * height * width) or not image.pixels:
            size = f"{len(image.pixels)} bytes for {frames} x {height} x {width} patches"
            return f"an image needs 3 bytes for each pixel of each patch, it has {size}"
        num_pixels += len(image.pixels) // 3
    if num_pixels > MAX_REQUEST_PIXELS:
        return f"the prompt's images have {num_pixels} pixels, the limit is {MAX_REQUEST_PIXELS}"
    return None
