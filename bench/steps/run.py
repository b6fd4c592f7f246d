"""Whole steps of an engine, measured: prompts by length, decode by batch and by context, a mixed load."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.steps.cells import Cell, Kind, StepsBench, cells_of
from bench.steps.floor import step_floor_ms
from bench.steps.parts import StepTimer, Stopwatch, Timeline, Times
from bench.steps.row import DecodeRow, Inside, LoadRow, PrefillRow, Samples, Sweep
from kernels.vocabulary.shape import Phase
from qualification.measure.costs.timing import median_spread
from server.engine.operators.attention_timer import CpuDevice, CudaDevice
from server.engine.scheduling.step_parts import Part
from server.full_model.drive import Driver, RequestFailed, is_decode_of
from server.protocol.messages import StepOutput

_DEVICE_PARTS = (Part.FORWARD, Part.SAMPLE)  # on a CPU the thread itself computes them
_WARM_STEPS = 2
_MOST_PROMPTS, _LEAST_PROMPTS, _LEAST_LONG_PROMPTS = 15, 3, 2
_LONG_S = 3.0  # of a prompt


@dataclass(frozen=True, slots=True)
class Measured:
    prefill: list[PrefillRow]
    decode: list[DecodeRow]
    load: list[LoadRow]
    skipped: list[str]


def measure(
    bench: StepsBench,
    progress: Callable[[int, int, str], None],
    *,
    time_limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Every cell that the engine has room and the limit has time for. `progress` gets hundredths of the whole."""
    cells, skipped = cells_of(bench)
    found = Measured([], [], [], skipped)
    session = _Session(bench)
    whole, done, began_at = sum(cell.cost for cell in cells), 0.0, clock()
    for cell in cells:
        if clock() - began_at > time_limit_s:
            skipped.append(f"{cell}: the time limit of {time_limit_s:g} s")
            continue
        progress(min(99, int(100 * done / whole)), 100, str(cell))
        try:
            _measure_cell(session, cell, found)
        except RequestFailed as error:
            skipped.append(f"{cell}: {error}")
        session.clear()
        done += cell.cost
    progress(100, 100, "measured")
    return found


def _measure_cell(session: "_Session", cell: Cell, found: Measured) -> None:
    if cell.kind is Kind.PROMPT:
        found.prefill.append(session.prefill(cell.tokens))
    elif cell.kind is Kind.LOAD:
        found.load.append(session.load())
    else:
        found.decode.append(session.decode(Sweep(cell.kind.value), cell.batch, cell.tokens))


