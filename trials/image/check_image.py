"""The image, built for real and run as a cluster runs it. Minutes: `make test-image`, not part of `make test`.

Debian 12 with its Python 3.11 stands in for python:3.11-slim-bookworm, and the lock is the one without CUDA: a machine
without a GPU cannot run the other. Everything else is the Dockerfile that production builds.
"""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_tools import LOCK, ROOT, SBOM_PROGRAM, Container, Image, MissingTool, build, require_tools, run, running
from running_server import free_port

FOLDER = ROOT / ".cache" / "image"
pytestmark = pytest.mark.timeout(7200)


@pytest.fixture(scope="session")
def image() -> Image:
    try:
        require_tools()
    except MissingTool as error:
        pytest.skip(str(error))
    FOLDER.mkdir(parents=True, exist_ok=True)
    built = build(FOLDER)
    print(f"\nimage for machines without a GPU: {built.num_bytes / 1e9:.2f} GB")
    return built


@pytest.fixture(scope="session")
def bill(image: Image) -> dict[str, str]:
    """Name -> version of every Python package in the image's bill of materials."""
    programs = FOLDER / "programs"
    if not (programs / "bin" / "cyclonedx-py").exists():
        run(sys.executable, "-m", "venv", programs)
        run(programs / "bin" / "pip", "install", "--quiet", SBOM_PROGRAM)
    out = FOLDER / "sbom.json"
    program = ["--program", str(programs / "bin" / "cyclonedx-py")]
    run(sys.executable, ROOT / "deploy" / "sbom.py", image.root, "--out", out, *program)
    components = json.loads(out.read_text())["components"]
    debian = [it["name"] for it in components if it["bom-ref"].startswith("deb:")]
    assert {"tini", "gcc", "libc6"} <= set(debian)
    assert [it["name"] for it in components if it["bom-ref"].startswith("npm:")] == ["marked"]
    python = [it for it in components if not it["bom-ref"].startswith(("deb:", "npm:"))]
    found = {it["name"].lower().replace("_", "-"): it["version"] for it in python}
    print(f"\nbill of materials: {len(components)} components, {len(found)} of them Python's")
    return found


@pytest.fixture(scope="module")
def container(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    with running(image, tmp_path_factory.mktemp("container"), free_port()) as it:
        yield it


def test_the_base_is_named_by_digest(image: Image) -> None:
    assert "@sha256:" in image.base


def test_the_image_holds_what_the_lock_names_and_nothing_else(bill: dict[str, str]) -> None:
    lines = (ROOT / "deploy" / LOCK).read_text().splitlines()
    locked = dict(line.split(" ")[0].split("==") for line in lines if not line.startswith("#"))
    assert {name: version for name, version in bill.items() if locked.get(name) != version}.keys() == {
        "hallmark-serve",
        "pip",  # the venv's own
    }
    assert locked.keys() <= bill.keys()


def completion_of(container: Container) -> dict[str, Any]:
    body = json.dumps({"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{container.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def test_it_answers(container: Container) -> None:
    answer = completion_of(container)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["text"].strip()


def test_it_runs_as_its_user_without_capabilities(container: Container) -> None:
    status = container.execute("cat", "/proc/1/status").stdout
    assert "Uid:\t10001\t10001\t10001\t10001" in status
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status, "its system calls are filtered"


def test_it_writes_to_its_cache_only(container: Container) -> None:
    for folder in ("/", "/tmp", "/opt/hallmark", "/var/tmp"):
        assert container.execute("touch", f"{folder}/written").returncode != 0, folder
    assert container.execute("touch", "/var/cache/hallmark/written").returncode == 0
    assert list(container.cache.glob("evidence/*.json")), "what it has proven at its start"


def test_its_own_health_check_passes(container: Container, image: Image) -> None:
    kind, *command = image.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    done: subprocess.CompletedProcess[str] = container.execute(*command)
    assert done.returncode == 0, done.stderr


def test_sigterm_ends_it_with_0(container: Container) -> None:
    assert container.stop() == 0


def test_two_ranks_answer_in_one_container(image: Image, tmp_path: Path) -> None:
    """The processes of a shared model need nothing of the host either."""
    with running(image, tmp_path, free_port(), {"HALLMARK_TENSOR_PARALLEL_SIZE": "2"}) as it:
        assert completion_of(it)["usage"]["completion_tokens"] == 8
        commands = it.execute("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'").stdout
        assert "server.engine.follower" in commands
        assert it.stop() == 0
