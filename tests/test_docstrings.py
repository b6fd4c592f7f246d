"""Docstrings begin with a verb or a noun phrase that stands alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("bench", "hallmark", "kernels", "qualification", "server", "deploy", "trials", "docs", "tests")
# Words of fragments, whose subject would be the name above.
FRAGMENTS = {"As", "By", "How", "Its", "Nobody", "Of", "Their", "They", "Those", "What", "Whether", "Which", "Who"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(source: str) -> Iterator[str]:
    """Yield the first line of each docstring that begins with a fragment."""
    if not re.search(rf'"""\s*(?:{"|".join(FRAGMENTS)})\b', source):  # to parse every file takes 4 s
        return
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text and text.split()[0].rstrip(",.:;") in FRAGMENTS:
            yield text.splitlines()[0]


def test_a_fragment_is_found() -> None:
    assert list(fragments('def f():\n    """Of x."""\n')) == ["Of x."]


def test_no_docstring_begins_with_a_fragment() -> None:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 500
    assert {str(file.relative_to(ROOT)): found for file in files if (found := list(fragments(file.read_text())))} == {}
