"""Compiled kernels of other sources are out of reach."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import triton

from kernels.system.triton_cache import content_digest, use_own_cache
from server.cli.main import main
from server.engine.startup.builder import build_engine
from server.errors import StartError
from server.settings import Settings


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """Triton's cache folder, set as a user sets it."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "cache")  # also where an earlier test has set another one
        yield tmp_path / "cache"


def sources(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "kernel.py").write_text(text)
    return folder


def test_folder_is_named_by_the_kernels_below_the_given_one(cache: Path) -> None:
    use_own_cache()
    use_own_cache()  # a second time changes nothing
    folder = Path(triton.knobs.cache.dir)
    assert folder.parent == cache
    assert folder.name.startswith("kernels-")
    assert os.environ["TRITON_CACHE_DIR"] == str(folder)  # which child processes read


@pytest.mark.usefixtures("cache")
def test_other_kernels_have_another_folder(tmp_path: Path) -> None:
    folders = []
    for name, text in (("a", "TILE = 64"), ("b", "TILE = 128"), ("c", "TILE = 64")):
        with triton.knobs.cache.scope():
            use_own_cache(sources(tmp_path / name, hopper=text))
            folders.append(triton.knobs.cache.dir)
    assert folders[0] == folders[2] != folders[1]


def test_every_file_and_its_name_change_the_digest(tmp_path: Path) -> None:
    digests = {
        content_digest(sources(tmp_path / "a", hopper="x = 1", portable="x = 2")),
        content_digest(sources(tmp_path / "b", hopper="x = 1", portable="x = 3")),
        content_digest(sources(tmp_path / "c", hopper="x = 2", portable="x = 1")),
        content_digest(sources(tmp_path / "d", hopper="x = 1")),
    }
    assert len(digests) == 4


def start_engine(folder: Path) -> None:
    with pytest.raises(StartError):
        build_engine(Settings(model=str(folder)), frozenset(), lambda *_: None)


@pytest.mark.parametrize(
    "start",
    [
        start_engine,
        lambda folder: main(["qualify", "--model", str(folder)]),
        lambda folder: main(["bench", "attention", "--peers", "none-such", "--out-dir", str(folder)]),
    ],
    ids=["engine", "qualify", "bench attention"],
)
def test_what_launches_kernels_uses_their_own_cache(
    start: Callable[[Path], object], cache: Path, tmp_path: Path
) -> None:
    start(tmp_path)  # a folder without a model, which ends each of them soon
    assert Path(triton.knobs.cache.dir).parent == cache
