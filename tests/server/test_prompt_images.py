"""Images of a prompt as they cross the socket."""

import pytest

from server.protocol import wire
from server.protocol.images import MAX_REQUEST_PIXELS, PromptImage, image_fault
from server.protocol.messages import SamplingParams, Submit

GOOD = PromptImage(2, 4, (1, 4, 4), bytes(3 * 8 * 8), bytes(32))
WRONG = {
    "within the prompt of 12 tokens": (PromptImage(9, 4, (1, 4, 4), bytes(192), bytes(32)),),
    "apart": (GOOD, PromptImage(5, 4, (1, 4, 4), bytes(192), bytes(32))),
    "in order": (PromptImage(-1, 4, (1, 4, 4), bytes(192), bytes(32)),),
    "must have 32 bytes, it has 3": (PromptImage(2, 4, (1, 4, 4), bytes(192), b"abc"),),
    "193 bytes for 1 x 4 x 4 patches": (PromptImage(2, 4, (1, 4, 4), bytes(193), bytes(32)),),
    "0 bytes for": (PromptImage(2, 4, (1, 4, 4), b"", bytes(32)),),
    "192 bytes for 1 x 0 x 4": (PromptImage(2, 4, (1, 0, 4), bytes(192), bytes(32)),),
    "the limit is 33554432": (PromptImage(2, 4, (1, 1, 1), bytes(3 * MAX_REQUEST_PIXELS + 3), bytes(32)),),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_image_is_told_by_what_is_wrong(fault: str) -> None:
    assert image_fault((GOOD, PromptImage(6, 6, (1, 2, 2), bytes(12), bytes(32))), 12) is None
    assert fault in (image_fault(WRONG[fault], 12) or "")


def test_the_most_pixels_of_a_prompt_fit_in_a_message() -> None:
    image = PromptImage(0, 1, (1, 1, 1), bytes(3 * MAX_REQUEST_PIXELS), bytes(32))
    ids = [2**32] * 1_000_000
    [body] = wire.Frames().feed(wire.frame(Submit("a", ids, SamplingParams(max_tokens=1), images=(image,))))
    found = wire.to_engine(body)
    assert isinstance(found, Submit)
    assert found.images == (image,)
