"""A real server in a process of its own, as a user starts it, on a free loopback port."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
from running_server import Server, StartServer, free_port, running

WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # whose own folder is in the one of all


@pytest.fixture(scope="session", autouse=True)
def _plain_programs() -> None:
    """Triton's interpreter stays switched on where no chosen test imports Triton: a program would qualify its paths."""
    os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Starts `hallmark serve --port PORT` with more flags, or another command; ends it and its children afterwards."""
    folder = tmp_path_factory.mktemp("servers")
    # Of all workers: the first start proves the demo's shapes, 24 s of a core, and the next ones find its evidence.
    cache = (tmp_path_factory.getbasetemp().parent if WORKER else folder) / "cache"
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("HALLMARK_")}

    @contextmanager
    def start(*flags: str, command: list[str] | None = None, port: int | None = None) -> Iterator[Server]:
        port = port or free_port()
        program = command or [sys.executable, "-m", "server.cli", "serve", "--port", str(port), *flags]
        log_file = folder / f"{port}.log"
        environ = inherited | {"HALLMARK_CACHE_DIR": str(cache), "PORT": str(port)}
        with running(program, port, log_file, environ) as server:
            yield server

    return start


@pytest.fixture(scope="session")
def demo(start_server: StartServer) -> Iterator[Server]:
    """The demo model with default settings; ready. One for the whole session."""
    with start_server() as server:
        server.wait_ready()
        yield server


@pytest.fixture
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with demo.openai() as client:
        yield client
