"""Images as requests name them, and those of a request that have been read."""

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from server.errors import InvalidValue
from server.model.images.process import ProcessedImage

_DATA = re.compile(r"data:image/[\w.+-]{1,64};base64,", re.ASCII | re.IGNORECASE)
_REMOTE = re.compile("https?://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a request, before it is read.

    url         data: or http(s):
    place       the field that has it, for errors
    min_pixels, max_pixels   after resizing, where the request bounds them
    is_low      whether the request asks for little detail
    """

    url: str
    place: str = field(compare=False)
    min_pixels: int | None = None
    max_pixels: int | None = None
    is_low: bool = False

    @property
    def is_remote(self) -> bool:
        """Return whether its bytes are on another host."""
        return _REMOTE.match(self.url) is not None

    def data(self) -> bytes:
        """Return the file within a data: URL. Raises InvalidValue."""
        found = _DATA.match(self.url)
        if found is None:
            wanted = "data:image/...;base64, or an http(s) URL"
            raise InvalidValue(f"{self.place}: the URL of an image must begin with {wanted}.", param=self.place)
        try:
            return b64decode(self.url[found.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidValue(f"{self.place}: the image is not base64: {error}.", param=self.place) from None


class ImagesNeeded(Exception):
    """A request cannot be prepared before these images are read."""

    def __init__(self, sources: Sequence[ImageSource]) -> None:
        super().__init__(f"{len(sources)} images are to be read")
        self.sources = sources


class RequestImages:
    """The images of one request that have been read."""

    def __init__(self, read: Mapping[ImageSource, ProcessedImage] | None = None) -> None:
        self._read = read or {}

    def of(self, sources: Sequence[ImageSource]) -> list[ProcessedImage]:
        """Return the images of these sources. Raises ImagesNeeded where one has not been read."""
        if any(source not in self._read for source in sources):
            raise ImagesNeeded(sources)
        return [self._read[source] for source in sources]
