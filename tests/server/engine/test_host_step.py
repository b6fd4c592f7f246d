"""The host's part of a decode step that is a graph: loops over rows, and no call of a function for each."""

import gc
import sys
from collections.abc import Callable
from types import FrameType

from kernels.vocabulary.buckets import Bucket
from server.engine.execution.graph_keys import GraphSizes
from server.model.decoder import Decoder
from support.engine.graph_session import Session
from support.engine.served_decoder import ServedDecoder


class Nothing:
    """A graph of a device that needs no time: its tokens are those of the capture."""

    def replay(self) -> None:
        pass


def session(decoder: Decoder) -> Session:
    def capture(work: Callable[[], None]) -> Nothing:
        work()
        return Nothing()

    sizes = GraphSizes((Bucket.LE_128,), (32,), num_prompts=1)
    return ServedDecoder(decoder, capture=capture, sizes=sizes, num_pages=128, page_size=16, max_seqs=32, max_step=64)


def calls_of_steps(subject: Session, num_steps: int) -> list[int]:
    """Python functions that were called in each step."""
    counts = []

    def count(_: FrameType, event: str, __: object) -> None:
        counts[-1] += event == "call"

    gc.disable()  # a collection calls whoever asked to be told of it, as hypothesis does
    try:
        for _ in range(num_steps):
            counts.append(0)
            sys.setprofile(count)
            try:
                subject.step()
            finally:
                sys.setprofile(None)
    finally:
        gc.enable()
    return counts


def test_a_steady_decode_step_calls_no_function_for_each_row(decoder: Decoder) -> None:
    counts = {}
    for num_rows in (1, 32):
        subject = session(decoder)
        for row in range(num_rows):
            subject.submit(f"r{row}", [1, 2, 3], max_tokens=60)
        while subject.engine.num_waiting:
            subject.step()
        for _ in range(4):  # until all rows have their first token, and both of the host's buffers were filled
            subject.step()
        counts[num_rows] = calls_of_steps(subject, 6)  # within the first page
        assert all(len(output.deltas) == num_rows for output in subject.outputs[-6:])
    assert counts[1] == counts[32]