class _Session:
    """Runs cells one after the other on one engine."""

    def __init__(self, bench: StepsBench) -> None:
        self.watch = Stopwatch({Part.WAIT} if bench.is_cuda else {Part.WAIT, *_DEVICE_PARTS})
        self.timeline = Timeline(CudaDevice() if bench.is_cuda else CpuDevice())
        self._bench = bench
        timer = StepTimer(self.watch, self.timeline)
        bench.built.engine.mark = bench.built.runner.worker.mark = timer.mark
        self._driver = Driver(bench.built.engine, timer.mark)

    def clear(self) -> None:
        """Leave the engine idle, and forget what was seen of it."""
        self._driver.clear()
        self.timeline.take()

    def prefill(self, num_tokens: int) -> PrefillRow:
        samples: list[tuple[float, float]] = []
        outputs: list[StepOutput] = []
        is_warm, began_at = False, time.perf_counter()
        while not self._has_prompts(samples, time.perf_counter() - began_at):
            cpu_at = time.process_time()
            outputs, seconds = self._driver.serve(1, num_tokens, 1)
            if is_warm or seconds[-1] > _LONG_S:  # beside that it is little that the first of a length may have to load
                samples.append((seconds[-1] * 1e3, (time.process_time() - cpu_at) * 1e3))
            is_warm = True
        return PrefillRow(
            tokens=num_tokens,
            steps=len(outputs),
            time=_samples([passed for passed, _ in samples]),
            cpu=_samples([cpu for _, cpu in samples]),
            floor_ms=self._floor_ms([(num_tokens, num_tokens)]),
            paths=_paths(outputs),
        )

    def decode(self, sweep: Sweep, batch: int, context: int) -> DecodeRow:
        """The steps before all prompts are computed, and the requests after enough steps, are thrown away."""
        plan, longest, driver = self._bench.plan, self._bench.built.engine.max_len, self._driver
        # While the last prompts are computed the first are decoded: contexts begin as much shorter as they will grow.
        num_ahead = batch * context // self._bench.limits.max_num_batched_tokens + _WARM_STEPS
        room = num_ahead + plan.steps + 3
        num_prompt = max(1, min(context - room // 2, longest - room))
        for _ in range(batch):
            driver.submit(num_prompt, longest - num_prompt)
        outputs = [driver.step()]
        while not is_decode_of(outputs[-1], batch):
            outputs.append(driver.step())
        outputs += [driver.step() for _ in range(_WARM_STEPS)]
        num_emitted = sum(len(delta.token_ids) for output in outputs for delta in output.deltas)
        times, cpus, inside, steps = self._steps()
        mean_context = num_prompt + num_emitted / batch + 1 + len(times) / 2
        return DecodeRow(
            sweep=sweep,
            batch=batch,
            context=context,
            mean_context=round(mean_context, 1),
            time=_samples(times),
            cpu=_samples(cpus),
            floor_ms=self._floor_ms([(1, round(mean_context))] * batch),
            paths=_paths(steps, Phase.DECODE),
            inside=inside,
        )

    def load(self) -> LoadRow:
        """Measure a fixed number of concurrent requests, their ends spread evenly, until each had two successors."""
        plan, driver = self._bench.plan, self._driver
        outputs = [max(1, plan.load_output * (n + 1) // plan.streams) for n in range(plan.streams)]
        for num_output in outputs:
            driver.submit(plan.load_prompt, num_output)

        def follow(output: StepOutput) -> None:
            for delta in output.deltas:
                if delta.finish_reason is not None:
                    driver.submit(plan.load_prompt, plan.load_output)

        for _ in range(plan.load_output):
            follow(driver.step())
        times, _, inside, steps = self._steps(2 * plan.load_output, follow)
        num_tokens = sum(len(delta.token_ids) for output in steps for delta in output.deltas)
        return LoadRow(
            streams=plan.streams,
            prompt=plan.load_prompt,
            output=plan.load_output,
            tokens_per_s=round(num_tokens / sum(times) * 1e3, 1),
            time=_samples(times),
            inside=inside,
        )

    def _steps(
        self, num_steps: int | None = None, follow: Callable[[StepOutput], None] = lambda _: None
    ) -> tuple[list[float], list[float], Inside, list[StepOutput]]:
        """Measure these steps, or as many as are enough: milliseconds, processor milliseconds, parts and outputs."""
        plan = self._bench.plan
        times: list[float] = []
        cpus: list[float] = []
        outputs: list[StepOutput] = []
        parts: list[tuple[Times, float]] = []
        self.timeline.take()  # waits for a GPU, which is ahead: the next step would seem to take a tenth of its time
        follow(self._driver.step())
        self.watch.take()
        at = began_at = time.perf_counter()
        cpu_at = time.process_time()
        while len(times) < (num_steps or plan.steps):
            outputs.append(self._driver.step())
            follow(outputs[-1])
            parts.append(self.watch.take())
            before, at = at, time.perf_counter()
            cpu_before, cpu_at = cpu_at, time.process_time()
            times.append((at - before) * 1e3)
            cpus.append((cpu_at - cpu_before) * 1e3)
            if num_steps is None and len(times) >= plan.least_steps and at - began_at > plan.budget_s:
                break
        return times, cpus, self._inside(parts), outputs

    def _has_prompts(self, samples: Sequence[tuple[float, float]], seconds: float) -> bool:
        least = _LEAST_LONG_PROMPTS if samples and samples[0][0] > _LONG_S * 1e3 else _LEAST_PROMPTS
        is_spent = seconds > self._bench.plan.budget_s
        return len(samples) >= _MOST_PROMPTS or (len(samples) >= least and is_spent)

    def _inside(self, parts: Sequence[tuple[Times, float]]) -> Inside:
        passed = {part: statistics.median(times.get(part, 0.0) for times, _ in parts) * 1e3 for part in Part}
        busy = self.timeline.take()
        return Inside(
            parts_ms={part.value: float(f"{ms:.4g}") for part, ms in passed.items()},
            host=_samples([host_s * 1e3 for _, host_s in parts]),
            busy=None if busy is None else round(busy, 4),
        )

    def _floor_ms(self, rows: list[tuple[int, int]]) -> float | None:
        bench = self._bench
        if bench.ceilings is None:
            return None
        floor_ms = step_floor_ms(bench.config, bench.limits.dtype, bench.limits.kv_dtype, bench.ceilings, rows)
        return float(f"{floor_ms:.4g}")


def _samples(times: Sequence[float]) -> Samples:
    return Samples(
        p50=float(f"{statistics.median(times):.4g}"),
        spread=round(median_spread(list(times)), 4),
        all=[float(f"{ms:.4g}") for ms in times],
    )


def _paths(outputs: Iterable[StepOutput], phase: Phase | None = None) -> list[str]:
    counts = [it for output in outputs for it in output.record.dispatches]
    return sorted({it.path for it in counts if phase is None or it.phase == phase.value})
