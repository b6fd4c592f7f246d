"""Engines of small models for tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from qualification.decision.decision import Policy
from server.engine.startup.builder import BuiltEngine, build_engine
from server.settings import DeviceChoice, DtypeChoice, Settings


def built_engine(settings: Settings, run_qualification: Callable[..., None] | None = None) -> BuiltEngine:
    """Build an engine whose steps use one thread: for tensors this small, threads wait for each other.

    On two cores beside other processes the checks of one test took 125 s with two threads, and 5 s with one.
    """
    options: dict[str, Any] = {} if run_qualification is None else {"run_qualification": run_qualification}
    built = build_engine(settings, frozenset(), lambda *_: None, **options)
    torch.set_num_threads(1)
    return built


def gpu_engine(folder: Path, cache: Path, **changes: object) -> BuiltEngine:
    """Build the engine of a model on a GPU, which measures nothing. `changes` of its settings."""
    settings = Settings(
        model=str(folder),
        device=DeviceChoice.CUDA,
        dtype=DtypeChoice.BF16,
        on_unproven=Policy.DEGRADE,
        max_model_len=128,
        kv_cache_tokens=4096,
        max_num_seqs=4,
        cache_dir=str(cache),
    )
    return build_engine(msgspec.structs.replace(settings, **changes), frozenset(), lambda *_: None)
