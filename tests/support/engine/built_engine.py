"""Engines of small models for tests."""

from collections.abc import Callable
from typing import Any

import torch

from server.engine.startup.builder import BuiltEngine, build_engine
from server.settings import Settings


def built_engine(settings: Settings, run_qualification: Callable[..., None] | None = None) -> BuiltEngine:
    """Build an engine whose steps use one thread: for tensors this small, threads wait for each other.

    On two cores beside other processes the checks of one test took 125 s with two threads, and 5 s with one.
    """
    options: dict[str, Any] = {} if run_qualification is None else {"run_qualification": run_qualification}
    built = build_engine(settings, frozenset(), lambda *_: None, **options)
    torch.set_num_threads(1)
    return built
