"""Engines of the tiny Llama on a CPU."""

from pathlib import Path

from qualification.decision.decision import Policy
from server.engine.startup.builder import BuiltEngine
from server.settings import DeviceChoice, Settings
from support.engine.built_engine import built_engine
from support.engine.graph_session import Session
from support.models.tiny_llama import TinyLlama


def settings_of(model: TinyLlama, cache: Path, **settings: int) -> Settings:
    options = {"max_model_len": 128, "kv_cache_tokens": 2048, "max_num_seqs": 8, **settings}
    return Settings(
        model=str(model.folder),
        device=DeviceChoice.CPU,
        on_unproven=Policy.DEGRADE,  # measures nothing
        cache_dir=str(cache),
        **options,  # type: ignore[arg-type]
    )


def build(model: TinyLlama, cache: Path, **settings: int) -> BuiltEngine:
    return built_engine(settings_of(model, cache, **settings))


def session_of(model: TinyLlama, cache: Path, **settings: int) -> Session:
    return Session(build(model, cache, **settings).engine)
