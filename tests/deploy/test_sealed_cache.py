"""Triton's cache, filled where there is a C compiler, is all that a process without one needs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEALED = ROOT / "tests" / "support" / "sealed"
KERNELS = {"hallmark_gluon_plan", "hallmark_gluon_prefill"}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda that runs nothing."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("driver")
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([compiler, *flags, str(SEALED / "fake_cuda.c")], check=True)
    return folder


@pytest.fixture(scope="module")
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH without a compiler. What `file` says of Python is part of the keys of what is compiled in C."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("file", "uname"):
        program = shutil.which(name)
        if program is not None:
            (folder / name).symlink_to(program)
    return str(folder)


def launch(driver: Path, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CC")}
    settings = {
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_LIBCUDA_PATH": str(driver),
        "LD_LIBRARY_PATH": str(driver),
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    program = [sys.executable, str(SEALED / "sealed_launch.py")]
    return subprocess.run(
        program, env=inherited | settings | environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def filled(driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that was filled with the least that has to be shipped."""
    cache = tmp_path_factory.mktemp("cache")
    done = launch(driver, cache, TRITON_STORE_BINARY_ONLY="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == dict.fromkeys(KERNELS, False)
    return cache


def test_without_a_compiler_every_kernel_is_in_a_shipped_cache(driver: Path, filled: Path, bare_path: str) -> None:
    before = sorted(filled.rglob("*"))
    done = launch(driver, filled, PATH=bare_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == dict.fromkeys(KERNELS, True)
    assert sorted(filled.rglob("*")) == before, "nothing was written"


def test_without_a_compiler_or_a_cache_nothing_is_launched(driver: Path, tmp_path: Path, bare_path: str) -> None:
    done = launch(driver, tmp_path, PATH=bare_path)
    assert done.returncode != 0
    assert "Failed to find C compiler" in done.stderr  # what server/engine/operators/launch_errors.py knows it by
