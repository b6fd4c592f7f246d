"""Write deploy/requirements.lock: what the image installs, exact and with hashes. Run it when pyproject.toml changes.

    .venv/bin/python deploy/lock.py

Only metadata is read, nothing is installed. The lock is for the image's machine: Linux x86-64, CPython 3.12.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "deploy" / "requirements.lock"
PYTHON = "3.12"
QUALIFIED = ("torch==2.11.0", "triton==3.6.0")  # what the kernels are proven on; pyproject.toml admits more


def resolve(dependencies: list[str]) -> list[dict[str, Any]]:
    """Return what pip would install on the image's machine. Raises CalledProcessError when there is no solution."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        target = ["--python-version", PYTHON, "--only-binary", ":all:", "--target", folder]
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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = lock_lines(resolve([*project["dependencies"], *QUALIFIED]))
    LOCK.write_text("\n".join(["# Written by deploy/lock.py for Linux x86-64, CPython 3.12", *lines, ""]))


if __name__ == "__main__":
    main()
