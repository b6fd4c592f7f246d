"""The shadow check of prompts with images: what a token sees is taken from the prompt, not from the step's arrays."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import pytest
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from server.engine.proof.shadow_check import ShadowCheck
from server.engine.scheduling.sequence import Sequence
from server.protocol.messages import ShadowReport
from support.engine.image_session import ImageSession, load_with_tower
from support.engine.late_dispatch import EAGER
from support.models.tiny_images import GEMMA_4_LARGE, image_of, prompt_of, save_tiny


class WrongSpans:
    """A tap that moves the spans of a sequence, as far as its steps are planned and their arrays written."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def begin(self, seq: Sequence) -> None:
        seq.whole_spans = tuple((start, stop + self.shift) for start, stop in seq.whole_spans)

    def end(self, seq: Sequence, *, is_sound: bool) -> None: ...


def checked(session: ImageSession) -> Iterator[ShadowReport]:
    """Check steps of prompts with an image, each as soon as the one before is judged."""
    seconds = count(step=10)
    shadow = session.runner.shadow = ShadowCheck(
        session.worker.dispatcher, budget=1.0, interval_s=0.0, is_quarantining=True,
        clock=lambda: float(next(seconds)), rng=Random(1),
    )  # fmt: skip
    for seed in range(8):
        session.ask(f"r{seed}", prompt_of(*range(5, 17), image_of(seed, 10, 6, 14), 8, 9), 1)
        while session.engine.has_work:
            session.step()
            report = shadow.judge()
            if report is not None:
                yield report


@pytest.mark.parametrize(
    ("shift", "why"),
    [(0, None), (1, "has the span"), (-1, "has the span"), (-30, "an image whose tokens see each other is cut")],
)
def test_wrong_spans_are_the_steps_and_not_a_paths(shift: int, why: str | None, tmp_path: Path) -> None:
    save_tiny(tmp_path, GEMMA_4_LARGE)
    session = ImageSession(*load_with_tower(tmp_path), max_step=20)
    session.engine.answers = WrongSpans(shift)
    reports = list(checked(session))
    assert all((it.path == "none", it.quarantined) == (it.result == "mismatch", []) for it in reports)
    details = [it.detail for it in reports]
    assert len(details) > 10
    assert all(it is None for it in details) if why is None else sum(why in (it or "") for it in details) > 1


def test_a_kernel_that_ignores_spans_is_quarantined(tmp_path: Path) -> None:
    save_tiny(tmp_path, GEMMA_4_LARGE)
    session = ImageSession(*load_with_tower(tmp_path), max_step=20)

    def causal(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        assert EAGER.run is not None
        EAGER.run(q, k, v, batch, replace(flags, spans=None), out)

    session.worker.dispatcher.substitute(replace(EAGER, run=causal))
    found = []
    for report in checked(session):
        found += [report] if report.result == "mismatch" else []
        if report.quarantined:
            break
    assert {it.path for it in found} == {EAGER.name}
    assert found[-1].quarantined
    assert all("off by" in (it.detail or "") for it in found)
