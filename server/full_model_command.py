"""`hallmark qualify --full-model`: the whole model's times, written into the matrix file of its kernels."""

import argparse
import gc
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from kernels.device import read_fingerprint
from qualification.campaign import default_file
from qualification.canary.verdict import ExitCode
from qualification.matrix import MatrixError, load_matrix, save_matrix
from qualification.presets import PRESETS, Preset, preset_named
from qualification.qualify_command import typed
from server.engine.limits import choose_device
from server.engine.planning import Unservable
from server.errors import StartError
from server.full_model import measure_model
from server.settings import Settings

# Two engines of one model one after the other, beside whatever the kernels' qualification left behind.
_KV_TOKENS = 131072
_MAX_LEN = 33000


def run(args: argparse.Namespace) -> int:
    """For each model that was qualified. A preset that does not hold all of a model's config.json is passed over."""
    device = choose_device(Settings())
    gpu = read_fingerprint(device).gpu
    code = ExitCode.PASS
    for name, config in _configs(args).items():
        if config is None:
            _print(f"{name}: the preset holds its attention only, so the whole model is not timed")
            continue
        file = args.out or default_file(args.out_dir, gpu, name)
        try:
            _measure(name, config, file, args)
        except (StartError, Unservable, MatrixError, OSError) as error:
            print(f"hallmark: {name}: {error}", file=sys.stderr)
            code = ExitCode.ENVIRONMENT
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return code


def _configs(args: argparse.Namespace) -> dict[str, Mapping[str, object] | None]:
    """The whole config.json by name; None where it is not known."""
    if args.model is not None:
        config = msgspec.json.decode((args.model / "config.json").read_bytes(), type=dict[str, object])
        return {args.model.resolve().name: config}
    presets: tuple[Preset, ...] = PRESETS if args.all_presets else tuple(map(preset_named, args.preset))
    return {it.name: None if it.rest is None else {**it.config, **it.rest} for it in presets}


def _measure(name: str, config: Mapping[str, object], file: Path, args: argparse.Namespace) -> None:
    """Into `file`, whose evidence decides which paths the plan takes. Raises StartError, Unservable, MatrixError."""
    matrix = load_matrix(file)
    with tempfile.TemporaryDirectory(prefix="hallmark-model-") as folder:
        (Path(folder) / "config.json").write_bytes(msgspec.json.encode(config))
        longest = config.get("max_position_embeddings")
        limit = min(args.max_model_len or _MAX_LEN, longest if isinstance(longest, int) else _MAX_LEN)
        settings = Settings(
            model=folder,
            matrix=str(file.parent.parent),
            max_model_len=limit,
            kv_cache_tokens=max(_KV_TOKENS, limit) if torch.cuda.is_available() else 2 * limit,
            max_num_seqs=32,
            page_size=args.page_size,
        )
        found = measure_model(settings, name=name, command=typed(args), commit=args.commit, say=_print)
    save_matrix(file, matrix.evidence.values(), found)
    _print(f"{name}: {len(found.timings)} times of the whole model -> {file}")


def _print(line: str) -> None:
    print(line, flush=True)
