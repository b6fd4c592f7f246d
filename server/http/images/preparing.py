"""From a body to what is made of it, with its images read between two tries where it has any."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from server.edge.body_memory import in_thread
from server.http.common.json_body import MAX_VALUES, parse_json
from server.http.images.reader import ImageReader
from server.http.images.source import ImagesNeeded, RequestImages

T = TypeVar("T")
Make = Callable[[dict[str, Any], RequestImages], T]  # from a body's object; raises ImagesNeeded


async def with_images(
    reader: ImageReader | None,
    body: bytes | bytearray,
    max_values: int | None,
    make: Make[T],
    *,
    is_inline: bool = False,
) -> T:
    """Parse a body and make something of it, off the event loop unless `is_inline`. Raises what parsing and `make` do.

    A body with images is looked at twice: before they are read, which names them, and behind that.
    max_values  that its JSON may have; None: as any request
    """

    def parsed(body: bytes | bytearray) -> T | "_Waiting":
        fields = parse_json(body, max_values=MAX_VALUES if max_values is None else max_values)
        del body  # it may be large, and is not needed while the text is tokenized
        try:
            return make(fields, RequestImages())
        except ImagesNeeded as needed:
            return _Waiting(fields, needed)

    if is_inline:
        made = parsed(body)
    else:
        work = in_thread(body, parsed)
        del body
        made = await work
    if not isinstance(made, _Waiting):
        return made
    assert reader is not None, "a model without images refuses them"
    images = await reader.read(made.needed.sources)
    return await asyncio.to_thread(make, made.fields, images)


class _Waiting:
    """A body whose images are to be read."""

    def __init__(self, fields: dict[str, Any], needed: ImagesNeeded) -> None:
        self.fields = fields
        self.needed = needed
