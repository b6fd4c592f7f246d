"""The structure of the house, read from its sources: who imports whom, and what only some files may do.

Imports inside functions and under TYPE_CHECKING count. Every rule is also shown a snippet that it must refuse. Imports
are found by a pattern, 0.1 s for all files: their syntax trees take 7 s, and only files with a suspect word get one.
"""

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("kernels", "qualification", "server", "bench")  # each may import itself and those before it
BENCH_COMMAND = "server.cli.bench"  # alone may import bench, which is not in the wheel
# Modules and whole folders that import no torch.
PURE = [
    "kernels/driver/kernel_names.py", "kernels/driver/seen.py",
    "kernels/experts/kinds.py", "kernels/linear/shape.py", "kernels/linear/hopper/tilings.py",
    "kernels/system/cpu_libraries.py", "kernels/system/triton_cache.py", "kernels/vocabulary/buckets.py",
    "kernels/vocabulary/fingerprint.py", "kernels/vocabulary/path.py", "kernels/vocabulary/path_order.py",
    "kernels/vocabulary/shape.py", "qualification/*.py", "qualification/canary/*.py",
    "qualification/commands/*.py", "qualification/common/*.py", "qualification/decision/*.py",
    "qualification/evidence/*.py", "qualification/load/*.py", "qualification/report/*.py",
    "qualification/measure/compiling/ptx.py", "qualification/model/*.py", "qualification/model/families/*.py",
    "qualification/attest/promise.py", "bench/*.py", "bench/serve/*.py",
    "bench/attention/cases.py", "bench/attention/charts.py",
    "bench/attention/command.py", "bench/attention/row.py",
    "bench/attention/table.py", "server/protocol/*.py", "server/engine/scheduling/*.py",
    "server/model/images/*.py", "server/http/images/*.py",
]  # fmt: skip
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*|.*)|import[ \t]+(.*))", re.MULTILINE)
OBJECT_LOADERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}

Sources = dict[str, str]  # path from the root, with slashes -> text


