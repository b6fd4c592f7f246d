"""Wrong masks of images whose tokens see each other both ways, in an engine that serves prompts with images."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.catalog import path_named
from kernels.vocabulary.path import KernelPath, RunAttention
from served_faults.plant import same
from server.engine.proof.shadow_check import ShadowCheck
from server.engine.scheduling.sequence import Sequence
from support.engine.checked_layers import CheckedLayers
from support.engine.image_session import ImageSession, load_with_tower
from support.engine.late_dispatch import EAGER
from support.models.tiny_images import GEMMA_4_LARGE, image_of, prompt_of, save_tiny

MOST_CHECKS = 200
_SEED, _PATCH = 11, 14
_SEEN = Sequence.seen_spans
Spans = NDArray[np.int32]


@dataclass(frozen=True)
class SpanFault:
    """attention makes of a path's call the one that is launched in its place; during: what serves inside of it."""

    name: str
    attention: Callable[[RunAttention], RunAttention] = same
    during: Callable[[], AbstractContextManager[object]] = nullcontext


def _flags(change: Callable[[AttentionFlags], AttentionFlags]) -> Callable[[RunAttention], RunAttention]:
    def wrong(run: RunAttention) -> RunAttention:
        def attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
            run(q, k, v, batch, change(flags), out)

        return attend

    return wrong


def _in_all_layers(run: RunAttention) -> RunAttention:
    """Let tokens of an image see each other in layers without a window, too, by the spans of the layer before."""
    latest: list[Tensor | None] = [None]

    def attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, flags: AttentionFlags, out: Tensor) -> None:
        if flags.window is not None:
            latest[0] = flags.spans
        own = latest[0]
        fits = own is not None and flags.window is None and len(own) == len(q)
        run(q, k, v, batch, replace(flags, spans=own) if fits else flags, out)

    return attend


def _written(change: Callable[[Sequence, int, int, Spans], Spans]) -> Callable[[], AbstractContextManager[object]]:
    """Change the spans that the step buffer gets, of tokens [start, stop) of a sequence."""

    def seen(seq: Sequence, start: int, stop: int, window: int | None) -> Spans:
        return change(seq, start, stop, _SEEN(seq, start, stop, window).copy())

    return lambda: patch.object(Sequence, "seen_spans", seen)


def _ends_late(_: Sequence, __: int, stop: int, found: Spans) -> Spans:
    found[:, 1] = np.where(found[:, 1] > 0, np.minimum(found[:, 1] + 1, stop), 0)
    return found


def _ends_early(_: Sequence, __: int, ___: int, found: Spans) -> Spans:
    found[:, 1] = np.maximum(found[:, 1] - 1, found[:, 0])
    return found


def _of_another(seq: Sequence, start: int, stop: int, found: Spans) -> Spans:
    """Give the tokens of the first image of a chunk the span of the last one."""
    own = [it for it in seq.whole_spans if start <= it[0] and it[1] <= stop]
    if len(own) > 1:
        (first, end), last = own[0], own[-1]
        found[first - start : end - start] = last
    return found


def _without_window(seq: Sequence, start: int, stop: int, _: Spans) -> Spans:
    return _SEEN(seq, start, stop, None)


@contextmanager
def _cut_anywhere() -> Iterator[None]:
    with patch.object(Sequence, "border", lambda _, num_tokens: num_tokens):
        yield


SPAN_FAULTS = (
    SpanFault("none"),
    SpanFault("an image's tokens see those before them alone", _flags(lambda it: replace(it, spans=None))),
    SpanFault("an image's tokens see each other without a window, too", _in_all_layers),
    SpanFault("an image's tokens see the token behind it", during=_written(_ends_late)),
    SpanFault("an image's last token is not seen", during=_written(_ends_early)),
    SpanFault("an image's tokens see another image", during=_written(_of_another)),
    SpanFault("an image's tokens see it beyond the window", during=_written(_without_window)),
    SpanFault("steps and page hits end within an image", during=_cut_anywhere),
)


class Images:
    """A small model with such images, and what its checks see of a fault."""

    def __init__(self, folder: Path) -> None:
        save_tiny(folder, GEMMA_4_LARGE)
        self._folder = folder
        self._decoder, self._tower = load_with_tower(folder)

    def look(self, fault: SpanFault) -> tuple[str | None, int | None, int]:
        """Return where the check of the layers sees a fault, the shadow check that does, and how many there were."""
        with fault.during():
            layers = CheckedLayers.made(self._folder)
            for name in ("sdpa.cpu", "sdpa.math"):
                layers.runner.worker.dispatcher.substitute(_wrong(path_named(name), fault))
            first = layers.check().first
            shadow, checks = self._serve(fault)
        return None if first is None else first.section, shadow, checks

    def _serve(self, fault: SpanFault) -> tuple[int | None, int]:
        session = ImageSession(self._decoder, self._tower, max_step=24)
        session.worker.dispatcher.substitute(_wrong(EAGER, fault))
        seconds, rng, checks = count(step=10), Random(_SEED), 0
        shadow = session.runner.shadow = ShadowCheck(
            session.worker.dispatcher, budget=1.0, interval_s=0.0, is_quarantining=False,
            clock=lambda: float(next(seconds)), rng=Random(_SEED),
        )  # fmt: skip
        for turn in count():
            small, tall = (image_of(2 * turn + it, *size, _PATCH) for it, size in enumerate([(4, 6), (10, 6)]))
            words = [rng.randrange(5, 4000) for _ in range(rng.randrange(8, 20))]
            session.ask(f"a{turn}", prompt_of(*words, small, 8, 9), 3)
            session.ask(f"b{turn}", prompt_of(3, small, tall, *words), 3)
            while session.engine.has_work:
                session.step()
                report = shadow.judge()
                if report is not None and report.result != "skipped":
                    checks += 1
                    if report.result == "mismatch":
                        return checks, checks
            if checks >= MOST_CHECKS:
                return None, checks
        raise AssertionError("it serves until enough is checked")


def _wrong(path: KernelPath, fault: SpanFault) -> KernelPath:
    assert path.run is not None
    return replace(path, run=fault.attention(path.run))
