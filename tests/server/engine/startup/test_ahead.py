"""Compiling ahead of a start: which kernels, whether a start finds them, and what a start with all of them does."""

import json
from pathlib import Path

import pytest

from support.compiled.compile_outside import run_outside


@pytest.mark.first
@pytest.mark.parametrize(
    ("preset", "layers", "settings"),
    [
        ("llama-3.1-8b", 3, {}),
        ("qwen3.5-35b-a3b", 5, {"speculative_tokens": 1}),
    ],
)
def test_rehearsal_finds_the_kernels_that_the_start_launches(
    preset: str, layers: int, settings: dict[str, object], tmp_path: Path
) -> None:
    """Both ways: none is missed, and none is compiled in vain. Service then needs no other."""
    arguments = preset, str(layers), json.dumps({"max_model_len": 4096, **settings}), str(tmp_path)
    found = run_outside("pretended_start.py", *arguments, cache=tmp_path / "triton")
    assert len(found["at_start"]) > 30
    assert sorted(found["rehearsed"]) == sorted(found["at_start"])
    assert found["in_service"] == []


@pytest.mark.sm90
def test_start_finds_in_the_cache_what_was_compiled_ahead(tmp_path: Path) -> None:
    arguments = "demo", "2", json.dumps({"compile_jobs": 2, "cuda_graphs": False}), str(tmp_path)
    first, second = (run_outside("pretended_start.py", *arguments, cache=tmp_path / "triton") for _ in range(2))
    count = len(first["at_start"])
    assert f"{count} of {count} kernels compiled ahead of their launches" in first["said"]
    assert any(it.startswith(f"{count}/{count} ") for it in first["progress"])
    assert first["missing"] == second["missing"] == []
    assert "Triton's cache has every kernel of the plan" in second["said"]
    assert not any("ahead of their launch" in it or "finding" in it for it in second["progress"])


# Models of every kind of layer; the first has most of the kernels that all share.
MODELS = (
    "qwen3.5-35b-a3b:5",
    "glm-4.7-flash:2",
    "deepseek-ai/DeepSeek-V3.2:4",
    "XiaomiMiMo/MiMo-V2-Flash:6",
    "LiquidAI/LFM2.5-1.2B-Instruct:16",
    "nemotron-3-nano-30b-a3b:52",
    "kimi-linear-48b-a3b:27",
    "ling-2.6-flash:16",
    "gpt-oss-20b:2",
    "gemma-4-26b-a4b:6",
    "falcon_h1:2",
)


@pytest.mark.sm90
def test_each_kernel_that_a_start_launches_compiles() -> None:
    """The interpreter takes what a GPU's compiler refuses: a name of two shapes, say, in two branches."""
    found = run_outside("starts_compile.py", *MODELS)
    assert found["failed"] == {}
    assert sum(found["new"].values()) > 80
