"""Image files that decoders of strangers' bytes must survive, drawn at random."""

import io
import struct
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

from PIL import Image

_MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P"),
}
_SIDES = (1, 2, 3, 13, 27, 28, 29, 64, 113, 300)
_HEADS = (
    *(b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF\xff\xff\xff\xffWEBPVP8 ", b"BM", b"II*\0"),
    *(b"%PDF-1.4", b"<svg xmlns='http://www.w3.org/2000/svg'>", b"%!PS-Adobe-3.0 EPSF-3.0"),
)


def drawn(draw: Random) -> tuple[str, bytes]:
    """Return a name of what it is, and a file."""
    kind = draw.choice([*KINDS])
    return kind, KINDS[kind](draw)


def _sound(draw: Random, size: tuple[int, int] | None = None, **options: Any) -> bytes:
    """A file of any format and mode that is whole."""
    kind = draw.choice([*_MODES])
    mode = draw.choice(_MODES[kind])
    image = Image.new(mode, size or (draw.choice(_SIDES), draw.choice(_SIDES)))
    if mode == "P":
        image.putpalette([draw.randrange(256) for _ in range(3 * draw.choice([2, 16, 256]))])
        if draw.random() < 0.5:
            options["transparency"] = 0
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _truncated(draw: Random) -> bytes:
    whole = _sound(draw)
    return whole[: draw.randrange(len(whole))]


def _flipped(draw: Random) -> bytes:
    """Some bytes are others."""
    data = bytearray(_sound(draw))
    for _ in range(draw.choice([1, 3, 30])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def _turned(draw: Random) -> bytes:
    """EXIF of any orientation, also of none that there is, and perhaps cut off."""
    exif = Image.Exif()
    exif[0x0112] = draw.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 65_535])
    content = exif.tobytes()
    content = content[: draw.randrange(len(content))] if draw.random() < 0.3 else content
    file = io.BytesIO()
    image = Image.new("RGB", (draw.choice(_SIDES), draw.choice(_SIDES)))
    image.save(file, draw.choice(["JPEG", "PNG", "WEBP"]), exif=content)
    return file.getvalue()


def _animated(draw: Random) -> bytes:
    size = (draw.choice(_SIDES), draw.choice(_SIDES))
    frames = [Image.new("RGB", size, (draw.randrange(256), 0, 0)) for _ in range(draw.choice([2, 20]))]
    file = io.BytesIO()
    frames[0].save(file, draw.choice(["GIF", "WEBP", "PNG"]), save_all=True, append_images=frames[1:], duration=9)
    return file.getvalue()


def _thin(draw: Random) -> bytes:
    length = draw.choice([201, 5000, 10_000])
    return _sound(draw, (1, length) if draw.random() < 0.5 else (length, 1))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png(width: int, height: int, depth: int, colour: int, *chunks: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + b"".join(chunks) + _chunk(b"IEND", b"")


def _huge_header(draw: Random) -> bytes:
    """A PNG, GIF, JPEG or WebP of few bytes that claims up to 2**31 pixels a side."""
    width, height = (draw.choice([0, 1, 9000, 20_000, 65_535, 2**31 - 1]) for _ in range(2))
    made = draw.randrange(4)
    if made == 0:
        return _png(width, height, draw.choice([1, 8, 16]), draw.choice([0, 2, 3, 4, 6]), _chunk(b"IDAT", b""))
    if made == 1:
        return b"GIF89a" + struct.pack("<HH", width % 65_536, height % 65_536) + bytes(3) + b","
    if made == 2:
        data = bytearray(_jpeg())
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = struct.pack(">HH", height % 65_536, width % 65_536)
        return bytes(data)
    payload = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (width % 2**24).to_bytes(3, "little") * 2
    return b"RIFF" + struct.pack("<I", len(payload) + 4) + b"WEBP" + payload


def _jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    return file.getvalue()


def _bomb(draw: Random) -> bytes:
    """A PNG within the limit of pixels whose data, or whose texts, unpack to far more than they are."""
    rows = zlib.compress(bytes(draw.choice([10**6, 2 * 10**7])), 9)
    text = _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**7), 9))
    profile = _chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(10**7), 9))
    chunks = draw.choice([(), (text,), (text,) * 9, (profile,)])
    return _png(draw.choice([100, 1000]), 1000, 8, draw.choice([0, 2, 6]), *chunks, _chunk(b"IDAT", rows))


def _interlaced(draw: Random) -> bytes:
    """A progressive JPEG, perhaps cut."""
    file = io.BytesIO()
    Image.effect_noise((300, 300), 80).save(file, "JPEG", progressive=True, quality=draw.choice([5, 95]))
    data = file.getvalue()
    return data if draw.random() < 0.5 else data[: draw.randrange(len(data) // 2, len(data))]


def _garbage(draw: Random) -> bytes:
    """Bytes of any kind behind the beginning of a format, and other formats."""
    return draw.choice(_HEADS) + draw.randbytes(draw.choice([0, 10, 3000]))


KINDS: dict[str, Callable[[Random], bytes]] = {
    "sound": _sound,
    "truncated": _truncated,
    "flipped": _flipped,
    "turned": _turned,
    "animated": _animated,
    "thin": _thin,
    "huge header": _huge_header,
    "bomb": _bomb,
    "interlaced": _interlaced,
    "garbage": _garbage,
}
