"""Where a model comes from, as a user names it: a folder, or a hub id, which is fetched."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from server.errors import ModelError, SettingsError
from server.model.load.folder import check_folder

if TYPE_CHECKING:
    from server.model.load.hub import Hub


def is_hub_id(model: str) -> bool:
    """Return whether a name that is no folder's is spelt ORG/NAME, as a hub's are."""
    return not Path(model).exists() and model.count("/") == 1 and not model.startswith(("/", ".", "~"))


def model_folder(
    model: str,
    revision: str | None = None,
    *,
    has_weights: bool = True,
    say: Callable[[str], None] = lambda _: None,
    hub: "Hub | None" = None,
) -> Path:
    """Return the folder of a model: itself, or that of a hub id in the client's cache, fetched where it is missing.

    revision     of a hub id: branch, tag or commit; None: its main branch
    has_weights  False where none are read, and so none fetched
    say          is given lines about the progress of a download
    hub          None: as the client's own variables say

    Raises ModelError, and SettingsError for the revision of a folder.
    """
    path = Path(model)
    if path.is_dir() or path.is_file():
        if revision is not None:
            raise SettingsError(
                f"--revision {revision} is of a hub id, and {model} is a folder or a file: leave it out"
            )
        check_folder(path)
        return path
    if path.is_absolute() or model.startswith((".", "~")):
        raise ModelError(f"model {model}: no such folder")
    from server.model.load.hub import fetch_model  # half a second, for hub ids alone

    return fetch_model(model, revision, has_weights=has_weights, say=say, hub=hub)
