"""`hallmark bench steps`: how the cost of a step grows with prompts, batches and contexts, and where it goes."""

import argparse
import gc
import importlib.metadata
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.machine import RESULTS, add_ceiling_arguments, ceilings_of, commit_of_code, machine_of, slug
from bench.steps.report import derived, report_lines, steps_charts
from bench.steps.row import SCHEMA, StepsFile, save
from qualification.common.out_folder import ready_to_write
from qualification.common.progress import ProgressLine
from qualification.decision.presets import PRESETS, Rounding, rounded_config
from server.errors import SettingsError
from server.model.load.source import is_hub_id, model_folder
from server.settings import DEMO_MODEL, LoadFormat, Settings, read_settings

if TYPE_CHECKING:
    from bench.steps.cells import StepsBench

# The longest prompt: as far as the reviewed matrices reach, so that no start has to qualify for minutes.
_MAX_MODEL_LEN = 32768
_TIME_LIMITS_S = {"cuda": 200.0, "cpu": 80.0}
_QUICK_LENGTH = 512
_REPORT_EVERY_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hallmark bench steps`."""
    limits = ", ".join(f"{seconds:g} on {kind}" for kind, seconds in _TIME_LIMITS_S.items())
    names = ", ".join(preset.name for preset in PRESETS if preset.is_served)
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "--model", default="demo", metavar="DIR|NAME", help=f"a model's folder or hub id, `demo` (the default), {names}"
    )
    group.add_argument(
        "--quantization",
        choices=[rounding.value for rounding in Rounding],
        help="of a model that is named: its weights in 8 bits, as `hallmark qualify` has them",
    )
    group.add_argument("--revision", metavar="NAME", help="of a hub id: branch, tag or commit")
    group.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    group.add_argument(
        "--dummy", action="store_true", help="random weights; what a folder without safetensors gets in any case"
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help=f"the longest sequence (default: the model's, to {_MAX_MODEL_LEN})",
    )
    group.add_argument(
        "--set", action="append", default=[], type=_setting, metavar="NAME=VALUE", help="of serve: cuda-graphs=false"
    )
    group = parser.add_argument_group("sweep")
    group.add_argument("--quick", action="store_true", help="a tiny sweep, seconds on a CPU")
    group.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help=f"measure nothing more after that, the start not counted (default: {limits})",
    )
    add_ceiling_arguments(group)
    group = parser.add_argument_group("results")
    group.add_argument("--commit", metavar="SHA", help="of the code (default: what git says)")
    group.add_argument("--out", type=Path, metavar="DIR", default=RESULTS, help="default: ./%(default)s")
    group.add_argument("--name", help="of the files (default: steps-<model>-<gpu>)")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run with parsed flags, print and write; 0 when it ran, whatever it found. Raises StartError."""
    from server.engine.startup.plan import Unservable  # imports torch

    with ExitStack() as stack:
        try:
            settings = _settings(args, environ, stack)
            name = "demo" if settings.model == str(DEMO_MODEL) else Path(args.model).resolve().name
            name += "" if args.quantization is None else f"-{args.quantization}"
            ready_to_write(args.out)
            file = _measured(args, settings, name)
            paths = write(args.out, args.name or f"steps-{slug(name)}-{slug(str(file.machine['gpu']))}", file)
        except (OSError, ValueError, Unservable) as error:
            print(f"hallmark: {error}", file=sys.stderr)
            return 3
    for line in [*report_lines(file), "", *(f"wrote {path}" for path in paths)]:
        print(line, flush=True)
    return 0


def write(folder: Path, name: str, file: StepsFile) -> list[Path]:
    """Write NAME.json and NAME-<chart>.svg, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / f"{name}.json", file, derived(file))
    found = [folder / f"{name}.json"]
    for chart, text in steps_charts(file).items():
        found.append(folder / f"{name}-{chart}.svg")
        found[-1].write_text(text, encoding="utf-8")
    return found


def _settings(args: argparse.Namespace, environ: Mapping[str, str], stack: ExitStack) -> Settings:
    """Return the settings of `hallmark serve`, without those that would disturb a measurement. Raises SettingsError."""
    from server.model.load.load import load_config

    folder = _folder(args, stack)
    is_dummy = args.dummy or not any(folder.glob("*.safetensors"))
    longest = min(
        load_config(folder).max_position, args.max_model_len or (_QUICK_LENGTH if args.quick else _MAX_MODEL_LEN)
    )
    flags = {
        "model": str(folder),
        "device": args.device,
        "load_format": (LoadFormat.DUMMY if is_dummy else LoadFormat.AUTO).value,
        "max_model_len": str(longest),
        "max_num_seqs": "256",
        # As many prompt tokens a step as it takes: the sooner all sequences decode, the more alike are their contexts.
        "max_num_interleaved_tokens": "8192",
        "prefix_caching": "false",  # every prompt is the same
        "attestation_interval_s": "0",
    }
    return read_settings(flags | dict(args.set), environ)


def _folder(args: argparse.Namespace, stack: ExitStack) -> Path:
    """Return the model's folder; that of a preset exists for as long as the stack is open. Raises StartError."""
    model: str = args.model
    if model == "demo":
        return DEMO_MODEL
    preset = next((preset for preset in PRESETS if preset.name == model and preset.is_served), None)
    if preset is not None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hallmark-model-")))
        config = preset.config
        if args.quantization is not None:
            config = rounded_config(config, Rounding(args.quantization))
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
        return folder
    if args.quantization is not None:
        raise SettingsError(f"--quantization is for models named by a preset, not for {model}: --set quantization=fp8")
    if is_hub_id(model) or args.revision is not None:
        return model_folder(model, args.revision, has_weights=not args.dummy, say=lambda line: print(line, flush=True))
    if not (Path(model) / "config.json").is_file():
        raise SettingsError(f"--model {model}: no folder with config.json, and no name of a whole preset")
    return Path(model)


def _measured(args: argparse.Namespace, settings: Settings, name: str) -> StepsFile:
    """Build the engine and measure it. Raises StartError and Unservable when no such engine can be built."""
    from bench.steps.cells import CPU_PLAN, CUDA_PLAN, QUICK_PLAN, StepsBench
    from bench.steps.run import measure
    from kernels.system.device import num_cores, read_fingerprint
    from server.engine.startup.builder import build_engine
    from server.engine.startup.limits import choose_device, choose_limits
    from server.model.load.load import load_config

    device, config = choose_device(settings), load_config(Path(settings.model))
    limits = choose_limits(settings, config, device)
    fingerprint = read_fingerprint(device, num_threads=num_cores())
    ceilings = ceilings_of(args, device, limits.dtype, fingerprint)
    machine, started_at = _machine(machine_of(fingerprint, device)), time.monotonic()
    built = build_engine(settings, frozenset(), _Stages())
    start_s = time.monotonic() - started_at
    plan = QUICK_PLAN if args.quick else CUDA_PLAN if device.type == "cuda" else CPU_PLAN
    limit_s = _TIME_LIMITS_S[device.type] if args.time_limit is None else args.time_limit
    bench = StepsBench(built, config, limits, ceilings, plan, is_cuda=device.type == "cuda")
    with _calm() as progress:
        found = measure(bench, progress, time_limit_s=limit_s)
    return StepsFile(
        schema=SCHEMA,
        command=shlex.join(["hallmark", *sys.argv[1:]]),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=args.commit or commit_of_code(),
        machine=machine,
        model={"name": name, "weights": settings.load_format.value, **_model(bench), "start_s": round(start_s, 1)},
        ceilings=None if ceilings is None else asdict(ceilings),
        skipped=found.skipped,
        prefill=sorted(found.prefill, key=lambda row: row.tokens),
        decode=found.decode,
        load=found.load,
    )


@contextmanager
def _calm() -> Iterator[ProgressLine]:
    """No collection of what lives as long as the engine, as in the engine's own process; and a line of progress."""
    line = ProgressLine(sys.stderr, time.monotonic, is_terminal=sys.stderr.isatty())
    gc.collect()
    gc.freeze()
    try:
        yield line
    finally:
        gc.unfreeze()
        line.close()


def _machine(known: Mapping[str, str | int | float | None]) -> dict[str, str | int | float | None]:
    """Describe the machine before the start, whose load average is that of others."""
    from kernels.system.device import num_cores  # imports torch

    return {
        **known,
        "cores": num_cores(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "hallmark": importlib.metadata.version("hallmark-serve"),
    }


def _model(bench: "StepsBench") -> dict[str, str | int | float | None]:
    from qualification.model.config import num_parameters

    config, limits, ready = bench.config, bench.limits, bench.built.ready
    return {
        "parameters": num_parameters(config),
        "layers": config.num_layers,
        "dtype": limits.dtype.value,
        "max_model_len": ready.max_model_len,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "page_size": limits.page_size,
        "kv_cache_tokens": ready.num_pages * ready.page_size,
    }


class _Stages:
    """Print each stage of the start, and its progress from time to time."""

    def __init__(self) -> None:
        self._reported: str | None = None
        self._reported_at = 0.0

    def __call__(self, stage: str, detail: str) -> None:
        now = time.monotonic()
        if stage != self._reported or now - self._reported_at > _REPORT_EVERY_S:
            print(f"{stage}: {detail}", file=sys.stderr, flush=True)
            self._reported, self._reported_at = stage, now


def _setting(text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    field = name.replace("-", "_")
    if not is_there or field not in Settings.__struct_fields__:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE with a flag of serve, got {text}")
    return field, value
