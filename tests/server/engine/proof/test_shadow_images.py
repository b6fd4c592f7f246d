"""The shadow check of prompts with images: what a token sees is taken from the prompt, not from the step's arrays."""

from itertools import count
from pathlib import Path
from random import Random

import pytest

from server.engine.proof.shadow_check import ShadowCheck
from server.engine.scheduling.sequence import Sequence
from support.engine.image_session import ImageSession, load_with_tower
from support.models.tiny_images import GEMMA_4_LARGE, image_of, prompt_of, save_tiny


class WrongSpans:
    """A tap that moves the spans of a sequence, as far as its steps are planned and their arrays written."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def begin(self, seq: Sequence) -> None:
        seq.whole_spans = tuple((start, stop + self.shift) for start, stop in seq.whole_spans)

    def end(self, seq: Sequence, *, is_sound: bool) -> None: ...


@pytest.mark.parametrize(
    ("shift", "why"), [(0, None), (1, "off by"), (-1, "off by"), (-30, "an image whose tokens see each other is cut")]
)
def test_spans_that_are_not_the_images_are_a_mismatch(shift: int, why: str | None, tmp_path: Path) -> None:
    save_tiny(tmp_path, GEMMA_4_LARGE)
    session = ImageSession(*load_with_tower(tmp_path), max_step=20)
    seconds, details = count(step=10), []
    session.engine.answers = WrongSpans(shift)
    shadow = session.runner.shadow = ShadowCheck(
        session.worker.dispatcher, budget=1.0, interval_s=0.0, is_quarantining=False,
        clock=lambda: float(next(seconds)), rng=Random(1),
    )  # fmt: skip
    for seed in range(8):
        session.ask(f"r{seed}", prompt_of(*range(5, 17), image_of(seed, 10, 6, 14), 8, 9), 1)
        while session.engine.has_work:
            session.step()
            report = shadow.judge()
            details += [] if report is None else [report.detail]
    assert len(details) > 10
    assert all(it is None for it in details) if why is None else any(why in (it or "") for it in details)
