"""The wheel's sources: the rooms of a checkout below `hallmark`, each import of them rewritten and nothing else."""

import pytest

from hallmark.build_backend import prefixed


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
