"""Run foreign clients, unmodified, against a server of this checkout, and write down what worked.

`make test-clients` runs it. Each client of clients.toml gets an environment of its own below .cache/clients, made once
for its versions by uv, whose cache all share; its script of calls/ prints a line a call. Two clients are installed and
run at once. A client that fails stops no other one. What cannot be installed here, without a network or npm, is `not
run`: no failure of ours, and no success either. With `--time-limit` so is what is not done in time. The last line has
their names. The exit status is 1 when a call fails; with `--known PAGE` only when one fails that PAGE does not have as
failing.

Every version is pinned: the clients' own in clients.toml, all that they need in locks/. `--lock` makes the locks anew.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from running_server import DEMO, ROOT, Server, free_port, running

HERE = Path(__file__).resolve().parent
CALLS = HERE / "calls"
PINNED = HERE / "clients.toml"
LOCKS = HERE / "locks"
PAGE = ROOT / "docs" / "clients.md"
UV = Path(sys.executable).with_name("uv")  # of the extra `test`
INSTALL_LIMIT_S = 600  # of a client
START_LIMIT_S = 300  # of a server
NUM_AT_ONCE = 2  # clients; while one waits for its packages or for the server, another one computes
GENERATE, LONG, EMBED = "generate", "long", "embed"  # the servers of a run
LONG_CONTEXT = 65_536  # agents send 5,000 to 20,000 tokens of instructions and tools to a model of 4,096
LONG_FLAGS = ["--on-unproven", "degrade", "--kv-cache-tokens", "131072", "--served-model-name", "demo"]
NOT_RUN = "not run"
OUT_OF_TIME = "out of time"
_INTRODUCTION = """\
# Clients

Programs of others, unmodified, that `make test-clients` ran against the demo model on a CPU: it installs each in an
environment of its own, starts a server and makes the calls that the client's users make. The demo model's answers are
made up, so the protocol is what is checked: types, finish reasons, tool calls, validated objects, events. Calls for
embeddings go to a second server with `--task embed`, and agents to one for a copy of the demo with a context of 65,536
tokens, made for the run, whose answers end with their first sentence. Where an agent's own settings allow it, tools are
left out that would make its prompt minutes of a CPU. The calls are the scripts of `trials/clients/calls/`, and the
command writes this page. `make test-clients CLIENTS='openai anthropic'` runs some, by their folders in
`trials/clients/clients.toml`.

A client's version is pinned in `trials/clients/clients.toml`, and all that it needs in `trials/clients/locks/`, so that
a new release of somebody's package changes nothing here. To raise one: change its version in `clients.toml`, run
`make test-clients CLIENTS='--lock FOLDER'`, which installs what the index has today, writes the lock and makes the
calls, and commit both with this page."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # nothing from a model hub


@dataclass(frozen=True, slots=True)
class Client:
    """A row of clients.toml."""

    name: str
    folder: str
    packages: tuple[str, ...]
    script: str
    limit_s: int
    without_dependencies: bool = False
    has_embeddings: bool = False  # its script makes calls for embeddings, too
    has_long_prompts: bool = False  # or answers that it cannot end: its server is LONG

    @property
    def generates_on(self) -> str:
        """Name the server that answers its calls for text."""
        return LONG if self.has_long_prompts else GENERATE

    @property
    def version(self) -> str:
        """The version of the first package, which is the client."""
        return self.packages[0].rpartition("@" if self.is_npm else "==")[2]

    @property
    def is_npm(self) -> bool:
        return self.script.endswith(".mjs")

    @property
    def lock(self) -> Path:
        """Path of what its environment holds: of Python a list of exact versions, of npm its package-lock.json."""
        return LOCKS / (f"{self.folder}.json" if self.is_npm else f"{self.folder}.txt")


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a client: each call by its name, and why it failed where it did."""

    client: Client
    calls: Mapping[str, str | None]  # None: as it should be
    not_run: str | None = None  # why
    seconds: float = 0.0

    @property
    def failures(self) -> dict[str, str]:
        return {name: why for name, why in self.calls.items() if why is not None}

    @property
    def verdict(self) -> str:
        if self.not_run is not None:
            return f"{NOT_RUN}: {self.not_run}"
        return f"fails: {', '.join(self.failures)}" if self.failures else "works"


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a run must have ended, in seconds of time.monotonic(); None: never."""

    at: float | None = None

    def is_over(self) -> bool:
        return self.at is not None and time.monotonic() >= self.at

    def within(self, limit_s: float) -> float:
        """Return the seconds that are left, at most `limit_s`."""
        return limit_s if self.at is None else max(0.0, min(limit_s, self.at - time.monotonic()))


