"""A model by its hub id: a folder of the hub client's cache, into which it is fetched where it is not there whole.

The client reads its own variables: HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN, and HF_HOME or HF_HUB_CACHE for the folder.
What says what the model is comes first: one that is not served is refused before its weights are fetched.
"""

import glob
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import httpx2
from huggingface_hub import HfApi, constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from qualification.model.families.served import served_family
from qualification.model.fields import ModelConfigError
from server.errors import ModelError
from server.model.load.digests import INDEX_FILE, SINGLE_FILE
from server.model.load.fetch_progress import FetchProgress, bars_of, sized
from server.model.load.folder import ADAPTER_FILE, CONFIG_FILE, IN_MISTRALS_FORMAT, check_folder, is_in_mistrals_format
from server.model.load.interruption import ending_at_once
from server.model.load.json_file import read_object
from server.model.load.pooling import MODULES_FILE

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3  # of a download whose connection breaks in a way that the client does not go on from
_TIMEOUT_S = 10.0  # the client's own
_MAX_LISTED = 5
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FOLDER_OF_MODULE = re.compile(r"\d+_\w+")  # as sentence-transformers names it
_TEMPLATES = "additional_chat_templates"

_Sizes = Mapping[str, int | None]  # bytes of each file of a commit, None where they are not known


def _free_bytes(folder: Path) -> int:
    """Return what the file system of a folder, which need not exist, has left."""
    there = next(it for it in (folder, *folder.absolute().parents) if it.exists())
    return shutil.disk_usage(there).free


@dataclass(frozen=True, slots=True)
class Hub:
    """The place that models are fetched from, and the folder in which they are kept.

    free_bytes  what the file system of a folder has left
    """

    endpoint: str
    cache: Path
    is_offline: bool = False
    free_bytes: Callable[[Path], int] = _free_bytes

    @classmethod
    def of_client(cls) -> "Hub":
        """Return what the client's own variables say."""
        return cls(constants.ENDPOINT, Path(constants.HF_HUB_CACHE), constants.is_offline_mode())


@dataclass(frozen=True, slots=True)
class _Cached:
    """A model in the cache.

    folder       None: there is nothing of this revision
    lacks        what it lacks, in words; None: nothing that is known of
    is_listed    whether all files of the commit are known, and not only those that are there
    """

    folder: Path | None
    lacks: str | None = None
    is_listed: bool = False


def fetch_model(
    model: str,
    revision: str | None,
    *,
    has_weights: bool,
    say: Callable[[str], None] = lambda _: None,
    hub: Hub | None = None,
) -> Path:
    """Return the folder of a hub id, fetched first where it is missing; without weights for random ones.

    revision  branch, tag or commit; None: the repository's own main branch

    A commit that the cache has whole is asked of nobody. Where the hub does not answer, or refuses, and the cache has
    the model, that one is served, with a warning. Raises ModelError.
    """
    hub = hub or Hub.of_client()
    logging.getLogger("huggingface_hub").handlers.clear()  # its own would write each line again, and not as JSON
    try:
        cached = _cached(model, revision, hub, has_weights)
        whole = cached.folder if cached.lacks is None else None
        is_pinned = revision is not None and _COMMIT.fullmatch(revision) is not None and cached.is_listed
        if whole is not None and (is_pinned or hub.is_offline):
            return whole
        if hub.is_offline:
            raise ModelError(
                f"model {model}: HF_HUB_OFFLINE is set, and {cached.lacks}: fetch it without that variable first"
            )
        try:
            sizes = _sizes(model, revision, hub)
        except _Unanswered as error:
            if whole is None:
                raise ModelError(f"model {model}: {error}") from error
            logger.warning("model %s: %s; %s, which the cache has, is served", model, error, whole.name)
            return whole
        return _complete(model, revision, sizes, hub, has_weights=has_weights, say=say)
    except HFValidationError as error:
        raise ModelError(f"model {model}: neither a folder nor a hub id") from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"model {model}: {hub.endpoint} has no revision {revision} of it: --revision takes a branch, a tag or a "
            "commit"
        ) from error


class _Unanswered(Exception):
    """The hub cannot be reached, or does not give the model; the cache may have it."""


def _sizes(model: str, revision: str | None, hub: Hub) -> _Sizes:
    """Ask the hub for a repository's files. Raises _Unanswered, HFValidationError and RevisionNotFoundError."""
    try:
        info = HfApi(endpoint=hub.endpoint).model_info(
            model, revision=revision, files_metadata=True, timeout=_TIMEOUT_S
        )
    except (HfHubHTTPError, httpx2.HTTPError) as error:
        if isinstance(error, RevisionNotFoundError):
            raise
        raise _Unanswered(_reason(model, error, hub)) from error
    return {file.rfilename: file.size for file in info.siblings or ()}


