"""From an image file's bytes to pixels, with every limit on what a hostile file may cost."""

import io
import re
import struct
from dataclasses import dataclass

# The formats by name: Pillow imports them when it first meets one, within a request.
from PIL import (
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

_FORMATS = tuple(
    plugin.format
    for plugin in (
        PngImagePlugin.PngImageFile,
        JpegImagePlugin.JpegImageFile,
        WebPImagePlugin.WebPImageFile,
        GifImagePlugin.GifImageFile,
    )
)
# What Pillow's decoders raise on files that are broken.
_FAILURES = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError),
    *(SyntaxError, TypeError, ValueError, struct.error, Image.DecompressionBombError),
)
# Its decoder holds the interpreter's lock for the whole image, 60 to 120 ms for so many pixels (EPYC, one loaded core).
MAX_WEBP_PIXELS = 12_000_000
_STRIP_PIXELS = 2**20  # converted at once: Pillow holds the interpreter's lock meanwhile, 2 to 5 ms
_ORIENTATION = 0x0112  # of EXIF


class ImageError(ValueError):
    """Bytes that are no image of a known format, or one that is beyond a limit."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Format and size of an image file, which its header gives before anything is decoded."""

    format: str
    width: int
    height: int

    @property
    def num_pixels(self) -> int:
        return self.width * self.height


def read_header(data: bytes, max_pixels: int) -> ImageHeader:
    """Return format and size of an image file. Raises ImageError, also for one of more pixels than `max_pixels`."""
    return _opened(data, max_pixels)[1]


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """Return a file's first picture in RGB, turned as its EXIF orientation says. Raises ImageError.

    What is transparent lies on white, as in transformers. Of 16 bits a channel the higher 8 are taken.
    """
    image, header = _opened(data, max_pixels)
    try:
        image.load()
        turned = ImageOps.exif_transpose(image) if image.getexif().get(_ORIENTATION, 1) != 1 else image
        return _rgb(turned)
    except _FAILURES as error:
        raise ImageError(f"the {header.format} file cannot be decoded: {_reason(error)}") from error


def _opened(data: bytes, max_pixels: int) -> tuple[Image.Image, ImageHeader]:
    """Return an image whose header alone was read."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        count = re.search(r"\d+", str(error))  # Pillow has read the size, and gives it in its words alone
        num_pixels = count[0] if count else "too many"
        raise ImageError(f"the image has {num_pixels} pixels, the limit is {max_pixels}") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"the {len(data)} bytes are no image of PNG, JPEG, WebP or GIF") from error
    except (*_FAILURES, Warning) as error:
        raise ImageError(f"the image's header cannot be read: {_reason(error)}") from error
    header = ImageHeader(image.format or "", *image.size)
    if min(image.size) < 1:
        raise ImageError(f"the image has {header.width} x {header.height} pixels")
    is_webp = header.format == WebPImagePlugin.WebPImageFile.format
    limit = min(max_pixels, MAX_WEBP_PIXELS) if is_webp else max_pixels
    if header.num_pixels > limit:
        found = f"{header.width} x {header.height} = {header.num_pixels} pixels"
        raise ImageError(f"the {header.format} image has {found}, the limit is {limit}")
    return image, header


def _rgb(image: Image.Image) -> Image.Image:
    """Convert strip by strip, so that no other thread waits for long."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    found = Image.new("RGB", image.size, None)  # not filled
    height = max(1, _STRIP_PIXELS // image.width)
    has_alpha = "A" in image.getbands() or image.info.get("transparency") is not None
    for top in range(0, image.height, height):
        box = (0, top, image.width, min(top + height, image.height))
        strip = image.crop(box)
        if has_alpha:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, (255, 255, 255, 255)), strip)
        elif strip.mode.startswith("I;16"):
            strip = strip.point(lambda value: value / 256, "L")
        found.paste(strip.convert("RGB"), box)
    return found


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]!a}"
