"""Times of a whole model with random weights, attention by the plan and by the fallbacks.

`hallmark qualify --full-model` writes the result beside the evidence of the kernels. The engine is the server's own,
with its scheduler, graphs and sampler; only HTTP and tokenization are left out.

`python -m server.full_model.measure ASKED.json FOUND.json` is a process of its own: after a profiler each replay
of a decode graph takes 83 us longer (`kernels/driver/driver_record.py`), and an engine needs the memory that a
qualification holds.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import msgspec
import torch

from kernels.catalog import PATHS
from kernels.system.whole_file import write_whole
from kernels.vocabulary.path import Tier
from kernels.vocabulary.shape import Phase
from qualification.common.exit_code import ExitCode
from qualification.decision.decision import Policy
from qualification.decision.model_shapes import attention_shapes_needed
from qualification.evidence.full_model import Attention, FullModel, ModelTiming
from qualification.measure.costs.timing import median_spread
from server.engine.startup.builder import BuiltEngine, build_engine
from server.engine.startup.limits import choose_device, choose_limits
from server.engine.startup.plan import Unservable
from server.errors import StartError
from server.full_model.drive import Driver, RequestFailed, is_decode_of
from server.model.load.load import load_config
from server.protocol.messages import StepOutput
from server.settings import LoadFormat, Settings

PROMPTS = (128, 512, 2048, 8192, 32768)  # tokens: the upper ends of the buckets
DECODES = ((1, 512), (8, 2048), (32, 2048))  # sequences, tokens of context
_DECODE_STEPS = 64  # while the last of 32 prompts is computed the first ones decode half of them
_PROMPT_SECONDS = 1.5  # of one length, at most, after three prompts
_MAX_SAMPLES = 15

Say = Callable[[str], None]


class _Timer:
    """Drives an engine and keeps what it says of its steps."""

    def __init__(self, built: BuiltEngine) -> None:
        self._driver = Driver(built.engine)
        self._timer = built.runner.dispatcher.timer
        self.paths = {(row.phase, row.path) for row in built.ready.plan if row.path is not None}
        if self._timer is not None:
            self._timer.every = 1

    def prompt_ms(self, num_tokens: int) -> tuple[float, float | None]:
        """One prompt alone, from its submission to its first token: (all, attention's part), in ms."""
        outputs, seconds = self._driver.serve(1, num_tokens, 1)
        return seconds[-1] * 1e3, _attention_ms(outputs, (Phase.PREFILL, Phase.EXTEND))

    def clear(self) -> None:
        """Leave the engine idle."""
        self._driver.clear()

    def decode_ms(self, num_sequences: int, num_tokens: int) -> list[tuple[float, float | None]]:
        """Steps of `num_sequences` contexts: (all, attention's part) of each, in ms."""
        outputs, seconds = self._driver.serve(num_sequences, num_tokens, _DECODE_STEPS + 1)
        steps = []
        for (before, now), output in zip(pairwise(seconds), outputs[1:], strict=False):
            if is_decode_of(output, num_sequences):
                steps.append(((now - before) * 1e3, _attention_ms([output], (Phase.DECODE,))))
        return steps


def measure_model(
    settings: Settings, *, name: str, command: str, commit: str | None, say: Say, keep: Callable[[FullModel], None]
) -> None:
    """Time the model of `settings` (a folder with config.json) with dummy weights.

    Gives `keep` all that is known after each attention. Raises StartError, Unservable.
    """
    at, layers = datetime.now(UTC).isoformat(timespec="seconds"), load_config(Path(settings.model)).num_layers
    timings: list[ModelTiming] = []
    for attention in Attention:
        timings += _timings(settings, attention, say)
        keep(FullModel(name, at, layers, tuple(timings), command, commit))
        gc.collect()  # an engine is held by cycles, and the next one needs its memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _timings(settings: Settings, attention: Attention, say: Say) -> list[ModelTiming]:
    built = _build(settings, attention, say)
    bench = _Timer(built)
    longest = built.engine.max_len - _DECODE_STEPS - 2
    prompts = _prompts(bench, attention, [n for n in PROMPTS if n <= longest], say)
    return prompts + _decodes(bench, attention, [pair for pair in DECODES if pair[1] <= longest], say)


def _build(settings: Settings, attention: Attention, say: Say) -> BuiltEngine:
    """Build the engine. For the fallbacks every path of the first tier counts as broken."""
    settings = msgspec.structs.replace(
        settings,
        load_format=LoadFormat.DUMMY,
        attestation_interval_s=0.0,
        on_unproven=Policy.DEGRADE,
        prefix_caching=False,  # every prompt is the same
    )
    broken: frozenset[tuple[str, str]] = frozenset()
    if attention is Attention.FALLBACK:
        config, device = load_config(Path(settings.model)), choose_device(settings)
        shapes = attention_shapes_needed(config, choose_limits(settings, config, device).serving)
        first = [path.name for path in PATHS if path.tier is Tier.FIRST]
        broken = frozenset((path, str(shape)) for path in first for shape in shapes)
    say(f"building the model, attention by the {attention.value}")
    return build_engine(settings, broken, lambda *_: None)


def _prompts(bench: _Timer, attention: Attention, lengths: Iterable[int], say: Say) -> list[ModelTiming]:
    found = []
    for num_tokens in lengths:
        try:
            samples = _prompt_samples(bench, num_tokens)
        except RequestFailed as error:  # as of a fallback that needs memory quadratic in the length
            say(f"prefill of {num_tokens} tokens by the {attention.value}: {error}")
            bench.clear()
            continue
        found.append(_timing(bench, Phase.PREFILL, num_tokens, 1, attention, samples))
        say(_line(found[-1]))
    return found


def _prompt_samples(bench: _Timer, num_tokens: int) -> list[tuple[float, float | None]]:
    """Time one prompt of this length several times. Raises RequestFailed."""
    bench.prompt_ms(num_tokens)  # the first of a length may still load something
    samples: list[tuple[float, float | None]] = []
    began_at = time.perf_counter()
    while len(samples) < 3 or (len(samples) < _MAX_SAMPLES and time.perf_counter() - began_at < _PROMPT_SECONDS):
        samples.append(bench.prompt_ms(num_tokens))
    return samples


def _decodes(bench: _Timer, attention: Attention, pairs: Iterable[tuple[int, int]], say: Say) -> list[ModelTiming]:
    found = []
    for num_sequences, num_tokens in pairs:
        try:
            samples = bench.decode_ms(num_sequences, num_tokens)
        except RequestFailed as error:
            say(f"decode of {num_sequences} x {num_tokens} tokens by the {attention.value}: {error}")
            bench.clear()
            continue
        if len(samples) >= 3:
            found.append(_timing(bench, Phase.DECODE, num_tokens, num_sequences, attention, samples))
            say(_line(found[-1]))
    return found


def _timing(
    bench: _Timer,
    phase: Phase,
    num_tokens: int,
    num_sequences: int,
    attention: Attention,
    samples: list[tuple[float, float | None]],
) -> ModelTiming:
    times = [sample[0] for sample in samples]
    parts = [part for _, part in samples if part is not None]
    wanted = {Phase.DECODE.value} if phase is Phase.DECODE else {Phase.PREFILL.value, Phase.EXTEND.value}
    return ModelTiming(
        phase=phase,
        tokens=num_tokens,
        sequences=num_sequences,
        attention=attention,
        paths=tuple(sorted({path for of_phase, path in bench.paths if of_phase in wanted})),
        p50_ms=float(f"{statistics.median(times):.4g}"),
        spread=round(median_spread(times), 4),
        n=len(times),
        attention_ms=float(f"{statistics.median(parts):.4g}") if parts else None,
    )


def _attention_ms(outputs: Iterable[StepOutput], phases: tuple[Phase, ...]) -> float | None:
    """Kernel time of all attention layers in these steps, by the timer; a step's own samples come with a later one."""
    names = {phase.value for phase in phases}
    samples = [it.kernel_s for output in outputs for it in output.record.attention_samples if it.phase in names]
    return sum(samples) * 1e3 if samples else None


def _line(timing: ModelTiming) -> str:
    part = "" if timing.attention_ms is None else f", attention {timing.attention_ms:.4g} ms"
    what = f"{timing.phase.value} of {timing.sequences} x {timing.tokens} tokens"
    return f"{what} by the {timing.attention.value}: {timing.p50_ms:.4g} ms{part}"


class Asked(msgspec.Struct, frozen=True):
    settings: Settings  # `model` is a folder with config.json
    name: str
    command: str
    commit: str | None


def main(asked_file: Path, found_file: Path) -> int:
    """Writes the file after each attention, so that what is measured is kept whatever comes."""
    asked = msgspec.json.decode(asked_file.read_bytes(), type=Asked)

    def keep(found: FullModel) -> None:
        write_whole(found_file, msgspec.json.encode(found))

    try:
        measure_model(
            asked.settings,
            name=asked.name,
            command=asked.command,
            commit=asked.commit,
            say=lambda line: print(line, flush=True),
            keep=keep,
        )
    except (StartError, Unservable) as error:
        print(f"hallmark: {asked.name}: {error}", file=sys.stderr, flush=True)
        return ExitCode.ENVIRONMENT
    except KeyboardInterrupt:  # who asked says so
        return ExitCode.INCONCLUSIVE
    return ExitCode.PASS


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