def _complete(
    model: str, revision: str | None, sizes: _Sizes, hub: Hub, *, has_weights: bool, say: Callable[[str], None]
) -> Path:
    """Fetch what the cache lacks of these files. Raises ModelError."""
    if CONFIG_FILE not in sizes:
        if ADAPTER_FILE in sizes:
            check_folder(_download(model, revision, [ADAPTER_FILE], hub))
        if is_in_mistrals_format(sizes):
            raise ModelError(f"model {model}: {IN_MISTRALS_FORMAT}")
        raise ModelError(f"model {model}: the repository has no {CONFIG_FILE} (it has {_some(sizes)})")
    folder = _download(model, revision, _small(sizes), hub)
    try:
        served_family(read_object(folder / CONFIG_FILE), f"model {model}: {CONFIG_FILE}")
    except ModelConfigError as error:
        raise ModelError(str(error)) from error
    weights = _weight_names(folder) if has_weights else []
    missing = [name for name in weights if not (folder / name).is_file()]
    if absent := [name for name in missing if name not in sizes]:
        raise ModelError(
            f"model {model}: the repository has no {_some(absent)} (it has {_some(sizes)}): only safetensors are loaded"
        )
    if missing:
        total = sum(sizes[name] or 0 for name in missing)
        if total > (free := hub.free_bytes(hub.cache)):
            raise ModelError(
                f"model {model}: its weights are {sized(total)}, and {hub.cache} has {sized(free)} left: make room, or "
                "name another folder by HF_HUB_CACHE"
            )
        files = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        say(f"fetching: {model} at {folder.name[:12]}, {sized(total)} in {files}, into {hub.cache}")
        with ending_at_once(model):
            _download(model, folder.name, missing, hub, FetchProgress(total, say))
    check_folder(folder)
    return folder


def _cached(model: str, revision: str | None, hub: Hub, has_weights: bool) -> _Cached:
    """Look for a model in the cache. Raises HFValidationError."""
    small, is_listed = [CONFIG_FILE], False
    with suppress(CachedRepoTreeNotFoundError):  # older clients wrote none
        tree = get_cached_repo_tree(model, revision=revision, cache_dir=hub.cache)
        small, is_listed = _small({file.path: file.size for file in tree}), True
    try:
        found = snapshot_download(
            model, revision=revision, cache_dir=hub.cache, local_files_only=True, allow_patterns=[CONFIG_FILE]
        )
    except LocalEntryNotFoundError:
        return _Cached(None, f"{hub.cache} does not have it" + (f" at {revision}" if revision else ""))
    folder = Path(found)
    missing = [name for name in small if not (folder / name).is_file()]
    if not missing and has_weights:
        missing = [name for name in _weight_names(folder) if not (folder / name).is_file()]
    return _Cached(folder, f"{folder} lacks {_some(missing)}" if missing else None, is_listed)


def _download(
    model: str, revision: str | None, names: list[str], hub: Hub, progress: Callable[[int], None] = lambda _: None
) -> Path:
    """Fetch files of these names that the cache lacks, and return the folder of the commit. Raises ModelError."""
    for attempt in range(_MAX_ATTEMPTS):
        try:
            return Path(
                snapshot_download(
                    model,
                    revision=revision,
                    cache_dir=hub.cache,
                    endpoint=hub.endpoint,
                    allow_patterns=[glob.escape(name) for name in names],
                    tqdm_class=bars_of(progress),
                )
            )
        except httpx2.TransportError as error:
            logger.warning("model %s: the connection broke (%s)", model, _words(error))
            if attempt == _MAX_ATTEMPTS - 1:
                raise ModelError(f"model {model}: {_reason(model, error, hub)}; whole files are kept") from error
        except RevisionNotFoundError:
            raise
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise ModelError(f"model {model}: {_reason(model, error, hub)}") from error
        except OSError as error:
            if error.errno is None:  # a file that came with another size, say
                raise ModelError(f"model {model}: {_words(error)}") from error
            raise ModelError(
                f"model {model}: {error.filename or hub.cache} cannot be written: {error.strerror}: HF_HUB_CACHE names "
                "the folder of models"
            ) from error
    raise AssertionError("the last attempt returns or raises")


def _reason(model: str, error: Exception, hub: Hub) -> str:
    """Return why the hub does not give a model, and what to do."""
    page = f"{hub.endpoint}/{model}"
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
        error = error.__cause__
    if isinstance(error, GatedRepoError):
        return f"its files are for those whom its makers let in: ask on {page}, then set HF_TOKEN to a token of yours"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"no such folder, and {hub.endpoint} has no such model: is it spelt right? For a private one HF_TOKEN must "
            "be a token that may read it"
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        todo = {401: "HF_TOKEN is not valid there", 403: "HF_TOKEN may not read it"}.get(status, "try again later")
        return f"{hub.endpoint} answers {status}: {todo}"
    return f"{hub.endpoint} cannot be reached: {_words(error)}"


def _small(sizes: _Sizes) -> list[str]:
    """Return the files beside the weights that a model's folder may be read for: JSON and chat templates."""
    return [name for name in sizes if _is_small(PurePosixPath(name), MODULES_FILE in sizes)]


def _is_small(name: PurePosixPath, has_modules: bool) -> bool:
    if name.suffix not in (".json", ".jinja") or name.name.startswith("consolidated"):
        return False
    if len(name.parts) == 1:
        return True
    is_module = has_modules and name.name == CONFIG_FILE and _FOLDER_OF_MODULE.fullmatch(name.parts[0]) is not None
    is_template = name.parts[0] == _TEMPLATES and name.suffix == ".jinja"
    return len(name.parts) == 2 and (is_module or is_template)


def _weight_names(folder: Path) -> list[str]:
    """Return the files of weights that are loaded; a repository may have the same weights in other formats."""
    if not (folder / INDEX_FILE).is_file():
        return [SINGLE_FILE]
    files = read_object(folder / INDEX_FILE).get("weight_map")
    names = files.values() if isinstance(files, dict) else ()
    return sorted({name for name in names if isinstance(name, str) and PurePosixPath(name).name == name})


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return ", ".join(listed[:_MAX_LISTED]) + more or "no files"


def _words(error: Exception) -> str:
    """Return an error in one line; the client's own words are of several."""
    return " ".join(str(error).split()) or type(error).__name__
