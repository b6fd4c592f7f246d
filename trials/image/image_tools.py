"""The image for machines without a GPU, built by buildah on a stand-in for its base and run by runc. Needs root."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOCK = "requirements-cpu.lock"
SBOM_PROGRAM = "cyclonedx-bom==7.5.0"
STEP_LIMIT_S = 3600
READY_LIMIT_S = 900
END_LIMIT_S = 120
# What podman, CRI-O and, nearly, containerd filter by default (RuntimeDefault); it comes with buildah.
SECCOMP = Path("/usr/share/containers/seccomp.json")
# Of the stand-in: what python:3.11-slim has, from Debian.
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"


class MissingTool(Exception):
    """Lack of a tool to build and run an image; the message says which."""


@dataclass(frozen=True, slots=True)
class Image:
    """A built image, unpacked."""

    base: str  # by digest
    config: dict[str, Any]
    root: Path
    num_bytes: int


def require_tools() -> None:
    """Raise MissingTool where something is missing."""
    missing = [name for name in ("buildah", "debootstrap", "runc") if shutil.which(name) is None]
    if missing or not SECCOMP.exists():
        missing += [] if SECCOMP.exists() else [str(SECCOMP)]
        raise MissingTool(f"{', '.join(missing)} not installed (Debian packages of these names)")
    if os.geteuid() != 0:
        raise MissingTool("building with --isolation chroot and running with runc need root")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a program and return what it printed. Raises RuntimeError with its last lines when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=STEP_LIMIT_S, check=False)
    if done.returncode:
        tail = (done.stdout + done.stderr)[-3000:]
        raise RuntimeError(f"`{' '.join(words[:6])} ...` ended with {done.returncode}:\n{tail}")
    return done.stdout


def prepare_stand_in(folder: Path) -> Path:
    """Make the root file system that stands in for python:3.11-slim-bookworm, once; pip in it installs from /wheels."""
    root = folder / "stand-in"
    if not (root / "etc/pip.conf").exists():
        shutil.rmtree(root, ignore_errors=True)
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root)
        (root / "etc/pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    return root


def prepare_wheels(folder: Path) -> Path:
    """Download what the lock names, checked by its hashes, once for each lock."""
    lock = ROOT / "deploy" / LOCK
    wheels = folder / f"wheels-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    if not wheels.exists():
        part = wheels.with_suffix(".part")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        target = ["--only-binary", ":all:", "--python-version", "3.11", "--dest", str(part)]
        index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
        run(*pip, *target, *index, "--requirement", str(lock))
        part.rename(wheels)
    return wheels


def build(folder: Path) -> Image:
    """Build the image from this checkout's Dockerfile, on a base that is named by digest."""
    buildah = ["buildah", "--storage-driver", "vfs", "--root", str(folder / "store"), "--runroot", str(folder / "run")]
    stand_in, wheels = prepare_stand_in(folder), prepare_wheels(folder)
    shutil.rmtree(folder / "store", ignore_errors=True)
    container = run(*buildah, "from", "scratch").strip()
    run(*buildah, "add", "--quiet", container, stand_in, "/")
    run(*buildah, "config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", container)
    run(*buildah, "commit", "--quiet", "--rm", container, "localhost/stand-in")
    digest = json.loads(run(*buildah, "inspect", "--type", "image", "localhost/stand-in"))["FromImageDigest"]
    base = f"localhost/stand-in@{digest}"
    arguments = ["--build-arg", f"PYTHON_IMAGE={base}", "--build-arg", f"LOCK={LOCK}"]
    how = ["--isolation", "chroot", "--format", "docker", "--layers=false", "--volume", f"{wheels}:/wheels:ro"]
    run(*buildah, "bud", *how, *arguments, "--tag", "hallmark", ".")
    config = json.loads(run(*buildah, "inspect", "--type", "image", "localhost/hallmark"))["Docker"]["config"]
    container = run(*buildah, "from", "localhost/hallmark").strip()
    root = Path(run(*buildah, "mount", container).strip())
    sizes = json.loads(run("du", "--summarize", "--bytes", root).split()[0])
    return Image(base, config, root, sizes)


