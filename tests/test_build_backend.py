"""The wheel's sources: the rooms of a checkout below `hallmark`, each import of them rewritten and nothing else."""

import re
from pathlib import Path

import pytest

from hallmark.build_backend import ROOMS, prefixed, write_package

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("from kernels.catalog import a\n", "from hallmark.kernels.catalog import a\n"),
        ("from  server import settings", "from  hallmark.server import settings"),
        ("import kernels", "from hallmark import kernels"),
        ("import server as s", "from hallmark import server as s"),
        ("def f():\n    from server import (\n    b)\n", "def f():\n    from hallmark.server import (\n    b)\n"),
        ("import torch, kernels_of_others", None),
        ("from serverless import kernels", None),
        ("from . import kernels", None),
        ('TEXT = """\nfrom kernels import a\x0c"""\n', None),
    ],
)  # fmt: skip
def test_only_imports_of_rooms_are_rewritten(source: str, rewritten: str | None) -> None:
    assert prefixed(source, "a.py") == (source if rewritten is None else rewritten)


@pytest.mark.parametrize("source", ["import kernels.calls", "import os, server"])
def test_an_import_that_cannot_be_rewritten_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"^a\.py line 1: write `from package import module`"):
        prefixed(source, "a.py")


def test_every_module_of_the_wheel_is_of_hallmark(tmp_path: Path) -> None:
    write_package(ROOT, tmp_path)
    written = {file.relative_to(tmp_path / "hallmark").as_posix(): file for file in tmp_path.rglob("*.py")}
    ours = {file.relative_to(ROOT).as_posix() for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    assert written.keys() == ours | {"__init__.py", "__main__.py"}
    text = "\n".join(file.read_text() for file in written.values())
    assert "\nfrom hallmark.kernels.catalog import " in text
    assert re.findall(r"^ *(?:from|import) +(?:kernels|qualification|server)\b.*", text, re.MULTILINE) == []
