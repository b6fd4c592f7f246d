"""The package as `pip install` puts it in place, without a checkout, beside transformers and its `kernels`."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ready import wait_ready
from running_server import ROOT, Server, free_port, running

from hallmark.build_backend import ROOMS
from kernels.catalog import ALL_PATHS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
OTHER_KERNELS = "kernels==0.17.2"  # Hugging Face's, which transformers looks for
UV = Path(sys.executable).with_name("uv")
DIGESTS = """
import importlib.metadata, json, kernels
from transformers import LlamaForCausalLM
from hallmark.kernels.catalog import ALL_PATHS
assert hasattr(kernels, "get_kernel") and importlib.metadata.packages_distributions()["kernels"] == ["kernels"]
print(json.dumps({path.name: path.source_digest for path in ALL_PATHS}))
"""
# Each module that a process of ours runs, as the sources name it.
PROCESSES = """
import ast, importlib.util, pathlib, hallmark
from hallmark.kernels.system.child_process import python_command

root = pathlib.Path(hallmark.__file__).parent
texts = {node.value for file in root.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))
         if isinstance(node, ast.Constant) and isinstance(node.value, str)}
modules = {".".join(file.relative_to(root).with_suffix("").parts) for file in root.rglob("*.py")
           if "__main__" in file.read_text() and file.parent != root}
for name in sorted((texts & modules) | {"server.cli"}):
    assert importlib.util.find_spec(python_command(name)[-1]), name
    print(name)
"""


def uv(*words: str | Path) -> None:
    """Run uv, which looks where pip does. Skip the test where uv is missing."""
    if not UV.exists():
        pytest.skip("uv is not installed (it comes with the extra `test`)")
    ours = {"PIP_INDEX_URL": "UV_DEFAULT_INDEX", "PIP_FIND_LINKS": "UV_FIND_LINKS"}
    environ = {ours[name]: text for name, text in os.environ.items() if name in ours} | os.environ
    subprocess.run([UV, "--quiet", *words], env=environ, check=True, timeout=600, cwd="/")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a wheel of the checkout, and below `archive` a source archive and the wheel built of that."""
    folder = tmp_path_factory.mktemp("built")
    uv("build", "--wheel", "--out-dir", folder, ROOT)
    uv("build", "--out-dir", folder / "archive", ROOT)
    return folder


@pytest.fixture(scope="module")
def program(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program `hallmark` of a fresh environment with the source archive's wheel; torch and transformers as here."""
    home = tmp_path_factory.mktemp("home")
    (wheel,) = (built / "archive").glob("*.whl")
    uv("venv", "--python", sys.executable, home / "env")
    here = [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    uv("pip", "install", "--python", home / "env", wheel, OTHER_KERNELS, *here)
    return home / "env" / "bin" / "hallmark"


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def environment(folder: Path) -> Mapping[str, str]:
    """Variables of a user who has neither a checkout nor settings."""
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}


def run(*words: str | Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def server(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model on two ranks, served by the installed program."""
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    flags = ["--port", str(port), "--on-unproven", "degrade", "--tensor-parallel-size", "2"]
    with running([str(program), "serve", *flags], port, folder / "log", environment(folder)) as server:
        wait_ready(server.process, server.url, folder / "log")
        yield server


def test_a_wheel_takes_one_top_level_name(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    found = contents(wheel)
    assert {name.partition("/")[0] for name in found} == {"hallmark", "hallmark_serve-0.1.0.dist-info"}
    assert found["hallmark_serve-0.1.0.dist-info/top_level.txt"] == b"hallmark\n"
    ours = {file.relative_to(ROOT).as_posix() for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    written = {name.removeprefix("hallmark/"): text.decode() for name, text in found.items() if name.endswith(".py")}
    assert written.keys() == ours | {"__init__.py", "__main__.py"}
    text = "\n".join(written.values())
    assert "\nfrom hallmark.kernels.catalog import " in text
    assert re.findall(r"^ *(?:from|import) +(?:kernels|qualification|server)\b.*", text, re.MULTILINE) == []


def test_the_source_archive_builds_the_same_wheel(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (archive,) = (built / "archive").glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        assert "hallmark_serve-0.1.0/hallmark/build_backend.py" in sources.getnames()
    (other,) = (built / "archive").glob("*.whl")
    assert contents(wheel) == contents(other)


def test_installed_kernels_have_the_digests_of_their_proofs(program: Path, tmp_path: Path) -> None:
    found = run(program.with_name("python"), "-c", DIGESTS, folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == {path.name: path.source_digest for path in ALL_PATHS}


def test_every_process_of_the_installed_package_is_found(program: Path, tmp_path: Path) -> None:
    found = run(program.with_name("python"), "-c", PROCESSES, folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert {"server.engine.process", "server.engine.follower", "server.grammar.check_process"} <= set(
        found.stdout.split()
    )


@pytest.mark.parametrize("command", ["doctor", "matrix verify --files-only", "serve --help"])
def test_commands_of_the_installed_package_run(program: Path, tmp_path: Path, command: str) -> None:
    done = run(program, *command.split(), folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_the_installed_program_serves(server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [17]}}}
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "response_format": schema}
    assert server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "17"
    assert {row["path"] for row in server.plan()} >= {"sdpa.cpu", "torch.linear"}
    assert "<title>" in server.get("/").text
    assert '"logger":"server.engine.' in server.log
