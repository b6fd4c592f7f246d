"""`hallmark qualify --full-model`: the whole model's times, written into the matrix file of its kernels."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from kernels.system.child_process import python_command
from kernels.system.device import read_fingerprint
from qualification.commands.qualify import typed
from qualification.common.exit_code import ExitCode
from qualification.decision.presets import PRESETS, Preset, preset_named
from qualification.evidence.full_model import FullModel
from qualification.evidence.matrix import MatrixError, load_matrix, save_matrix
from qualification.measure.campaign import default_file
from server.engine.startup.limits import choose_device
from server.full_model.measure import Asked
from server.settings import Settings

# A prompt of 32k, and twice what the contexts of the longest decode take, 32 of 2048 tokens and 64 more.
_KV_TOKENS = 131072
_MAX_LEN = 33000


def run(args: argparse.Namespace, folder: Path | None = None) -> int:
    """Time each model that was qualified. A preset without all of a model's config.json is left out.

    folder  of a model that `args` names by its hub id; None: it is named by its folder
    """
    gpu = read_fingerprint(choose_device(Settings())).gpu
    code = ExitCode.PASS
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the model is timed in another process
    for name, config in _configs(args, folder).items():
        if config is None:
            _print(f"{name}: the preset holds its attention only, so the whole model is not timed")
            continue
        file = args.out or default_file(args.out_dir, gpu, name)
        try:
            code = max(code, _measure(name, config, file, args))
        except (MatrixError, OSError) as error:
            print(f"hallmark: {name}: {error}", file=sys.stderr)
            code = ExitCode.ENVIRONMENT
        except KeyboardInterrupt:
            _print("interrupted: what is known of the kernels, and of whole models so far, is kept")
            return ExitCode.INCONCLUSIVE
    return code


def _configs(args: argparse.Namespace, folder: Path | None) -> dict[str, Mapping[str, object] | None]:
    """The whole config.json by name; None where it is not known."""
    if args.model is not None:
        config = msgspec.json.decode(((folder or args.model) / "config.json").read_bytes(), type=dict[str, object])
        return {args.model.resolve().name: config}
    presets: tuple[Preset, ...] = PRESETS if args.all_presets else tuple(map(preset_named, args.preset))
    return {it.name: dict(it.config) if it.is_served else None for it in presets}


def _measure(name: str, config: Mapping[str, object], file: Path, args: argparse.Namespace) -> ExitCode:
    """Into `file`, whose evidence decides which paths the plan takes. Raises MatrixError, OSError."""
    matrix = load_matrix(file)
    with tempfile.TemporaryDirectory(prefix="hallmark-model-") as place:
        folder, asked, found = (Path(place) / part for part in ("model", "asked.json", "found.json"))
        folder.mkdir()
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
        settings = _settings(folder, file, config.get("max_position_embeddings"), args)
        asked.write_bytes(msgspec.json.encode(Asked(settings, name, typed(args), args.commit)))
        try:
            command = python_command("server.full_model.measure", str(asked), str(found))
            code = subprocess.run(command, check=False).returncode
        finally:
            with suppress(FileNotFoundError):
                model = msgspec.json.decode(found.read_bytes(), type=FullModel)
                save_matrix(file, matrix.evidence.values(), model)
                _print(f"{name}: {len(model.timings)} times of the whole model -> {file}")
    return ExitCode.PASS if code == ExitCode.PASS else ExitCode.ENVIRONMENT


def _settings(folder: Path, file: Path, longest: object, args: argparse.Namespace) -> Settings:
    limit = min(args.max_model_len or _MAX_LEN, longest if isinstance(longest, int) else _MAX_LEN)
    return Settings(
        model=str(folder),
        matrix=str(file.parent.parent),
        max_model_len=limit,
        kv_cache_tokens=max(_KV_TOKENS, limit) if torch.cuda.is_available() else 2 * limit,
        max_num_seqs=32,
        page_size=args.page_size,
    )


def _print(line: str) -> None:
    print(line, flush=True)
