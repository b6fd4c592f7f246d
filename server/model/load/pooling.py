"""Task of a model folder: text, embeddings or scores; and the pooling that sentence-transformers' files ask for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.errors import ModelError, SettingsError
from server.model.load.json_file import read_json, read_object
from server.settings import ReasoningParser, ReceiptMode, Settings, Task, flag_of

MODULES_FILE = "modules.json"
_CONFIG_FILE = "config.json"
_LAST_TOKEN = "lasttoken"
_SUPPORTED = ("Transformer", "Pooling", "Normalize", "LogitScore")
# Settings of text that is generated, each with the values that ask for nothing beside its default.
_OF_TEXT: Mapping[str, tuple[object, ...]] = {
    "reasoning_parser": (ReasoningParser.NONE,),
    "receipt_key_file": (),
    "receipts": (ReceiptMode.OFF,),
    "response_store_bytes": (),
    "response_store_entries": (0,),
    "tool_call_parser": (),
}


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """A model whose answer is its last token's hidden state or logits.

    task        EMBED or SCORE
    normalizes  whether an embedding is divided by its length
    size        numbers of an embedding, which a request may ask for; None where config.json does not say
    dimensions  lengths that a request may ask for beside it: empty for none
    label_ids   of the tokens whose logits are compared, relevant and not; None: of yes and no
    """

    task: Task
    normalizes: bool = True
    size: int | None = None
    dimensions: range | tuple[int, ...] = ()
    label_ids: tuple[int, int] | None = None


def read_pooling(folder: Path, settings: Settings) -> PoolingModel | None:
    """Read how a folder's model pools, None for one that generates; from `--task`, else from the folder's own files.

    Raises ModelError for modules or a kind of pooling that are not supported, and SettingsError for `--matryoshka`
    where nothing is embedded, and for a setting of generated text where none is.
    """
    found = _pooling_of(folder, settings)
    if found is not None:
        _check_settings(settings, found.task)
    if settings.matryoshka and (found is None or found.task is not Task.EMBED):
        task = Task.GENERATE if found is None else found.task
        raise SettingsError(f"--matryoshka is of embeddings, and the task is {task.value}: leave it out or give --task")
    return found


def _check_settings(settings: Settings, task: Task) -> None:
    """Raises SettingsError for a setting that would change nothing."""
    default = Settings()
    for name, neutral in _OF_TEXT.items():
        value = getattr(settings, name)
        if value != getattr(default, name) and value not in neutral:
            raise SettingsError(f"{flag_of(name)} is of generated text, and the task is {task.value}: leave it out")


def _pooling_of(folder: Path, settings: Settings) -> PoolingModel | None:
    if settings.task is Task.GENERATE:
        return None
    config = read_object(folder / _CONFIG_FILE)
    modules = _modules(folder)
    task = settings.task if settings.task is not Task.AUTO else _task_of(config, modules)
    if task is Task.EMBED:
        if "Pooling" in modules:
            _check_last_token(modules["Pooling"])
        normalizes = "Normalize" in modules or "Pooling" not in modules
        size = config.get("hidden_size")
        dimensions = _dimensions(config, always=settings.matryoshka)
        return PoolingModel(task, normalizes, size if isinstance(size, int) else None, dimensions)
    if task is Task.SCORE:
        return PoolingModel(task, label_ids=_label_ids(modules["LogitScore"]) if "LogitScore" in modules else None)
    return None


def _task_of(config: Mapping[str, Any], modules: Mapping[str, Path]) -> Task:
    if "LogitScore" in modules:
        return Task.SCORE
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    has_head = not names or not all(isinstance(name, str) and _is_without_head(name) for name in names)
    return Task.GENERATE if has_head and "Pooling" not in modules else Task.EMBED


def _is_without_head(architecture: str) -> bool:
    return architecture.endswith("Model") and not architecture.endswith("LMHeadModel")  # which GPT-2's class is called


def _modules(folder: Path) -> dict[str, Path]:
    """The folder of each module that sentence-transformers would run, by its class; empty without its file."""
    path = folder / MODULES_FILE
    if not path.is_file():
        return {}
    content = read_json(path)
    found = {}
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise ModelError(f"{path}: must hold an array of JSON objects")
    for entry in content:
        kind = str(entry.get("type")).rpartition(".")[2]
        if kind not in _SUPPORTED:
            raise ModelError(f"{path}: module {kind!r} is not supported; supported: {', '.join(_SUPPORTED)}")
        found[kind] = folder / Path(str(entry.get("path", ""))).name
    return found


def _check_last_token(folder: Path) -> None:
    """Raises ModelError unless the last token is what is pooled."""
    path = folder / _CONFIG_FILE
    config = read_object(path)
    prefix = "pooling_mode_"
    modes = [name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True]
    if "pooling_mode" in config:
        modes = [str(config["pooling_mode"])]
    if modes != [_LAST_TOKEN]:
        raise ModelError(f"{path}: pooling by {' and '.join(modes) or 'nothing'} is not supported, only {_LAST_TOKEN}")


def _dimensions(config: Mapping[str, Any], *, always: bool) -> range | tuple[int, ...]:
    listed, size = config.get("matryoshka_dimensions"), config.get("hidden_size")
    if isinstance(listed, list) and all(isinstance(it, int) for it in listed):
        return tuple(listed)
    if (always or config.get("is_matryoshka") is True) and isinstance(size, int):
        return range(1, size + 1)
    return ()


def _label_ids(folder: Path) -> tuple[int, int]:
    path = folder / _CONFIG_FILE
    config = read_object(path)
    ids = config.get("true_token_id"), config.get("false_token_id")
    if not isinstance(ids[0], int) or not isinstance(ids[1], int):
        raise ModelError(f"{path}: true_token_id and false_token_id must both be token ids")
    return ids[0], ids[1]