NEVER = Deadline()


def pinned() -> list[Client]:
    """The clients of clients.toml, in its order."""
    rows = tomllib.loads(PINNED.read_text())["client"]
    return [Client(**(row | {"packages": tuple(row["packages"])})) for row in rows]


def prepare(client: Client, cache: Path, *, is_locked: bool = True, deadline: Deadline = NEVER) -> str | None:
    """Make the environment where there is none for these versions; return why it cannot be made, or None.

    is_locked  with the versions of the client's lock; else with what the index has, and the lock is written
    """
    folder = cache / client.folder
    lock = client.lock.read_text() if is_locked and client.lock.exists() else ""
    stamp, wanted = folder / "installed.json", json.dumps([client.packages, sys.version_info[:2], lock])
    if is_locked and stamp.exists() and stamp.read_text() == wanted:
        return None
    if client.is_npm and not (shutil.which("npm") and shutil.which("node")):
        return "npm is not installed"
    if not client.is_npm and not UV.exists():
        return f"uv is not installed beside {sys.executable}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "install.log"
    for step in _npm_steps(client, folder, lock) if client.is_npm else _uv_steps(client, folder, lock):
        try:
            with log.open("ab") as file:
                code = subprocess.run(
                    step, cwd=folder, stdout=file, stderr=file, timeout=deadline.within(INSTALL_LIMIT_S), check=False
                ).returncode
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME if deadline.is_over() else f"not installed within {INSTALL_LIMIT_S} s"
        if code:
            return f"cannot be installed here, see {log.relative_to(ROOT) if log.is_relative_to(ROOT) else log}"
    if not is_locked:
        lock = write_lock(client, folder)
    stamp.write_text(json.dumps([client.packages, sys.version_info[:2], lock]))
    return None


