"""From a decoded image to what a tower reads: resized pixels, their grid of patches and their digest."""

import hashlib
from dataclasses import dataclass

from PIL import Image

from server.model.images.settings import ImageSettings, Resampling
from server.model.images.sizes import SizeRule, Tiles


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as a model reads it.

    grid        patches: frames, height, width
    num_tokens  placeholders that stand for it in a prompt
    pixels      uint8, RGB, [height, width, 3], before their values are scaled
    digest      sha256 of the processor's settings, the size and the pixels
    """

    grid: tuple[int, int, int]
    num_tokens: int
    pixels: bytes
    digest: bytes


def process(image: Image.Image, settings: ImageSettings, sizes: SizeRule) -> ProcessedImage:
    """Resize an image in RGB by `sizes`, the model's or a request's. Raises SizeError."""
    height, width = sizes.resized(image.height, image.width)
    if isinstance(sizes, Tiles):
        pixels = _tiles(image, sizes, settings.resampling)
    else:
        pixels = image.resize((width, height), resample=settings.resampling.value).tobytes()
    grid = settings.grid(height, width)
    digest = hashlib.sha256(f"{settings.family.value} {settings.patch_size} {settings.merge_size} {grid}".encode())
    digest.update(pixels)
    return ProcessedImage(grid, settings.num_tokens(grid), pixels, digest.digest())


def _tiles(image: Image.Image, sizes: Tiles, resampling: Resampling) -> bytes:
    """Return the pixels of an image's tiles, row by row, and of its smaller copy where there are several."""
    (columns, rows), side = sizes.layout(image.height, image.width), sizes.side
    whole = image.resize((columns * side, rows * side), resample=resampling.value)
    places = [(column * side, row * side) for row in range(rows) for column in range(columns)]
    found = [whole.crop((left, top, left + side, top + side)) for left, top in places]
    if len(found) > 1:
        found.append(image.resize((side, side), resample=resampling.value))
    return b"".join(tile.tobytes() for tile in found)
