"""`hallmark qualify`: prove on this machine every shape that a model can need. Reads no weights."""

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernels.system.triton_cache import use_own_cache
from kernels.system.whole_file import write_whole
from kernels.vocabulary.cache_dtype import FP8
from kernels.vocabulary.operators import Operator
from kernels.vocabulary.recurrence_operator import EVERY_OPERATOR
from kernels.vocabulary.shape import PLANNED_PHASES, Dtype, Phase
from qualification.common.exit_code import ExitCode
from qualification.common.flags import Commands, add_command, count, dtype_name, positive, shard
from qualification.common.out_folder import ready_to_write
from qualification.common.progress import ProgressLine
from qualification.decision.defaults import Choices
from qualification.decision.presets import PRESETS, Rounding, preset_named, rounded_config
from qualification.evidence.matrix import MATRICES
from qualification.model.shard import TENSOR_PARALLEL_SIZES

if TYPE_CHECKING:
    import torch

    from kernels.vocabulary.fingerprint import Fingerprint
    from kernels.vocabulary.path import AnyPath
    from qualification.evidence.ledger import Target
    from qualification.measure.qualify import Bench

# As plans call them: attention's phases, and the operators beside it.
_PHASES = [
    *(phase.value for phase in PLANNED_PHASES),
    *(it.value for it in EVERY_OPERATOR if it is not Operator.ATTENTION),
]
_VERIFY = Phase.VERIFY.value  # of tokens that are drafted: only of a server that drafts any
_QUICK_BUDGET_S = {"cuda": 0.05, "cpu": 0.01}  # of timing, for each pair


