"""The digest of what a path computes: what it must not see, what it must see, and that it covers all that is loaded."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from kernels import catalog
from kernels.identity.source_digest import SourceDigests

ROOT = Path(__file__).resolve().parents[3]
ENTRIES = sorted({path.run.__module__.removeprefix("kernels.") for path in catalog.PATHS if path.run is not None})
SAMPLE = """
from pack.deep import base, helper as h

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pack import types

@staticmethod
def f(x: int, *args: "int", y=-1.5e-7, **kw) -> float:
    match x:
        case {"a": [1, *rest], **others} if (n := len(rest)) > 2:
            return n @ x[1:2, ..., None]
        case str() | None:
            pass
    return f"{x!r:>{y}} a" "b" f"{x + 1=}" + "é\\u2028\\U0001f600" + str(b"\\x00\\xff") + rf"\\d{{{x}}}"

async def g():
    async with f(1) as a, f(2):
        yield await a
    global z
    try:
        z = lambda q, /, r, *, s: [i for i in q if i] or {**r} or (1j, 0x10, 1_000, True, None)
    except* (ValueError, TypeError) as error:
        raise error from None
"""
# Computed once under Python 3.11; other versions must find the same.
SAMPLE_DIGEST = "9785145c897c8bea457fea25b0c892f7ffc80b8928d4f589a7a76fbe328bf913"
PROGRAM = """
import sys
from functools import partial
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from kernels.identity.source_digest import SourceDigests
print(SourceDigests(Path(sys.argv[2])).of("pack.sample"))
"""
LOADED = """
import importlib, os, sys, torch, triton
for entry in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(entry)
        print(*[name for name in sys.modules if name.startswith("kernels.")], flush=True)
        os._exit(0)
    os.wait()
