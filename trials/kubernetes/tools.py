"""The programs that check manifests and the dashboard, installed once into .cache/deploy: kubectl, checkov, types."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
INSTALL_LIMIT_S = 900

Manifest = dict[str, Any]


class MissingTool(Exception):
    """A program that this machine lacks; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Folders of what is installed."""

    programs: Path
    node_modules: Path

    def render(self, overlay: str) -> list[Manifest]:
        """Return the manifests of deploy/kubernetes/`overlay`. Raises CalledProcessError when Kustomize refuses it."""
        command = [str(self.programs / "bin" / "kubectl"), "kustomize", str(KUBERNETES / overlay)]
        text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        return [manifest for manifest in yaml.safe_load_all(text) if manifest]

    def problems(self, manifests: list[Manifest]) -> list[list[str]]:
        """Return what is wrong with each manifest, by the types and validators of its kind; unknown kinds are wrong."""
        command = ["node", str(HERE / "check_kinds.mjs"), str(self.node_modules)]
        pools = [_problems_of_pool(it) if it["kind"] == "InferencePool" else None for it in manifests]
        others = [it for it, pool in zip(manifests, pools, strict=True) if pool is None]
        done = subprocess.run(
            command, input=json.dumps(others), capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise RuntimeError(f"check_kinds.mjs ended with {done.returncode}: {done.stderr[-2000:]}")
        found = iter(json.loads(done.stdout))
        return [next(found) if pool is None else pool for pool in pools]

    def problems_of_dashboard(self, dashboard: dict[str, Any]) -> list[str]:
        """Return what Grafana's own types have against a dashboard."""
        command = ["node", str(HERE / "check_dashboard.mjs"), str(self.node_modules)]
        done = subprocess.run(
            command, input=json.dumps(dashboard), capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise RuntimeError(f"check_dashboard.mjs ended with {done.returncode}: {done.stderr[-2000:]}")
        found: list[str] = json.loads(done.stdout)
        return found

    def failed_policies(self, file: Path) -> list[str]:
        """Return `CHECK resource` for each policy of checkov that the manifests of `file` break."""
        # As a module: the first line of its script cannot hold a path with a space.
        program = [self.programs / "bin" / "python", "-m", "checkov.main"]
        command = [*program, "--config-file", HERE / "checkov.yaml", "-o", "json", "-f", file]
        environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, timeout=300, check=False, env=environ
        )
        report = json.loads(done.stdout)
        if report["summary"]["passed"] < 50:  # an empty report passes everything
            raise RuntimeError(f"checkov looked at too little: {report['summary']}")
        return [f"{check['check_id']} {check['resource']}" for check in report["results"]["failed_checks"]]


def _problems_of_pool(manifest: Manifest) -> list[str]:
    schema = json.loads((HERE / "inference_pool.schema.json").read_text())
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)]


def prepare(folder: Path) -> Tools:
    """Install what is missing or has another version into `folder`. Raises MissingTool."""
    if not (shutil.which("node") and shutil.which("npm")):
        raise MissingTool("node and npm are not installed (Debian packages nodejs and npm)")
    programs, node = folder / "programs", folder / "node"
    wanted = (HERE / "requirements.txt").read_text() + (HERE / "package.json").read_text() + sys.version
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        node.mkdir(parents=True)
        shutil.copy(HERE / "package.json", node)
        uv, requirements = Path(sys.executable).with_name("uv"), HERE / "requirements.txt"
        _install([str(uv), "venv", "--quiet", "--python", sys.executable, str(programs)], folder)
        _install([str(uv), "pip", "install", "--quiet", "--python", str(programs), "-r", str(requirements)], folder)
        _install(["npm", "install", "--no-audit", "--no-fund", "--silent"], node)
        stamp.write_text(wanted)
    return Tools(programs, node)


def _install(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    if done.returncode:
        raise MissingTool(f"`{' '.join(command[:4])} ...` ended with {done.returncode}: {done.stderr.strip()[-300:]}")