def add_parser(commands: Commands) -> None:
    """Add `hallmark qualify` to the commands of the program."""
    add_arguments(
        add_command(
            commands,
            "qualify",
            "prove a model's shapes on this machine",
            "Measure, on this machine, every shape of attention, products with weights and experts that a model can "
            "need, and write the evidence. Reads no weights; wrong kernels must be refused first.",
            "hallmark qualify --model ~/models/Qwen3-8B",
            "hallmark qualify --preset llama-3.1-8b --quick --out-dir evidence",
            "hallmark qualify --preset llama-3.1-8b --quantization fp8 --phases linear",
        )
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hallmark qualify`."""
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--model", type=Path, metavar="MODEL", help="folder with the model's config.json, or hub id")
    names = ", ".join(preset.name for preset in PRESETS)
    models.add_argument("--preset", action="append", metavar="NAME", help=f"may be repeated; one of {names}")
    models.add_argument("--all-presets", action="store_true", help="every preset")
    models.add_argument(
        "--error-rates",
        action="store_true",
        help="of no model: how often right kernels fail a check here, and wrong ones pass (docs/limits.md)",
    )
    parser.add_argument("--revision", metavar="NAME", help="of a hub id: branch, tag or commit")
    _add_measured(parser.add_argument_group("what is measured"))
    _add_written(parser.add_argument_group("where it is written"))
    _add_shapes(parser.add_argument_group("shapes of the model"))
    _add_run(parser.add_argument_group("run"))


def _add_measured(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--seeds", type=count, metavar="N", default=2, help="of --error-rates (default: 2)")
    group.add_argument(
        "--phases",
        nargs="+",
        choices=[*_PHASES, _VERIFY],
        default=_PHASES,
        help=f"of attention, and other operators (default: all but {_VERIFY}: steps over drafted tokens)",
    )
    group.add_argument("--paths", nargs="+", metavar="PATH", help="names as in `hallmark doctor` (default: all)")
    group.add_argument("--quick", action="store_true", help="the same checks, but a fifth of the time for timing")


def _add_written(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=Path, metavar="FILE", help="file of evidence, of one model")
    group.add_argument(
        "--out-dir", type=Path, metavar="DIR", default=MATRICES, help="writes DIR/<gpu>/<name>.json (default: ours)"
    )


def _add_shapes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-model-len", type=count, metavar="N", help="tokens (default: the model's own limit)")
    group.add_argument("--max-num-batched-tokens", type=count, metavar="N", help="default: the server's")
    group.add_argument("--page-size", type=count, metavar="N", help="tokens a page (default: the server's)")
    group.add_argument(
        "--dtype", type=dtype_name, choices=[dtype.value for dtype in Dtype], help="default: the server's"
    )
    group.add_argument(
        "--quantization",
        choices=[rounding.value for rounding in Rounding],
        help="prove a model of 16 bits in 8 or 4 bits, into <name>-<quantization>.json: rows that have a scale each, "
        "as `serve --quantization fp8` makes them; the same with one scale of inputs; blocks of 128 x 128; groups of "
        "128 codes of 4 bits, as AWQ's and GPTQ's files have them",
    )
    group.add_argument(
        "--kv-cache-dtype", choices=[FP8.value], help="of the KV cache (default: the server's without the setting)"
    )
    group.add_argument(
        "--kv-cache-dtype-skip-layers",
        type=lambda text: tuple(it.strip() for it in text.split(",")),
        default=(),
        metavar="LAYERS",
        help="that stay in the model's dtype beside it, as `serve` takes them",
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        choices=TENSOR_PARALLEL_SIZES,
        default=1,
        help="prove the shapes of one of so many ranks, into <name>-tpN.json (default: 1)",
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--time-limit", type=positive, metavar="SECONDS", help="stop then; the same command goes on")
    group.add_argument(
        "--shard",
        type=shard,
        metavar="I/N",
        help="only the I-th of N parts, dealt by shape: one for each GPU, each with an --out-dir of its own, which "
        "`hallmark matrix merge` puts together",
    )
    group.add_argument("--retry-failed", action="store_true", help="measure again what has failed on this stack")
    group.add_argument(
        "--full-model",
        action="store_true",
        help="then time the whole model with random weights, by the plan and by the fallbacks; needs --model with a "
        "config.json that the server reads, or a preset that holds all of it",
    )
    group.add_argument(
        "--count-bytes", action="store_true", help="then count the HBM bytes of a sample of calls, where ncu can run"
    )
    group.add_argument(
        "--compile-jobs",
        type=count,
        metavar="N",
        help="processes that compile before anything is measured, on a GPU (one a core and 2 GB, 32 at most; 1: none)",
    )
    group.add_argument("--commit", metavar="SHA", help="written into the evidence")


def run(args: argparse.Namespace, folder: Path | None = None) -> int:
    """Run with parsed flags, print, and return the exit code.

    folder  of a model that `args` names by its hub id; None: it is named by its folder
    """
    use_own_cache()
    try:
        return _error_rates(args) if args.error_rates else _run(args, models_of(args, folder))
    except KeyboardInterrupt:  # during the run itself `conduct` reports it, with the results so far
        print("hallmark: interrupted before anything was measured", file=sys.stderr)
        return ExitCode.INCONCLUSIVE
    except (OSError, ValueError) as error:
        print(f"hallmark: {error}", file=sys.stderr)
        return ExitCode.ENVIRONMENT


def _error_rates(args: argparse.Namespace) -> int:
    """Measure the checker's error rates: on a GPU of its paths, on a CPU under each instruction set."""
    import torch

    from kernels.system.device import num_cores, read_fingerprint
    from qualification.measure import error_rates
    from qualification.measure.qualify import now

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fingerprint = read_fingerprint(device)
    _print(f"on {fingerprint}")
    limit_s = args.time_limit or float("inf")
    seeds = range(1, 1 + args.seeds)
    if device.type == "cuda":
        shapes = list(error_rates.trial_shapes_of(device))
        rates = error_rates.measure(seeds, shapes, device=device, setting="cuda", has_faults=True, limit_s=limit_s)
    else:
        rates = error_rates.run_children(seeds, jobs=num_cores(), limit_s=limit_s, say=_print)
    for line in error_rates.report(rates):
        _print(line)
    if args.out is not None:
        body = {"fingerprint": fingerprint, "seeds": args.seeds, "at": now(), "rates": rates}
        write_whole(args.out, msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n")
    return ExitCode.PASS if error_rates.is_good(rates) else ExitCode.NUMERICS


def models_of(args: argparse.Namespace, folder: Path | None = None) -> dict[str, Mapping[str, object]]:
    """Parsed config.json by name, `folder` as in `run`. Raises ValueError."""
    if args.full_model and args.tensor_parallel_size > 1:
        raise ValueError("--full-model times a whole model on one GPU: --tensor-parallel-size must be 1 with it")
    if args.model is not None:
        found = {args.model.resolve().name: _config_of((folder or args.model) / "config.json")}
    else:
        presets = PRESETS if args.all_presets else [preset_named(name) for name in args.preset]
        if args.out is not None and len(presets) > 1:
            raise ValueError(f"--out takes one model, {len(presets)} are asked for: use --out-dir")
        found = {preset.name: preset.whole for preset in presets}
    if args.quantization is None:
        return found
    if args.full_model:
        raise ValueError("--full-model times a model as its file is: leave --quantization out with it")
    rounding = Rounding(args.quantization)
    if rounding is not Rounding.FP8:
        found = {name: rounded_config(config, rounding) for name, config in found.items()}
    return {f"{name}-{rounding.value}": config for name, config in found.items()}  # of fp8: see `choices_of`


def choices_of(args: argparse.Namespace) -> Choices:
    """Return what the flags say of the server whose shapes are proven."""
    return Choices(
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        page_size=args.page_size,
        dtype=None if args.dtype is None else Dtype(args.dtype),
        kv_dtype=None if args.kv_cache_dtype is None else FP8,
        kv_skip_layers=tuple(args.kv_cache_dtype_skip_layers),
        max_drafted_tokens=1 if _VERIFY in args.phases else 0,  # the shapes are the same for any number
        rounds_at_load=args.quantization == Rounding.FP8.value,
    )


def _config_of(file: Path) -> Mapping[str, object]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON object: {error}") from error


def _compile_jobs(asked: int | None) -> int:
    """Return the asked number of processes, else what the cores and the GPU's memory allow."""
    import torch

    from kernels.system.device import num_cores
    from qualification.compiling.processes import processes_for

    return asked or processes_for(num_cores(), torch.cuda.mem_get_info()[1])


def _run(args: argparse.Namespace, models: Mapping[str, Mapping[str, object]]) -> int:
    import torch  # the command line as a whole does without it

    from kernels.catalog import any_path_named, paths_on
    from kernels.system.device import read_fingerprint, use_all_cores
    from qualification.measure.campaign import Tools, conduct, default_file, shard_of_targets, targets_of
    from qualification.measure.qualify import qualify

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        use_all_cores()
    fingerprint = read_fingerprint(device)
    bench = _bench(args, fingerprint, device)
    catalog = paths_on(device)  # as a server on this machine has them: tilings depend on the GPU's multiprocessors
    names = None if args.paths is None else {any_path_named(name).name for name in args.paths}
    paths = tuple(path for path in catalog if names is None or path.name in names)
    targets = targets_of(
        models,
        choices_of(args),
        device_type=device.type,
        phases=args.phases,
        paths=paths,
        file_of=lambda name: args.out or default_file(args.out_dir, fingerprint.gpu, name),
        tensor_parallel_size=args.tensor_parallel_size,
    )
    if args.shard is not None:
        targets = shard_of_targets(targets, *args.shard, is_cpu=device.type == "cpu")
    for folder in {target.file.parent for target in targets}:
        ready_to_write(folder)
    tools = Tools(
        catalog=catalog,
        paths=paths,
        fingerprint=fingerprint,
        measure=lambda pairs, progress, on_evidence: qualify(pairs, bench, progress=progress, on_evidence=on_evidence),
        progress=ProgressLine(sys.stdout, time.monotonic, is_terminal=sys.stdout.isatty()),
        say=_print,
        clock=time.monotonic,
    )
    _print(f"on {fingerprint}")
    beside = []
    if args.quantization is not None and args.out is None:  # what stays in 16 bits is that of the model itself
        rounded = f"-{args.quantization}"
        beside = [target.file.with_stem(target.file.stem.replace(rounded, "")) for target in targets]
    code = conduct(targets, tools, time_limit_s=args.time_limit, is_retrying=args.retry_failed, beside=beside)
    is_counting = args.count_bytes and code is ExitCode.PASS
    return _count_bytes(targets, catalog, fingerprint) if is_counting else code


def _bench(args: argparse.Namespace, fingerprint: "Fingerprint", device: "torch.device") -> "Bench":
    from qualification.measure.qualify import Bench

    is_gpu = device.type == "cuda"
    return Bench(
        fingerprint,
        device,
        commit=args.commit,
        timing_budget_s=_QUICK_BUDGET_S[device.type] if args.quick else None,
        command=typed(args),
        compile_jobs=_compile_jobs(args.compile_jobs) if is_gpu else 1,
    )


def _count_bytes(targets: Sequence["Target"], catalog: Sequence["AnyPath"], fingerprint: "Fingerprint") -> ExitCode:
    """Count the HBM bytes of each model's file. Counters that are not available are no failure: they prove nothing."""
    import torch

    from qualification.measure.costs.hbm_counters import CounterError, count_into

    torch.cuda.empty_cache()  # another process needs it now
    for target in targets:
        try:
            num_counted, num_calls = count_into(target.file, catalog, fingerprint, say=_print)
            goes_on = "" if num_counted == num_calls else ", the same command goes on"
            _print(f"{target.name}: HBM bytes of {num_counted} of {num_calls} calls counted{goes_on} -> {target.file}")
        except CounterError as error:
            _print(f"{target.name}: HBM bytes are not counted: {error}")
        except KeyboardInterrupt:
            _print("interrupted: all that was measured is kept, the same command goes on from here")
            return ExitCode.INCONCLUSIVE
    return ExitCode.PASS


def typed(args: argparse.Namespace) -> str:
    """The command as its evidence names it: what was asked for, without where it was written to."""
    names = ["--model", args.model.name] if args.model is not None else ["--all-presets"] if args.all_presets else []
    for preset in args.preset or ():
        names += ["--preset", preset]
    values = {
        "--max-model-len": args.max_model_len,
        "--max-num-batched-tokens": args.max_num_batched_tokens,
        "--page-size": args.page_size,
        "--dtype": args.dtype,
        "--quantization": args.quantization,
        "--kv-cache-dtype": args.kv_cache_dtype,
        "--kv-cache-dtype-skip-layers": ",".join(args.kv_cache_dtype_skip_layers) or None,
        "--tensor-parallel-size": None if args.tensor_parallel_size == 1 else args.tensor_parallel_size,
    }
    for flag, value in values.items():
        names += [] if value is None else [flag, str(value)]
    return shlex.join(
        [
            "hallmark",
            "qualify",
            *names,
            *(["--phases", *args.phases] if set(args.phases) != set(_PHASES) else []),
            *(["--paths", *args.paths] if args.paths else []),
            *(["--quick"] if args.quick else []),
            *(["--full-model"] if args.full_model else []),
            *(["--count-bytes"] if args.count_bytes else []),
        ]
    )


def _print(line: str) -> None:
    print(line, flush=True)
