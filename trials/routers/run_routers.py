"""Run foreign routers in front of two servers of this checkout, and write down what they chose.

`make test-routers` runs it. Each router gets an environment of its own below .cache/routers. It passes requests on,
then chooses while one server is busy and while the other is; and once more before servers that do not show vLLM's
names, so that it is seen whether it chose by them. What cannot be installed here is `not run`. The exit status is 1
when a request fails that a router passed on, or a router that has chosen by these names does not do so any more.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx2
from routers import NOT_HERE, ROUTERS, Router
from running_server import ROOT, Server, free_port, running

PAGE = ROOT / "docs" / "routers.md"
BEGIN, END = "<!-- table: routers -->\n", "<!-- end -->"
NUM_CHOICES = 10
MOST_TO_BUSY = 2  # of these, where a router chooses by load: it may choose before its first look
_SETTLE_S = 4.0  # several scrapes
_NUM_STREAMS, _MAX_SEQS, _STREAM_TOKENS = 8, 4, 30  # short, so that a chat behind them does not wait for long
_START_S, _INSTALL_S = 120.0, 300.0
SERVERS = ("--device", "cpu", "--max-num-seqs", str(_MAX_SEQS), "--attestation-interval-s", "0")
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
CALLS = {
    "completion": ("/v1/completions", {"model": "demo", "prompt": "Once", "max_tokens": 3}),
    "completion, streamed": ("/v1/completions", {"model": "demo", "prompt": "Once", "max_tokens": 3, "stream": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, streamed": ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
}


@dataclass(frozen=True, slots=True)
class Choices:
    """Numbers of NUM_CHOICES requests that went to the first server."""

    while_it_is_busy: int
    while_the_other_is: int

    @property
    def is_by_load(self) -> bool:
        return self.while_it_is_busy <= MOST_TO_BUSY and NUM_CHOICES - self.while_the_other_is <= MOST_TO_BUSY

    def __str__(self) -> str:
        return f"{self.while_it_is_busy} and {self.while_the_other_is}"


@dataclass(frozen=True, slots=True)
class Found:
    """Observations of a router before one pair of servers."""

    failures: dict[str, str]  # call -> why
    choices: Choices | None  # None: requests failed


def installed(router: Router, cache: Path) -> Path | None:
    """The environment of the router, made where there is none; None where it cannot be."""
    folder, wanted = cache / router.name, json.dumps([router.packages, sys.version_info[:2]])
    stamp = folder / "installed.json"
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    steps = [
        [sys.executable, "-m", "venv", str(folder)],
        [f"{folder}/bin/python", "-m", "pip", "install", "--quiet", *router.packages],
    ]
    try:
        if any(subprocess.run(step, timeout=_INSTALL_S, check=False).returncode for step in steps):
            return None
    except subprocess.TimeoutExpired:
        return None
    stamp.write_text(wanted)
    return folder


@contextmanager
def routing(router: Router, folder: Path, urls: Sequence[str]) -> Iterator[str]:
    """The URL of the started router. Raises RuntimeError for one that does not answer."""
    port, log_file = free_port(), folder / "log"
    free_port()  # some take the next one too
    started = router.start(folder, port, urls)
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"} | dict(started.environ)
    with log_file.open("wb") as log:
        process = subprocess.Popen(started.command, cwd=folder, env=environ, stdout=log, stderr=log)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    try:
        while not _answers(url + router.ready):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{router.name} did not start; its log is {log_file}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """More streams straight to the server than it computes at once, until the block ends."""
    is_over = threading.Event()
    body = {"prompt": "Once", "max_tokens": _STREAM_TOKENS, "ignore_eos": True, "stream": True}

    def stream() -> None:
        while not is_over.is_set():
            with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
                for _ in answer.iter_lines():
                    if is_over.is_set():
                        return

    threads = [threading.Thread(target=stream) for _ in range(_NUM_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        server.wait_for(lambda: server.value("hallmark_requests_waiting") >= 1, "a queue", 120)
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        server.wait_for(lambda: not server.value("hallmark_requests_running"), "the end of the streams", 120)


def called(url: str) -> dict[str, str]:
    """The calls that fail through the router, and why. Some are healthy before they know the servers."""
    failures = {}
    deadline, path, body = time.monotonic() + _START_S, *CALLS["completion"]
    while time.monotonic() < deadline:
        if httpx2.post(url + path, json=body, timeout=120).status_code not in (404, 503):
            break
        time.sleep(1)
    for name, (path, body) in CALLS.items():
        try:
            answer = httpx2.post(url + path, json=body, timeout=120)
            is_whole = not body.get("stream") or answer.text.rstrip().endswith("data: [DONE]")
            if answer.status_code != 200 or not is_whole:
                failures[name] = f"{answer.status_code}: {answer.text[:300]}"
        except httpx2.HTTPError as error:
            failures[name] = f"{type(error).__name__}: {error}"
    return failures


def num_served(server: Server) -> float:
    return server.value("hallmark_requests_total", route="/v1/chat/completions", outcome="ok")


def chosen(url: str, first: Server, busy_one: Server) -> int:
    """Count the chats of NUM_CHOICES that go to the first server while `busy_one` is busy."""
    with busy(busy_one):
        time.sleep(_SETTLE_S)
        before = num_served(first)
        for _ in range(NUM_CHOICES):
            httpx2.post(f"{url}/v1/chat/completions", json=CHAT, timeout=300).raise_for_status()
        found = round(num_served(first) - before)
    time.sleep(_SETTLE_S)  # the router sees that it is over
    return found


def looked_at(router: Router, folder: Path, servers: Sequence[Server]) -> Found:
    first, second = servers
    with routing(router, folder, [server.url for server in servers]) as url:
        failures = called(url)
        if failures:
            return Found(failures, None)
        return Found({}, Choices(chosen(url, first, first), chosen(url, first, second)))


@contextmanager
def pair(folder: Path, *flags: str) -> Iterator[tuple[Server, Server]]:
    """Two ready servers of the demo model."""
    with ExitStack() as stack:
        servers = []
        for name in ("first", "second"):
            port = free_port()
            program = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), *SERVERS, *flags]
            environ = {key: text for key, text in os.environ.items() if not key.startswith("HALLMARK_")}
            environ |= {"PYTHONPATH": str(ROOT), "HALLMARK_CACHE_DIR": str(folder / "cache")}
            servers.append(stack.enter_context(running(program, port, folder / f"{name}.log", environ)))
        for server in servers:
            server.wait_ready()
        yield servers[0], servers[1]


def row(router: Router, named: Found | None, bare: Found | None) -> tuple[str, ...]:
    """A line of the page's table."""
    about = (router.name, router.version, f"`{router.policy}`")
    if named is None or bare is None:
        return (*about, "not run: cannot be installed here", "", "")
    if named.choices is None or bare.choices is None:
        return (*about, f"fail: {', '.join(named.failures | bare.failures)}", "", "")
    return (*about, "work", str(named.choices), str(bare.choices))


