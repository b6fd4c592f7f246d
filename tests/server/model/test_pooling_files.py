"""Task of a model folder, by its own files and by --task, and the modules that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.errors import ModelError, SettingsError
from server.model.load.pooling import PoolingModel, read_pooling
from server.settings import ReasoningParser, ReceiptMode, Settings, Task, ToolCallParser

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
SCORE = {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}
LAST = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}


def write(
    folder: Path, modules: list[dict[str, str]], *, module: dict[str, Any] | None = None, **config: object
) -> Path:
    config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64} | config
    (folder / "config.json").write_text(json.dumps(config))
    if modules:
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / modules[1]["path"]).mkdir()
        (folder / modules[1]["path"] / "config.json").write_text(json.dumps(module))
    return folder


def test_the_task_follows_from_the_folder_unless_it_is_given(tmp_path: Path) -> None:
    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    auto, embed = Settings(), Settings(task=Task.EMBED)
    plain = write(folder("plain"), [])
    assert read_pooling(plain, auto) is None
    assert read_pooling(plain, embed) == PoolingModel(Task.EMBED, size=64)
    assert read_pooling(plain, Settings(task=Task.SCORE)) == PoolingModel(Task.SCORE)
    assert read_pooling(write(folder("headless"), [], architectures=["Qwen3Model"]), auto) == PoolingModel(
        Task.EMBED, size=64
    )
    assert read_pooling(write(folder("gpt2"), [], architectures=["GPT2LMHeadModel"]), auto) is None
    whole = write(folder("embedding"), [TRANSFORMER, POOLING, NORMALIZE], module=LAST)
    assert read_pooling(whole, auto) == PoolingModel(Task.EMBED, size=64)
    assert read_pooling(whole, Settings(task=Task.GENERATE)) is None
    newer = write(folder("newer"), [TRANSFORMER, POOLING], module={"pooling_mode": "lasttoken"})
    assert read_pooling(newer, auto) == PoolingModel(Task.EMBED, normalizes=False, size=64)
    ids = {"true_token_id": 9693, "false_token_id": 2152}
    assert read_pooling(write(folder("score"), [TRANSFORMER, SCORE], module=ids), auto) == PoolingModel(
        Task.SCORE, label_ids=(9693, 2152)
    )


@pytest.mark.parametrize(
    ("config", "matryoshka", "allowed"),
    [
        ({}, False, ()),
        ({}, True, range(1, 65)),
        ({"is_matryoshka": True}, False, range(1, 65)),
        ({"matryoshka_dimensions": [16, 32]}, False, (16, 32)),
    ],
)
def test_the_model_or_a_setting_allows_shorter_embeddings(
    tmp_path: Path, config: dict[str, object], matryoshka: bool, allowed: object
) -> None:
    found = read_pooling(write(tmp_path, [], **config), Settings(task=Task.EMBED, matryoshka=matryoshka))
    assert found is not None
    assert found.dimensions == allowed


@pytest.mark.parametrize("task", [Task.AUTO, Task.GENERATE, Task.SCORE])
def test_shorter_embeddings_of_a_model_that_embeds_nothing_are_refused(tmp_path: Path, task: Task) -> None:
    folder = write(tmp_path, [])
    read_pooling(folder, Settings(task=task))
    with pytest.raises(SettingsError, match=r"--matryoshka is of embeddings, and the task is (generate|score): "):
        read_pooling(folder, Settings(task=task, matryoshka=True))


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({"tool_call_parser": ToolCallParser.HERMES}, True),
        ({"reasoning_parser": ReasoningParser.THINK}, True),
        ({"reasoning_parser": ReasoningParser.NONE}, False),
        ({"receipts": ReceiptMode.ALWAYS}, True),
        ({"receipts": ReceiptMode.OFF}, False),
        ({"receipt_key_file": "key.pem"}, True),
        ({"response_store_entries": 5}, True),
        ({"response_store_entries": 0}, False),
        ({"response_store_bytes": 1000}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("task", [Task.EMBED, Task.SCORE])
def test_settings_of_generated_text_are_refused_where_there_is_none(
    tmp_path: Path, task: Task, given: dict[str, Any], is_refused: bool
) -> None:
    folder = write(tmp_path, [])
    assert read_pooling(folder, Settings(**given)) is None
    if not is_refused:
        assert read_pooling(folder, Settings(task=task, **given)) is not None
        return
    [name] = given
    said = f"--{name.replace('_', '-')} is of generated text, and the task is {task.value}: leave it out"
    with pytest.raises(SettingsError, match=said):
        read_pooling(folder, Settings(task=task, **given))


@pytest.mark.parametrize(
    ("modules", "module", "message"),
    [
        ([TRANSFORMER, {"path": "1_Dense", "type": "x.Dense"}], {}, "module 'Dense' is not supported"),
        ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True}, "pooling by mean_tokens is not supported"),
        ([TRANSFORMER, SCORE], {"true_token_id": 9454, "false_token_id": None}, "must both be token ids"),
    ],
)
def test_modules_that_are_not_computed_are_refused(
    tmp_path: Path, modules: list[dict[str, str]], module: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_pooling(write(tmp_path, modules, module=module), Settings())
