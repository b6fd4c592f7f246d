"""Write what the image installs, exact and with hashes. Run it when pyproject.toml changes.

    .venv/bin/python deploy/lock.py

deploy/requirements.lock      Linux x86-64, CPython 3.12, CUDA: what is qualified and shipped
deploy/requirements-cpu.lock  Linux x86-64, CPython 3.11, PyTorch's CPU build: an image for machines without a GPU, and
                              the one that `make test-image` builds; torch is of https://download.pytorch.org/whl/cpu

Only metadata is read, nothing is installed. Where no index has torch's CPU build for CPython 3.11, say --only
requirements.lock.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Target:
    """A lock file and the machine that it is for."""

    name: str
    python: str
    pins: tuple[str, ...]


TARGETS = (
    # What the kernels are proven on; pyproject.toml admits more.
    Target("requirements.lock", "3.12", ("torch==2.11.0", "triton==3.6.0")),
    Target("requirements-cpu.lock", "3.11", ("torch==2.13.0+cpu",)),
)


def resolve(dependencies: list[str], python: str) -> list[dict[str, Any]]:
    """Return what pip would install on the image's machine. Raises CalledProcessError when there is no solution."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        target = ["--python-version", python, "--only-binary", ":all:", "--target", folder]
        subprocess.run([*command, *target, "--report", str(report), *dependencies], check=True)
        installed: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return installed


def lock_lines(installed: list[dict[str, Any]]) -> list[str]:
    """`name==version --hash=sha256:...`, sorted by name."""
    lines = []
    for item in installed:
        name = item["metadata"]["name"].lower().replace("_", "-")
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={item['metadata']['version']} --hash=sha256:{digest}")
    return sorted(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [target.name for target in TARGETS]
    parser.add_argument("--only", choices=names, help="write this one alone")
    only = parser.parse_args().only
    # setuptools builds our own package in the image, where nothing unpinned may take part.
    dependencies = [*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"], "setuptools>=77"]
    for target in TARGETS:
        if only in (None, target.name):
            lines = lock_lines(resolve([*dependencies, *target.pins], target.python))
            head = f"# Written by deploy/lock.py for Linux x86-64, CPython {target.python}"
            (ROOT / "deploy" / target.name).write_text("\n".join([head, *lines, ""]))


if __name__ == "__main__":
    main()
