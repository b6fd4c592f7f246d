"""Refusal of what is no model folder: one line that says what it is, before any file is parsed."""

from collections.abc import Collection
from pathlib import Path

from server.errors import ModelError
from server.model.load.json_file import read_object

CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"  # of PEFT
IN_MISTRALS_FORMAT = (
    f"its files are in Mistral's own format (params.json, no {CONFIG_FILE}), which is not read: serve the same model "
    "in Hugging Face's format"
)
_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES = 1024  # as git-lfs has it
_MAX_LISTED = 5
_GGUF = "GGUF files are not read: serve the folder of safetensors that they were made from"


def check_folder(path: Path) -> None:
    """Raise ModelError for a single file, an empty folder, an adapter, GGUF files alone, and pointers of git-lfs."""
    if path.is_file():
        todo = _GGUF if path.suffix == ".gguf" else f"a model is a folder: {path.parent} may be it"
        raise ModelError(f"model {path}: is a file. {todo}")
    try:
        files = sorted(it for it in path.iterdir() if it.is_file())
    except OSError as error:
        raise ModelError(f"model {path}: cannot be read: {error.strerror}") from error
    names = {it.name for it in files}
    has_weights = any(it.suffix == ".safetensors" and not it.name.startswith("adapter_") for it in files)
    if not any(path.iterdir()):
        raise ModelError(f"model {path}: the folder is empty: was the model fetched to another one?")
    _check_pointers(files)
    if ADAPTER_FILE in names and not has_weights:
        base = read_object(path / ADAPTER_FILE).get("base_model_name_or_path") or "its base model"
        raise ModelError(
            f"model {path}: holds an adapter (LoRA), and adapters are not implemented: merge it into {base} "
            "(PEFT's merge_and_unload, then save_pretrained) and serve that folder"
        )
    if not has_weights and any(it.suffix == ".gguf" for it in files):
        raise ModelError(f"model {path}: holds no safetensors. {_GGUF}")
    if is_in_mistrals_format(names):
        raise ModelError(f"model {path}: {IN_MISTRALS_FORMAT}")
    if CONFIG_FILE not in names:
        more = ", ..." if len(files) > _MAX_LISTED else ""
        found = ", ".join(it.name for it in files[:_MAX_LISTED]) + more if files else "folders only"
        raise ModelError(
            f"model {path}: there is no {CONFIG_FILE}, which a folder of transformers has (found: {found}): name that "
            "folder, or convert the checkpoint to it"
        )


def is_in_mistrals_format(names: Collection[str]) -> bool:
    """Return whether files of these names are a model as Mistral publishes some; Meta's have other weights."""
    has_weights = any(it.startswith("consolidated") and it.endswith(".safetensors") for it in names)
    return CONFIG_FILE not in names and "params.json" in names and has_weights


def _check_pointers(files: list[Path]) -> None:
    """Raise ModelError for files that `git clone` without git-lfs leaves: some lines about each large file."""
    pointers = []
    for file in files:
        try:
            if file.suffix in (".json", ".safetensors") and file.stat().st_size <= _MAX_POINTER_BYTES:
                pointers += [file.name] if file.read_bytes().startswith(_POINTER) else []
        except OSError:  # who reads the file for what it holds says so
            continue
    if pointers:
        more = f" and {len(pointers) - 1} more" if len(pointers) > 1 else ""
        raise ModelError(
            f"{files[0].parent / pointers[0]}{more}: a pointer of git-lfs in place of the file: run "
            "`git lfs install` and `git lfs pull` in the folder"
        )