def table(rows: Sequence[Sequence[str]]) -> str:
    head = ("router", "version", "policy", "requests", "with vLLM's names", "without")
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", help="routers to run (default: all); then the page is not written")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "routers")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    routers = [router for router in ROUTERS if not options.names or router.name in options.names]
    folders = {router.name: installed(router, options.cache.resolve()) for router in routers}
    found: dict[tuple[str, bool], Found] = {}
    for has_names in (True, False):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            flags = ("--metrics-compat", "vllm") if has_names else ()
            servers = stack.enter_context(pair(Path(folder), *flags))
            for router in routers:
                environment = folders[router.name]
                if environment is None:
                    continue
                seen = found[router.name, has_names] = looked_at(router, environment, servers)
                what = "with vLLM's names" if has_names else "without them"
                print(f"{router.name} {router.version} {what}: {seen.choices or seen.failures}", flush=True)
    rows = [row(it, found.get((it.name, True)), found.get((it.name, False))) for it in routers]
    if not options.names:
        text = options.page.read_text()
        head, rest = text.split(BEGIN)
        run = f"Run on {datetime.now(UTC):%Y-%m-%d}.\n"
        written = table([*rows, *NOT_HERE])
        options.page.write_text(f"{head}{BEGIN}{run}\n{written}{END}{rest.split(END, 1)[1]}")
    wrong = [
        it.name
        for it in routers
        if (seen := found.get((it.name, True))) is not None
        and (seen.choices is None or (it.is_by_names and not seen.choices.is_by_load))
    ]
    print(f"{len(found) // 2} of {len(routers)} routers were run, {len(wrong)} not as they should be: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
