"""From sources to pixels: fetched on the event loop, decoded and resized in threads of their own."""

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from server.errors import InvalidValue
from server.http.images.fetch import MediaFetcher
from server.http.images.source import ImageSource, RequestImages
from server.model.images.decode import ImageError, decode, read_header
from server.model.images.process import ProcessedImage, process
from server.model.images.settings import ImageSettings
from server.model.images.sizes import SizeError, SizeRule
from server.protocol.images import MAX_REQUEST_PIXELS

_MOST_THREADS = 8
LOW_DETAIL_PIXELS = 512 * 512  # the most of `detail: low`, as OpenAI has it


class PixelBudget:
    """Pixels of the images that are decoded at the same time: a decoded one takes 4 to 12 bytes each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_used = 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, num_pixels: int) -> Iterator[None]:
        """Wait until they fit; an image that is alone always does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_used or self._num_used + num_pixels <= self._most)
            self._num_used += num_pixels
        try:
            yield
        finally:
            with self._changed:
                self._num_used -= num_pixels
                self._changed.notify_all()


class ImageReader:
    """Reads the images of requests for one model."""

    def __init__(self, settings: ImageSettings, fetcher: MediaFetcher, max_pixels: int) -> None:
        """`max_pixels` of an image as it comes; twice as many are decoded at the same time at most."""
        self._settings = settings
        self._fetcher = fetcher
        self._max_pixels = max_pixels
        self._budget = PixelBudget(2 * max_pixels)
        num_threads = min(_MOST_THREADS, max(2, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="images")

    def close(self) -> None:
        """End the threads; what waits is not read."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, sources: Sequence[ImageSource]) -> RequestImages:
        """Read the images of a request, each once. Raises InvalidValue for the first that cannot be."""
        found: dict[ImageSource, ProcessedImage] = {}
        num_pixels = 0
        loop = asyncio.get_running_loop()
        for source in dict.fromkeys(sources):
            file = await self._fetcher.fetch(source) if source.is_remote else None
            image = found[source] = await loop.run_in_executor(self._threads, partial(self._read, source, file))
            num_pixels += len(image.pixels) // 3 * sources.count(source)
            if num_pixels > MAX_REQUEST_PIXELS:
                limit = f"the limit of a request is {MAX_REQUEST_PIXELS}"
                message = f"{source.place}: the images have {num_pixels} pixels after resizing, {limit}."
                raise InvalidValue(message, param=source.place)
        return RequestImages(found)

    def _read(self, source: ImageSource, file: bytes | None) -> ProcessedImage:
        """`file`: of a source that is remote. Raises InvalidValue."""
        sizes = self._sizes(source)
        data = source.data() if file is None else file
        try:
            header = read_header(data, self._max_pixels)
            sizes.resized(header.height, header.width)  # refused before it is decoded
            with self._budget.of(header.num_pixels):
                return process(decode(data, self._max_pixels), self._settings, sizes)
        except (ImageError, SizeError) as error:
            raise InvalidValue(f"{source.place}: {error}.", param=source.place) from error

    def _sizes(self, source: ImageSource) -> SizeRule:
        try:
            sizes = self._settings.sizes.within(source.min_pixels, source.max_pixels)
        except SizeError as error:
            name = "mm_processor_kwargs"
            raise InvalidValue(f"{name}: {error}.", param=name) from error
        return sizes.at_most(LOW_DETAIL_PIXELS) if source.is_low else sizes