"""


def package(folder: Path, **modules: str) -> SourceDigests:
    root = folder / "pack"
    root.mkdir(parents=True)
    for name, text in {"__init__": "", **modules}.items():
        (root / f"{name}.py").write_text(text, encoding="utf-8")
    return SourceDigests(root)


DEEP = "def helper(x):\n    return x + 1\n\nbase = 2\n"
ENTRY = '''"""Entry."""
from pack.deep import base
from pack import deep

def run(x):
    """Run."""
    return deep.helper(x) * base  # why
'''
REWORDED = '''"""Another
docstring."""
# a comment
from pack import deep
from pack.deep import (
    base,
)


def run(
    x,
):
    # nothing
    return (deep.helper(x)
            * base)
'''


@pytest.fixture
def entry_digest(tmp_path: Path) -> str:
    return package(tmp_path / "first", entry=ENTRY, deep=DEEP).of("pack.entry")


def test_words_and_layout_leave_a_digest_as_it_is(tmp_path: Path, entry_digest: str) -> None:
    assert package(tmp_path / "second", entry=REWORDED, deep=f'"""New."""\n\n{DEEP}').of("pack.entry") == entry_digest


def test_a_moved_module_leaves_a_digest_as_it_is(tmp_path: Path, entry_digest: str) -> None:
    moved = ENTRY.replace("pack.deep", "pack.moved").replace("from pack import deep", "from pack import moved as deep")
    assert package(tmp_path / "second", entry=moved, moved=DEEP).of("pack.entry") == entry_digest


@pytest.mark.parametrize(
    ("entry", "deep"),
    [
        (ENTRY, DEEP.replace("x + 1", "x - 1")),
        (ENTRY, DEEP.replace("base = 2", "base = 2.0")),
        (ENTRY, DEEP + "unused = 0\n"),
        (ENTRY.replace("* base", "+ base"), DEEP),
        (ENTRY.replace("import base", "import helper as base"), DEEP),
        (ENTRY.replace("def run", "@deep.helper\ndef run"), DEEP),
        (ENTRY.replace("def run(x)", "def run(x: 'tl.constexpr')"), DEEP),
        (ENTRY.replace("import deep", "import other as deep"), DEEP),
    ],
)
def test_a_changed_computation_changes_the_digest(tmp_path: Path, entry_digest: str, entry: str, deep: str) -> None:
    other = DEEP.replace("base", "basis")
    assert package(tmp_path / "second", entry=entry, deep=deep, other=other).of("pack.entry") != entry_digest


def test_a_module_that_is_imported_whole_is_covered(tmp_path: Path) -> None:
    texts = {"first": DEEP, "second": f"{DEEP}more = 1\n"}
    entry = "from pack import deep\n"
    assert len({package(tmp_path / it, entry=entry, deep=deep).of("pack.entry") for it, deep in texts.items()}) == 2


def test_type_checking_imports_are_not_followed(tmp_path: Path) -> None:
    typed = "from typing import TYPE_CHECKING\n"
    plain = package(tmp_path / "second", entry=typed + ENTRY, deep=DEEP)
    checked = f"{typed}if TYPE_CHECKING:\n    from pack.types import T\n"
    assert package(tmp_path / "third", entry=checked + ENTRY, deep=DEEP).of("pack.entry") == plain.of("pack.entry")


def test_modules_that_import_each_other_are_refused(tmp_path: Path) -> None:
    digests = package(tmp_path, a="from pack import b\n", b="from pack import a\n")
    with pytest.raises(ValueError, match=r"pack\.a -> pack\.b -> pack\.a"):
        digests.of("pack.a")


@pytest.mark.parametrize("line", ["import pack.deep", "from . import deep", "from .deep import base"])
def test_an_import_that_cannot_be_followed_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        package(tmp_path, entry=f"{line}\n", deep=DEEP).of("pack.entry")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_every_python_finds_the_same_digest(tmp_path: Path, version: str) -> None:
    python = shutil.which(f"python{version}")
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        python = sys.executable
    package(tmp_path, sample=SAMPLE, deep=DEEP)
    command = [str(python), "-I", "-c", PROGRAM, str(ROOT), str(tmp_path / "pack")]
    environment = {**os.environ, "PYENV_VERSION": version}  # where pyenv manages them
    run = partial(subprocess.run, command, env=environment, capture_output=True, text=True, check=False)
    ran = None if python is None else run()
    if ran is None or ran.returncode == 127:  # pyenv's stand-in for a version that is not there
        pytest.skip(f"python{version} is not installed here")
    assert ran.stdout.strip() == SAMPLE_DIGEST, ran.stderr


def test_a_path_is_bound_to_what_it_imports_and_to_nothing_else(tmp_path: Path) -> None:
    """One constant more in a module: the digests that cover it change, and no other does."""
    root = tmp_path / "kernels"
    shutil.copytree(ROOT / "kernels", root, ignore=shutil.ignore_patterns("__pycache__"))
    shipped = SourceDigests(root)
    before = {entry: shipped.of(f"kernels.{entry}") for entry in ENTRIES}
    covered = {entry: shipped.closure(f"kernels.{entry}") for entry in ENTRIES}
    followed = frozenset().union(*covered.values())
    assert len(followed) > 30
    others = ("kernels.catalog", "kernels.functional", "kernels.reference.oracle")
    users = {
        module: frozenset(it for it in ENTRIES if module in covered[it]) for module in sorted({*followed, *others})
    }
    of_uses = sorted(users, key=lambda it: (len(users[it]), it))
    for module in {*of_uses[:1], *of_uses[len(others) :: 20], of_uses[-1]}:  # of no entry, of few, and of the most
        expected = users[module]
        file = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        text = file.read_text(encoding="utf-8")
        file.write_text(f"{text}\nADDED = 1\n", encoding="utf-8")
        changed = SourceDigests(root)
        assert {it for it in ENTRIES if changed.of(f"kernels.{it}") != before[it]} == expected, module
        file.write_text(text, encoding="utf-8")


def test_a_digest_covers_whatever_the_entry_loads() -> None:
    """Import each entry in a process that has loaded torch and triton, and nothing of ours."""
    modules = [f"kernels.{entry}" for entry in ENTRIES]
    command = [sys.executable, "-c", LOADED, *modules]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    for module, line in zip(modules, lines, strict=True):
        loaded = {name for name in line.split() if (ROOT / f"{name.replace('.', '/')}.py").exists()}  # no package
        assert module in loaded
        assert loaded == SourceDigests().closure(module)


def test_the_catalog_binds_each_path_to_the_module_of_its_run() -> None:
    of = SourceDigests().of
    bound = {path.name: of(path.run.__module__) for path in catalog.ALL_PATHS if path.run is not None}
    assert bound == {path.name: path.source_digest for path in catalog.ALL_PATHS}