@dataclass(frozen=True, slots=True)
class Container:
    """A running container; its port is on loopback."""

    name: str
    state: Path
    process: subprocess.Popen[bytes]
    url: str
    cache: Path

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the container, as its user."""
        words = ["runc", "--root", str(self.state), "exec", self.name, *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)

    def stop(self) -> int:
        """Send SIGTERM as a runtime does, and return the exit code."""
        subprocess.run(["runc", "--root", str(self.state), "kill", self.name, "TERM"], check=True, timeout=60)
        return self.process.wait(END_LIMIT_S)


@contextmanager
def running(image: Image, folder: Path, port: int, environ: Mapping[str, str] | None = None) -> Iterator[Container]:
    """Start the image's own command as its user, as Kubernetes' manifests ask, and wait until it is ready.

    Its root is read-only, it has no capabilities and cannot get any, and system calls are filtered. `environ` comes
    beside the image's.
    """
    cache, bundle = folder / "cache", folder / "bundle"
    for each in (cache, bundle):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir(parents=True)
    uid, gid = map(int, image.config["User"].split(":"))
    os.chown(cache, uid, gid)
    (bundle / "config.json").write_text(json.dumps(_specification(image, cache, uid, gid, port, environ or {})))
    name = f"hallmark-{os.getpid()}-{port}"
    log = folder / "container.log"
    with log.open("wb") as output:
        command = ["runc", "--root", str(folder / "runc"), "run", "--bundle", str(bundle), name]
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    container = Container(name, folder / "runc", process, f"http://127.0.0.1:{port}", cache)
    try:
        _wait_ready(container, log)
        yield container
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            subprocess.run(["runc", "--root", str(container.state), "delete", "--force", name], check=False, timeout=60)
            process.wait(END_LIMIT_S)


def _seccomp() -> dict[str, Any]:
    """Return the default filter in the form of the OCI runtime, for a container without capabilities."""
    profile = json.loads(SECCOMP.read_text())
    rules = []
    for rule in profile["syscalls"]:
        includes, excludes = rule.get("includes", {}), rule.get("excludes", {})
        is_of_others = includes.get("arches") and "amd64" not in includes["arches"]
        if includes.get("caps") or is_of_others or "amd64" in excludes.get("arches", ()):
            continue
        # Docker's and containerd's want CAP_SYS_PTRACE for it.
        names = [name for name in rule["names"] if name != "pidfd_getfd"]
        rules.append({"names": names, **{key: rule[key] for key in ("action", "args", "errnoRet") if rule.get(key)}})
    answers = {key: profile[key] for key in ("defaultAction", "defaultErrnoRet") if key in profile}
    return {**answers, "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"], "syscalls": rules}


def _specification(
    image: Image, cache: Path, uid: int, gid: int, port: int, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the OCI runtime's view of what a cluster runs: the host's network, and nothing else of the host."""
    sets = ("bounding", "effective", "permitted", "inheritable", "ambient")
    variables = [*image.config["Env"], "HALLMARK_HOST=127.0.0.1", f"HALLMARK_PORT={port}"]
    variables += [f"{name}={value}" for name, value in environ.items()]
    shm = ["nosuid", "nodev", "mode=1777", "size=64m"]
    [volume] = image.config["Volumes"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": uid, "gid": gid},
            "args": [*image.config["Entrypoint"], *image.config["Cmd"]],
            "env": variables,
            "cwd": image.config["WorkingDir"],
            "noNewPrivileges": True,
            "capabilities": {name: [] for name in sets},
        },
        "root": {"path": str(image.root), "readonly": True},
        "hostname": "hallmark",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64m"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": shm},
            {"destination": volume, "type": "bind", "source": str(cache), "options": ["rbind", "rw"]},
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")], "seccomp": _seccomp()},
    }


def _wait_ready(container: Container, log: Path) -> None:
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline:
        if container.process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{container.url}/readyz", timeout=30):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise RuntimeError(f"the container was not ready within {READY_LIMIT_S} s:\n{log.read_text()[-3000:]}")
