"""Folders and files that are no model: each is named in one line, with what to do."""

import json
from pathlib import Path

import pytest

from server.errors import ModelError
from server.model.load.folder import check_folder

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
ADAPTER = json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B", "peft_type": "LORA"})
FOLDERS: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, "the folder is empty"),
    "GGUF": ({"model-Q4_K_M.gguf": "GGUF"}, "holds no safetensors. GGUF files are not read: serve the folder of safe"),
    "Mistral's format": (
        {"params.json": "{}", "consolidated.safetensors": ""},
        r"its files are in Mistral's own format .params.json, no config.json., which is not read: serve the same model",
    ),
    "GGUF beside a config": ({"model.gguf": "GGUF", "config.json": "{}"}, "GGUF files are not read"),
    "an adapter": (
        {"adapter_config.json": ADAPTER, "adapter_model.safetensors": "x", "tokenizer.json": "{}"},
        r"holds an adapter \(LoRA\), .*merge it into Qwen/Qwen3-8B",
    ),
    "pointers": (
        {"config.json": "{}", "model-1.safetensors": POINTER, "tokenizer.json": POINTER},
        "model-1.safetensors and 1 more: a pointer of git-lfs .*git lfs pull",
    ),
    "another format": (
        {"params.json": "{}", "consolidated.00.pth": "x"},
        "no config.json, .*consolidated.00.pth, params",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_is_no_model_is_named(kind: str, tmp_path: Path) -> None:
    files, message = FOLDERS[kind]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        check_folder(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("model.gguf", "is a file. GGUF files are not read"), ("model.safetensors", "a model is a folder")],
)
def test_a_single_file_is_named(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(ModelError, match=message):
        check_folder(tmp_path / name)


@pytest.mark.parametrize("names", [["config.json"], ["config.json", "model.safetensors", "model.gguf"]])
def test_a_folder_of_transformers_passes(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    check_folder(tmp_path)
