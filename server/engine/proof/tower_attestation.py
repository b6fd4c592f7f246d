"""Attestation of a tower: the kernels that an image of no client launches, beside what the evidence promises.

Its rows are written to no buffer, so that it may run between any two steps. Each call of attention and each product is
recorded by itself, as calls of attention in a step that no CUDA graph computes.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from kernels.driver.driver_record import Recorder
from kernels.driver.seen import Seen
from kernels.vocabulary.operators import AnyShape, Operator
from kernels.vocabulary.path import AnyPath
from kernels.vocabulary.shape import AttentionShape, Phase
from qualification.attest.operator_promises import operator_mismatches
from qualification.attest.promise import Promise, call_mismatch, kernels_promised, promise_of
from qualification.evidence.evidence import Evidence
from qualification.measure.costs.profile import Mark, profiled
from server.engine.operators.launch_errors import is_device_lost
from server.engine.operators.tower import AnyChoice, TowerTables
from server.engine.proof.judgement import explained_time
from server.engine.proof.step_times import StepTimes
from server.model.vision.geometry import Grid
from server.model.vision.tower import Image, Tower
from server.protocol.messages import AttestedBatch
from server.protocol.plan_rows import TOWER

logger = logging.getLogger(__name__)

Wrong = list[tuple[str, Phase | Operator]]  # paths that launched what they did not promise, and what they computed


@dataclass(frozen=True, slots=True)
class TowerProbes:
    """Images to attest: one for each path of attention, in its shortest bucket; one of a tower without attention."""

    tower: Tower
    tables: TowerTables
    paths: Mapping[str, AnyPath]
    evidence: Mapping[tuple[AnyShape, str], Evidence]
    device: torch.device
    recorder: Recorder | None = None
    times: StepTimes[Grid, torch.cuda.CUDAGraph] | None = field(init=False)  # by the recorder's graphs

    def __post_init__(self) -> None:
        recorder = self.recorder
        times = None if recorder is None else StepTimes(self._graph_of, recorder.node_names, recorder.node_seconds)
        object.__setattr__(self, "times", times)

    @property
    def grids(self) -> list[Grid]:
        """Return the patches of each image."""
        config = self.tower.config
        if config.is_tiled and config.image_side is not None:
            return [(config.image_side, config.image_side)]
        shortest: dict[str, int] = {}
        for choice in self.tables.attention.choices:
            path, lo = choice.use.path, choice.decision.shape.context_bucket.lo
            shortest[path] = min(lo, shortest.get(path, lo))
        merge = self.tower.config.merge
        sides = (math.isqrt(lo // merge**2) + 2 for lo in shortest.values() or (0,))
        return [(side * merge, side * merge) for side in dict.fromkeys(sides)]

    def attest(self, grid: Grid) -> tuple[AttestedBatch, Wrong]:
        """Compute an image, and judge what it launched. Raises NoPathError, and what a launch raises."""
        choices, seen, seconds = self._recorded(grid)
        products: Counter[str] = Counter()
        kernels: Counter[str] = Counter()
        promised, details = [], []
        held: dict[str, list[Promise]] = {Operator.ATTENTION.value: [], Operator.LINEAR.value: []}
        wrong: Wrong = []
        for choice, call in zip(choices, seen.calls, strict=True):
            path, promise = self._promise(choice)
            if choice.decision.status.is_valid:
                held[path.operator.value].append(promise)
            if not isinstance(choice.decision.shape, AttentionShape):
                promised.append((path, promise))
                products += call
                continue
            kernels += call
            detail = call_mismatch(promise, call)
            if detail is not None:
                details.append(detail)
                wrong.append((path.name, choice.decision.shape.phase))
        for mismatch in operator_mismatches(promised, products):
            details.append(mismatch.detail)
            wrong += [] if mismatch.path is None else [(mismatch.path, Operator.LINEAR)]
        if not self.tower.config.num_layers:
            kernels = products
        elif not kernels:
            details.append("no kernel of the tower's attention was seen")
        paths = list(dict.fromkeys(choice.use.path for choice in choices))
        result = "mismatch" if details else "match"
        text = "; ".join(dict.fromkeys(details)) or None
        explained = None
        if seconds and not details:
            explained = explained_time(seconds, {it: kernels_promised(of, seconds) for it, of in held.items()})
        batch = AttestedBatch(TOWER, paths, False, dict(sorted(kernels.items())), result, text, explained)
        return batch, list(dict.fromkeys(wrong))

    def _promise(self, choice: AnyChoice) -> tuple[AnyPath, Promise]:
        """Evidence of another source, which serves under DEGRADE alone, names the kernels of that one."""
        path = self.paths[choice.use.path]
        evidence = self.evidence.get((choice.decision.shape, path.name))
        is_of_it = evidence is not None and evidence.source_digest == path.source_digest
        return path, promise_of(path, evidence if is_of_it else None)

    def _recorded(self, grid: Grid) -> tuple[list[AnyChoice], Seen, Mapping[str, float] | None]:
        """Return the calls, their kernels, and where the driver times them the seconds of all kernels by whole name."""
        image = self._image_of(grid)
        choices: list[AnyChoice] = []

        def compute(mark: Mark) -> None:
            with self._watching(choices, mark):
                self.tower.encode([image])

        try:
            if self.recorder is None:
                return choices, profiled(compute, self.device), None
            self.tower.encode([image])  # nothing may compile in a capture
            self.recorder.take()
            compute(self.recorder.mark)
            seen = self.recorder.take()
            if all(choice.is_capturable for choice in choices):
                return choices, seen, self._seconds(grid)
            choices.clear()
            return choices, profiled(compute, self.device), None
        finally:
            self.tables.take()  # of no request

    def _image_of(self, grid: Grid) -> Image:
        """Return an image whose pixels are on the device, since no capture may copy from the host."""
        side = self.tower.config.patch_size
        pixels = torch.zeros(grid[0] * side, grid[1] * side, 3, dtype=torch.uint8, device=self.device)
        return Image(pixels, grid)

    def _graph_of(self, grid: Grid) -> torch.cuda.CUDAGraph:
        assert self.recorder is not None, "only a recorder's graphs are timed"
        image = self._image_of(grid)

        def encode() -> None:
            self.tower.encode([image])

        return self.recorder.capture(encode)

    def _seconds(self, grid: Grid) -> Mapping[str, float] | None:
        """Return the seconds of a whole pass over the image by kernel; None where it cannot be captured or timed."""
        try:
            return None if self.times is None else self.times(grid)
        except RuntimeError as error:
            if is_device_lost(error):
                raise
            logger.warning("attestation: the time of a tower's pass cannot be explained: %s", error)
            return None

    @contextmanager
    def _watching(self, choices: list[AnyChoice], mark: Mark) -> Iterator[None]:
        is_recording = self.recorder is not None and mark == self.recorder.mark

        def watch(choice: AnyChoice) -> AbstractContextManager[object]:
            choices.append(choice)
            return mark() if choice.is_capturable or not is_recording else nullcontext()

        watching: Callable[[AnyChoice], AbstractContextManager[object]] = watch
        self.tables.watch = self.tables.linear.watch = watching
        try:
            yield
        finally:
            self.tables.watch = self.tables.linear.watch = None