def read_sources(*folders: str) -> Sources:
    files = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imported_names(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Every dotted name an import statement may bind a module to, relative ones made absolute."""
    for source_module, of_it, whole in _IMPORT.findall(source):
        names = [
            words[0] for part in re.sub("#.*", "", of_it or whole).split(",") if (words := part.strip("( \n").split())
        ]
        if whole:
            yield from names
            continue
        name = source_module.lstrip(".")
        level, package = len(source_module) - len(name), module.split(".") if is_package else module.split(".")[:-1]
        parent = package[: len(package) - level + 1] if level else []
        base = ".".join([*parent, *([name] if name else [])])
        yield base
        yield from (f"{base}.{name}" for name in names)


def imports_of(sources: Sources) -> dict[str, set[str]]:
    """Module -> every name it imports."""
    return {
        module_of(path): set(imported_names(text, module_of(path), path.endswith("__init__.py")))
        for path, text in sources.items()
    }


def wrong_directions(sources: Sources) -> list[str]:
    found = []
    for module, names in imports_of(sources).items():
        allowed = LAYERS if module == BENCH_COMMAND else LAYERS[: LAYERS.index(module.split(".")[0]) + 1]
        ours = {name for name in names if name.split(".")[0] in (*LAYERS, "deploy", "tests")}
        found += [f"{module} imports {name}" for name in sorted(ours) if name.split(".")[0] not in allowed]
    return found


def import_cycles(sources: Sources) -> list[str]:
    imports = imports_of(sources)
    return cycles_in({module: (names & imports.keys()) - {module} for module, names in imports.items()})


def folder_cycles(sources: Sources) -> list[str]:
    """Cycles between folders. A file beside folders counts as a folder of its own."""
    files = [path.rpartition("/")[0] for path in sources if not path.endswith("/__init__.py")]
    with_folders = {folder.rpartition("/")[0] for folder in files}
    folders = {
        module_of(path): path if path.rpartition("/")[0] in with_folders else path.rpartition("/")[0]
        for path in sources
        if not path.endswith("/__init__.py")  # `from server.http import app` names the package, and means the module
    }
    arrows: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for module, names in imports_of(sources).items():
        if module in folders:
            arrows[folders[module]] |= {folders[name] for name in names & folders.keys()} - {folders[module]}
    return cycles_in(arrows)


def cycles_in(arrows: Mapping[str, set[str]]) -> list[str]:
    done: set[str] = set()
    cycles: list[str] = []

    def visit(node: str, trail: tuple[str, ...]) -> None:
        if node in trail:
            cycles.append(" -> ".join([*trail[trail.index(node) :], node]))
        elif node not in done:
            for other in sorted(arrows[node]):
                visit(other, (*trail, node))
            done.add(node)

    for node in sorted(arrows):
        visit(node, ())
    return cycles


def object_loading(sources: Sources) -> list[str]:
    """Whatever runs code that arrives as data: pickle and its kin, eval, exec, torch.load."""
    found = []
    for path, text in sources.items():
        names = {name.split(".")[0] for name in imported_names(text, module_of(path), False)}
        found += [f"{path} imports {name}" for name in sorted(names & OBJECT_LOADERS)]
        for node in nodes_of(text) if re.search(r"(?<![.\w])(eval|exec|torch\.load)\(", text) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"eval", "exec", "torch.load"}:
                found.append(f"{path}:{node.lineno} calls {ast.unparse(node.func)}")
    return found


def environment_reads(sources: Sources) -> list[str]:
    """The command line hands the environment to the settings; nobody else sees it.

    But for the variables of MKL and oneDNN, which the fingerprint of a CPU holds and no getter tells.
    """
    found = []
    for path, text in sources.items():
        if path in {"server/cli/main.py", "kernels/system/cpu_libraries.py"}:
            continue
        for node in nodes_of(text) if re.search("environ|getenv|putenv", text) else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
                names = [node.attr]
            if {"environ", "environb", "getenv", "putenv"} & set(names):
                found.append(f"{path}:{node.lineno} touches the environment")
    return found


def own_interpreters(sources: Sources) -> list[str]:
    """A process started by `python -m` imports modules of the folder it is started in before ours."""
    return [
        f"{path}:{node.lineno} starts Python by itself, not by kernels.system.child_process"
        for path, text in sources.items()
        if path != "kernels/system/child_process.py" and "sys.executable" in text
        for node in nodes_of(text)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
    ]


def telemetry_names(sources: Sources) -> list[str]:
    """Metric names (hallmark_...) and span or attribute names (hallmark....) outside server/telemetry.

    The canary reads a server's metrics over HTTP, so it names those it reads. Our kernels are called hallmark_... too,
    which is what a profiler shows of them.
    """
    found = []
    for path, text in sources.items():
        if path.startswith(("server/telemetry/", "qualification/canary/")):
            continue
        pattern = r"\bhallmark\.[a-z]\w*" if path.startswith("kernels/") else r"\bhallmark[_.][a-z]\w*"
        nodes = nodes_of(text) if re.search(pattern, text) else []
        prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                name = re.search(pattern, node.value)
                found += [f"{path}:{node.lineno} names {name.group()}"] if name else []
    return found


RULES: dict[Callable[[Sources], list[str]], list[Sources]] = {
    wrong_directions: [
        {"kernels/a.py": "import qualification.decision.decision"},
        {"qualification/a.py": "def f():\n    from server import settings"},
        {"kernels/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import server.settings"},
        {"server/a.py": "import tests.server.fakes"},
        {"server/a.py": "from deploy import lock"},
        {"server/cli/main.py": "def f():\n    from bench import command"},
    ],
    import_cycles: [
        {"server/a.py": "import server.b", "server/b.py": "from server.c import x", "server/c.py": "import server.a"},
        {"server/a.py": "def f():\n    from server import b", "server/b.py": "from . import a"},
        {"server/__init__.py": "from server.a import x", "server/a.py": "import server"},
    ],
    folder_cycles: [
        {"server/a/x.py": "import server.b.y", "server/b/z.py": "from server.a import x", "server/b/y.py": ""},
        {
            "server/a/b/x.py": "import server.c",
            "server/c.py": "def f():\n    from server.a import y",
            "server/a/y.py": "from server.a.b import z",
            "server/a/b/z.py": "",
        },
    ],
    object_loading: [
        {"server/a.py": "import pickle"},
        {"server/a.py": "def f():\n    from marshal import loads"},
        {"server/a.py": "x = eval('1')"},
        {"server/a.py": "import torch\nx = torch.load('w.pt')"},
    ],
    environment_reads: [
        {"server/a.py": "import os\nx = os.environ['A']"},
        {"kernels/a.py": "import os\nx = os.getenv('A')"},
        {"server/a.py": "from os import environ"},
    ],
    own_interpreters: [{"server/a.py": "import sys\ncommand = [sys.executable, '-m', 'server.b']"}],
    telemetry_names: [
        {"server/http/app.py": "NAME = 'hallmark_requests_running'"},
        {"kernels/a.py": "NAME = 'hallmark.prefill'"},
        {"server/http/app.py": "x = f'hallmark_{1}_total hallmark_x'; y = 'hallmark_up{} 1'"},
    ],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_file_breaks_the_rule(rule: Callable[[Sources], list[str]]) -> None:
    assert rule(read_sources(*LAYERS)) == []


@pytest.mark.parametrize(
    ("rule", "snippet"),
    [(rule, snippet) for rule, snippets in RULES.items() for snippet in snippets],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_rule_refuses_a_bad_snippet(rule: Callable[[Sources], list[str]], snippet: Sources) -> None:
    assert rule(snippet) != []


def private_imports(sources: Sources) -> list[str]:
    """List what ruff's SLF001 does not see: `from module import _name`."""
    return [
        f"{path} imports {name}"
        for path, text in sources.items()
        for names in re.findall(r"^\s*from \S+ import (\([^)]*|.*)", text, re.MULTILINE)
        for name in re.findall(r"(?<!as )\b_[^_\W]\w*", names)
    ]


def test_tests_import_public_names_only() -> None:
    assert private_imports({"tests/test_a.py": "from server.a import x, _y"}) != []
    assert private_imports(read_sources("tests")) == []


def test_what_tests_share_is_in_one_package() -> None:
    sources = read_sources("tests")
    names = {path: path.rpartition("/")[2] for path in sources if not path.startswith("tests/support/")}
    assert [path for path, name in names.items() if not name.startswith(("test_", "conftest"))] == []
    imported = {name for path, text in sources.items() for name in imported_names(text, module_of(path), False)}
    assert [name for name in imported if name.startswith(("test_", "conftest"))] == []


@pytest.mark.parametrize("room", ["server", "server/d"])
def test_files_beside_folders_close_no_folder_cycle(room: str) -> None:
    name = room.replace("/", ".")
    sources = {f"{room}/a.py": f"import {name}.b.x", f"{room}/b/x.py": f"import {name}.c", f"{room}/c.py": ""}
    assert folder_cycles(sources) == []


def test_imports_for_types_only_are_seen() -> None:
    imports = imports_of(read_sources("kernels"))
    assert "kernels.calls.batch" in imports["kernels.vocabulary.path"]


def test_prose_and_method_names_are_no_offence() -> None:
    sources = {"server/a.py": '"""hallmark_requests_running is a metric."""\nmodel.eval()\n'}
    assert telemetry_names(sources) == []
    assert object_loading(sources) == []


def import_without_torch(*modules: str) -> subprocess.CompletedProcess[str]:
    block = "import sys; sys.modules['torch'] = sys.modules['triton'] = None; "
    command = [sys.executable, "-c", block + "; ".join(f"import {module}" for module in modules)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_the_pure_files_import_without_torch() -> None:
    modules = {module_of(path.relative_to(ROOT).as_posix()) for pattern in PURE for path in ROOT.glob(pattern)}
    assert len(modules) > 80
    result = import_without_torch(*sorted(modules))
    assert result.returncode == 0, result.stderr


def test_a_file_that_needs_torch_is_caught() -> None:
    assert "torch" in import_without_torch("kernels.calls.batch").stderr


def test_the_other_package_named_kernels_is_not_installed() -> None:
    """The package would shadow our kernels/ or be shadowed, and transformers behaves otherwise where it finds it."""
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution("kernels")
