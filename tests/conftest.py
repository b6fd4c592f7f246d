"""Shared by all tests: Triton's interpreter where there is no GPU, and an address that refuses connections."""

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from kernels.system.triton_cache import use_own_cache
from support.compiled.compile_outside import kept_cache, remove_old_entries
from support.worker_blocks import spread

INTERPRET = "TRITON_INTERPRET"
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # "gw5"; empty where pytest-xdist is not used
KEPT_BYTES = 2**30  # of a GPU, by a process between two tests: to allocate anew waits for the other processes


def share_cores(worker: str, num_workers: int, cores: Sequence[int]) -> set[int]:
    """The cores of a worker of pytest-xdist ("gw5"), dealt in turns; all of them where there are fewer than workers."""
    is_dealt = bool(worker) and num_workers <= len(cores)
    return set(cores[int(worker.removeprefix("gw")) :: num_workers] if is_dealt else cores)


def share_gpus(worker: str, visible: str | None, num_gpus: int) -> str | None:
    """The GPU of a worker of pytest-xdist ("gw5"), dealt in turns; None where there is none to choose."""
    gpus = [str(index) for index in range(num_gpus)] if visible is None else visible.split(",")
    return gpus[int(worker.removeprefix("gw")) % len(gpus)] if worker and len(gpus) > 1 else None


# An engine computes with every core that it may use, and threads of two workers wait for each other: the engines of
# seven families took 19 s of CPU time so, and 5 s on a core of their own. Programs that a test starts inherit it.
if WORKER and not torch.cuda.is_available() and hasattr(os, "sched_setaffinity"):
    _num_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, share_cores(WORKER, _num_workers, sorted(os.sched_getaffinity(0))))
    torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
NUM_THREADS = torch.get_num_threads()

# CUDA reads the variable once, when it is initialised: counting by NVML, as here, does not.
_gpu = share_gpus(WORKER, os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
if _gpu is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = _gpu


# Triton's cache may hold a kernel of other sources than these (kernels/system/triton_cache.py).
if torch.cuda.is_available():
    use_own_cache()

# Triton decides when it and a kernel are imported: without a GPU all are imported for the interpreter.
# Here, not in a hook of pytest: hooks run after the conftest of a folder below, which may import a kernel.
if not torch.cuda.is_available():
    os.environ[INTERPRET] = "1"


def pytest_sessionstart(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")  # of pytest-xdist
    folder = None if is_worker else kept_cache()
    if folder is not None:
        remove_old_entries(folder, time.time())


@pytest.hookimpl(trylast=True)  # behind -m and -k
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = spread(items, [item for item in items if item.get_closest_marker("long")])
    first = {item.path for item in items if item.get_closest_marker("first")}
    items.sort(key=lambda item: item.path not in first)


def pytest_collection_finish() -> None:
    """Every kernel is imported by now. Servers that tests start from here on are plain CPU servers."""
    if os.environ.get(INTERPRET) and "triton" in sys.modules:  # else it is imported later, and interprets nothing
        os.environ.pop(INTERPRET, None)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Make the machine under test Triton's interpreter for a module's tests, where there is no GPU."""
    if torch.cuda.is_available():
        yield
        return
    os.environ[INTERPRET] = "1"
    yield
    del os.environ[INTERPRET]


@pytest.fixture(autouse=True)
def _own_threads() -> None:
    """An engine lets torch use every core, for all tests behind it too: workers would wait for each other's threads."""
    if torch.get_num_threads() != NUM_THREADS:
        torch.set_num_threads(NUM_THREADS)


@pytest.fixture(autouse=True)
def _give_back_gpu_memory() -> Iterator[None]:
    """Sixteen processes share a GPU: what one has cached after a large test is missing in another's."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def refused_url() -> Iterator[str]:
    """A URL whose connections are refused: its port is bound for the whole session, and nobody listens on it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