def _uv_steps(client: Client, folder: Path, lock: str) -> list[list[str]]:
    """Commands that make the environment, for this interpreter; its files are links to uv's cache where they can be."""
    bare = ["--no-deps"] if client.without_dependencies else []
    locked = ["--constraint", str(client.lock)] if lock else []
    return [
        [str(UV), "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)],
        [str(UV), "pip", "install", "--quiet", "--python", str(folder), *bare, *locked, *client.packages],
    ]


def _npm_steps(client: Client, folder: Path, lock: str) -> list[list[str]]:
    """Commands that install what package.json and its lock name, which are written here."""
    needs = dict(package.rsplit("@", 1) for package in client.packages)
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": needs}))
    if lock:
        (folder / "package-lock.json").write_text(lock)
    return [["npm", "ci" if lock else "install", "--no-audit", "--no-fund"]]


def write_lock(client: Client, folder: Path) -> str:
    """Write down what an environment holds, and return it."""
    if client.is_npm:
        text = (folder / "package-lock.json").read_text()
    else:
        command = [str(UV), "pip", "freeze", "--python", str(folder)]
        frozen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        text = re.sub(r"\+\S+$", "", frozen, flags=re.MULTILINE)  # torch==2.13.0+cpu: a build's name, on no index
    LOCKS.mkdir(exist_ok=True)
    client.lock.write_text(text)
    return text


def order_of(clients: Sequence[Client], day: int) -> list[Client]:
    """Return the clients in the order of a day, another one every day, so that each is first now and then."""
    return random.Random(day).sample(clients, k=len(clients))


def command_of(client: Client, cache: Path) -> list[str]:
    """The interpreter of the environment, and the script."""
    interpreter = shutil.which("node") or "node" if client.is_npm else str(cache / client.folder / "bin" / "python")
    return [interpreter, str(CALLS / client.script)]


class Servers:
    """The servers of a run, which start at once while clients are installed; or others, which run already."""

    def __init__(self, cache: Path, until_end: ExitStack, urls: Mapping[str, str | None]) -> None:
        """`urls`: of the servers that run already, by their names; None where one is to be started."""
        self._cache = cache
        self._urls = {name: url for name, url in urls.items() if url}
        missing = urls.keys() - self._urls.keys()
        self._starting = {name: until_end.enter_context(self._started(name)) for name in missing}
        self._lock = threading.Lock()

    def url(self, name: str, deadline: Deadline) -> str:
        """The address of a server once it is ready.

        Raises RuntimeError where it does not become ready.
        """
        with self._lock:
            if name not in self._urls:
                self._starting[name].wait_ready(deadline.within(START_LIMIT_S))
                self._urls[name] = self._starting[name].url
            return self._urls[name]

    def _started(self, name: str) -> AbstractContextManager[Server]:
        port = free_port()
        inherited = {key: text for key, text in os.environ.items() if not key.startswith("HALLMARK_")}
        program = [sys.executable, "-m", "server.cli", "serve", "--port", str(port)]
        program += ["--task", EMBED if name == EMBED else GENERATE]
        if name == LONG:
            program += ["--model", str(long_demo(self._cache / "demo-long")), *LONG_FLAGS]
        environ = inherited | {"HALLMARK_CACHE_DIR": str(self._cache / "server"), "PYTHONPATH": str(ROOT)}
        return running(program, port, self._cache / f"server-{name}.log", environ)


def long_demo(folder: Path) -> Path:
    """Make a copy of the demo model with a context of LONG_CONTEXT, whose answers end with their first sentence."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    sentence_ends = [number for token, number in tokens.items() if token[0] in ".!?"]
    config = json.loads((folder / "config.json").read_text())
    _write_json(folder / "config.json", config | {"max_position_embeddings": LONG_CONTEXT})
    generation = json.loads((folder / "generation_config.json").read_text())
    end_tokens = sorted({*generation["eos_token_id"], *sentence_ends})
    _write_json(folder / "generation_config.json", generation | {"eos_token_id": end_tokens})
    return folder


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def call(
    client: Client, command: Sequence[str], folder: Path, urls: Mapping[str, str], deadline: Deadline = NEVER
) -> Result:
    """Run the client's script on ready servers. Its environment has their addresses and the demo's folder.

    urls  by the names that the script reads
    A script that the deadline ends is `not run`, but where one of its calls has failed before. What a script has
    started, such as an agent, ends with it.
    """
    inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environ = inherited | OFFLINE | urls | {"TOKENIZER": str(DEMO), "CLIENT_FOLDER": str(folder)}
    begun = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=deadline.within(client.limit_s))
            ending, is_whole = f"ended with {process.returncode}: {_last_line(errors)}", process.returncode == 0
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            ending, is_whole = f"not done within {client.limit_s} s", False
        finally:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
    calls = calls_of(output)
    if not is_whole and deadline.is_over() and not any(calls.values()):
        return Result(client, {}, not_run=OUT_OF_TIME)
    if not calls or (not is_whole and not any(calls.values())):
        calls["script"] = ending
    return Result(client, calls, seconds=time.monotonic() - begun)


def calls_of(output: str) -> dict[str, str | None]:
    """The calls that a script has reported: `{"call": NAME, "why": null or TEXT}` a line, among lines of others."""
    found: dict[str, str | None] = {}
    for line in output.splitlines():
        if line.startswith('{"call":'):
            report = json.loads(line)
            found[report["call"]] = report["why"]
    return found


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1][:300]


def page(results: Sequence[Result], date: str, kept: Mapping[str, str] = MappingProxyType({})) -> str:
    """docs/clients.md. `kept` has lines of clients that were not chosen, by name."""
    lines = [*_INTRODUCTION.splitlines(), ""]
    lines += ["| client | version | called | result | date |", "| --- | --- | --- | --- | --- |"]
    order = [client.name for client in pinned()]
    rows = dict(kept) | {result.client.name: _row(result, date) for result in results}
    lines += sorted(rows.values(), key=lambda row: order.index(_name_of(row)) if _name_of(row) in order else len(order))
    return "\n".join([*lines, ""])


def _row(result: Result, date: str) -> str:
    called = ", ".join(name for name in result.calls if name != "script") or "nothing"
    return f"| {result.client.name} | {result.client.version} | {called} | {result.verdict} | {date} |"


def _name_of(row: str) -> str:
    return row.split("|")[1].strip()


def rows_of(text: str) -> list[tuple[str, str, str]]:
    """Client, version and result of each row of the page."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    return [(cells[0], cells[1], cells[3]) for cells in rows[2:]]


def lines_of(text: str) -> dict[str, str]:
    """The line of each client of a page."""
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return {_name_of(line): line for line in rows}


def failures_of(text: str) -> dict[str, list[str]]:
    """The failing calls of each client of a page."""
    results = {name: result for name, _, result in rows_of(text)}
    return {name: result.removeprefix("fails: ").split(", ") for name, result in results.items() if "fails: " in result}


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="FOLDER", help="only these; the page keeps the rows of others")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="the table (default: %(default)s)")
    parser.add_argument("--known", type=Path, metavar="PAGE", help="a table: what fails there may fail")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "clients", metavar="DIR")
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="be done with all clients after that many seconds"
    )
    parser.add_argument("--lock", action="store_true", help="install what the index has today, and write the locks")
    parser.add_argument("--url", help="a server that runs already, in place of one of its own")
    parser.add_argument("--embed-url", metavar="URL", help="another one, for embeddings")
    options = parser.parse_args()
    cache: Path = options.cache.resolve()
    clients = [client for client in pinned() if not options.names or client.folder in options.names]
    if unknown := set(options.names) - {client.folder for client in clients}:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    known = failures_of(options.known.read_text()) if options.known else {}
    if options.time_limit is not None:  # whom it leaves out is another one every day
        clients = order_of(clients, datetime.now(UTC).toordinal())
    begun = time.monotonic()
    deadline = NEVER if options.time_limit is None else Deadline(begun + options.time_limit)
    cache.mkdir(parents=True, exist_ok=True)
    with ExitStack() as until_end, ThreadPoolExecutor(NUM_AT_ONCE) as workers:
        urls = {client.generates_on: options.url for client in clients}
        if any(client.has_embeddings for client in clients):
            urls[EMBED] = options.embed_url
        servers = Servers(cache, until_end, urls)

        def result_of(client: Client) -> Result:
            return _result(client, cache, servers, is_locked=not options.lock, deadline=deadline)

        results = list(workers.map(result_of, clients))
    kept = lines_of(options.page.read_text()) if options.names and options.page.exists() else {}
    options.page.write_text(page(results, datetime.now(UTC).date().isoformat(), kept))
    say(f"The table is {options.page}")
    num_works = sum(result.verdict == "works" for result in results)
    left_out = [result for result in results if result.not_run is not None]
    for result in left_out:
        say(f"NOT RUN {result.client.name}: {result.not_run}")
    new = [
        f"{result.client.name}: {name}"
        for result in results
        for name in result.failures
        if name not in known.get(result.client.name, ())
    ]
    for each in new if known else ():
        say(f"NEW FAILURE {each}")
    names = f" ({', '.join(result.client.name for result in left_out)})" if left_out else ""
    took = f"in {time.monotonic() - begun:.0f} s"
    say(f"{num_works} of {len(results)} clients work, {len(left_out)} NOT RUN{names}, {took}")
    return 1 if new else 0


def _result(client: Client, cache: Path, servers: Servers, *, is_locked: bool, deadline: Deadline) -> Result:
    """Install a client and make its calls, and say so."""
    if deadline.is_over():
        return Result(client, {}, not_run=OUT_OF_TIME)
    begun = time.monotonic()
    why = prepare(client, cache, is_locked=is_locked, deadline=deadline)
    installed_s = time.monotonic() - begun
    if why is not None:
        return Result(client, {}, not_run=why)
    try:
        urls = {"HALLMARK_URL": servers.url(client.generates_on, deadline)}
        if client.has_embeddings:
            urls["HALLMARK_EMBED_URL"] = servers.url(EMBED, deadline)
    except RuntimeError:
        if deadline.is_over():
            return Result(client, {}, not_run=OUT_OF_TIME)
        raise
    result = call(client, command_of(client, cache), cache / client.folder, urls, deadline)
    if result.not_run is not None:
        return result
    took = f"installed in {installed_s:.0f} s, {len(result.calls)} calls in {result.seconds:.0f} s"
    say(f"{client.name} {client.version}: {result.verdict} ({took})")
    for name, why in result.failures.items():
        say(f"  {name}: {why}")
    return result


if __name__ == "__main__":
    sys.exit(main())
