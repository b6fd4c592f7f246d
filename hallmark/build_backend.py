"""Build of the package (PEP 517): setuptools, on a copy of the checkout whose rooms are below `hallmark`.

`kernels`, `qualification` and `server` are top-level packages in a checkout, and such names are others' too:
transformers imports Hugging Face's package `kernels` wherever that is installed. In the copy they are
`hallmark.kernels` and so on, and each import of them is rewritten. A source archive holds the files as they are; an
editable install takes them where they are.
"""

import ast
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path

from setuptools import build_meta

ROOMS = ("kernels", "qualification", "server")
_HOME = "hallmark"
_BESIDE = ("pyproject.toml", "README.md", "LICENSE")
_OF_ROOMS = re.compile(rf"(?:{'|'.join(ROOMS)})(?:\.|$)")
_FROM = re.compile(r"from\s+")
_Settings = Mapping[str, str | list[str] | None]


def build_wheel(
    wheel_directory: str, config_settings: _Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel of the checkout, or unpacked source archive, that is the current folder."""
    with tempfile.TemporaryDirectory() as folder:
        write_package(Path.cwd(), Path(folder))
        target = os.path.abspath(wheel_directory)
        with chdir(folder):
            return str(build_meta.build_wheel(target, config_settings, metadata_directory))


def build_sdist(sdist_directory: str, config_settings: _Settings | None = None) -> str:
    """Build the source archive of the checkout that is the current folder."""
    with _no_files_left():
        return str(build_meta.build_sdist(sdist_directory, config_settings))


def build_editable(
    wheel_directory: str, config_settings: _Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel that points to the checkout."""
    # Its warning of eight lines is about what an editable install is: the folders of a checkout.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Editable installation")
        return str(build_meta.build_editable(wheel_directory, config_settings, metadata_directory))


def write_package(checkout: Path, folder: Path) -> None:
    """Write what a wheel is built of into `folder`. Raises ValueError for an import that cannot be rewritten."""
    for name in _BESIDE:
        shutil.copy2(checkout / name, folder)
    home = folder / _HOME
    home.mkdir()
    for name in ("__init__.py", "__main__.py"):
        shutil.copy2(checkout / _HOME / name, home)
    for room in ROOMS:
        shutil.copytree(checkout / room, home / room, ignore=shutil.ignore_patterns("__pycache__"))
    for file in home.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        rewritten = prefixed(source, file.relative_to(folder).as_posix())
        if rewritten != source:
            file.write_text(rewritten, encoding="utf-8")


def prefixed(source: str, name: str) -> str:
    """Return a module's source with each import of a room taken from `hallmark`; all other text stays as it is.

    name  the file's, for the error
    Raises ValueError for `import kernels.calls`, which binds a name that the room no longer has.
    """
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and _OF_ROOMS.match(node.module or ""):
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = _FROM.sub(rf"\g<0>{_HOME}.", line, count=1)
        elif isinstance(node, ast.Import) and any(_OF_ROOMS.match(alias.name) for alias in node.names):
            if len(node.names) > 1 or "." in node.names[0].name:
                raise ValueError(f"{name} line {node.lineno}: write `from package import module`, for the wheel's sake")
            lines[node.lineno - 1] = lines[node.lineno - 1].replace("import ", f"from {_HOME} import ", 1)
    return "\n".join(lines)


@contextmanager
def _no_files_left() -> Iterator[None]:
    """Remove the metadata that setuptools leaves beside the sources, where there was none."""
    before = set(Path.cwd().glob("*.egg-info"))
    try:
        yield
    finally:
        for folder in set(Path.cwd().glob("*.egg-info")) - before:
            shutil.rmtree(folder)
