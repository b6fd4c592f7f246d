"""A start says so where no file of the model names an end token."""

import json
import shutil
from pathlib import Path

import pytest

from server.settings import DeviceChoice, Policy, Settings, Task
from support.engine.built_engine import built_engine
from support.models.tiny_llama import TinyLlama


@pytest.mark.parametrize(
    ("end", "task", "is_warned"), [(None, Task.GENERATE, True), (5, Task.GENERATE, False), (None, Task.EMBED, False)]
)
def test_a_model_without_an_end_token_is_warned_of(
    end: int | None,
    task: Task,
    is_warned: bool,
    tiny_llama: TinyLlama,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama.folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    settings = Settings(
        model=str(folder),
        device=DeviceChoice.CPU,
        on_unproven=Policy.DEGRADE,
        cache_dir=str(tmp_path / "cache"),
        attestation_interval_s=0,
        task=task,
    )
    built_engine(settings)
    assert ("no file names an end token" in caplog.text) == is_warned
