"""Try two replicas on this machine: kill some, update them, and measure what Ray's proxy adds.

    make test-ray                                   an environment of its own, then this
    python deploy/ray/trial.py --out FILE --quick   one kill of each kind

Writes what happened as JSON. The exit status is 1 where a request was lost: a non-streamed one without a 200, a stream
that neither ended nor has an error event, or, in an update or a shutdown, one that did not end.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[0] = str(ROOT)

import httpx2  # noqa: E402
import psutil  # noqa: E402
import yaml  # noqa: E402

LONG = {"max_tokens": 250, "ignore_eos": True}  # some seconds
SHORT = {"max_tokens": 16, "ignore_eos": True}
LIMIT_S = 600.0
CACHE = ROOT / ".cache" / "ray-evidence"  # what replicas prove at their first start


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@dataclass
class Tally:
    """Outcomes of the requests of one phase."""

    plain: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    slowest_plain_s: float = 0.0
    examples: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if len(self.examples) < 2:
            self.examples.append(text[:400])

    def report(self) -> dict[str, Any]:
        return {
            "not_streamed": dict(self.plain),
            "streams": dict(self.streams),
            "slowest_not_streamed_s": round(self.slowest_plain_s, 2),
            "examples": self.examples,
        }

    @property
    def num_lost(self) -> int:
        """Non-streamed requests without an answer, and streams without an end."""
        kept = self.streams["done"] + self.streams["error event"]
        return self.plain.total() - self.plain["200"] + self.streams.total() - kept


class Load:
    """Paced short requests and some long streams, until it is stopped."""

    def __init__(self, url: str, *, per_s: float, num_streams: int) -> None:
        self.tally = Tally()
        self._url = url
        self._per_s = per_s
        self._num_streams = num_streams
        self._is_over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serial = 0
        self.num_open = 0  # streams that have begun and not ended

    def end(self) -> None:
        """Begin nothing more; what runs goes on."""
        self._is_over.set()

    async def begun(self, num_streams: int) -> None:
        """Return when so many streams are in their middle."""
        due = time.monotonic() + LIMIT_S
        while self.num_open < num_streams and time.monotonic() < due:
            await asyncio.sleep(0.02)

    async def __aenter__(self) -> "Load":
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=0
        )  # a new connection each: no pool's retry
        self._client = httpx2.AsyncClient(timeout=LIMIT_S, limits=limits)
        self._start(self._pace())
        for _ in range(self._num_streams):
            self._start(self._stream_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._client.aclose()

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pace(self) -> None:
        while not self._is_over.is_set():
            self._start(self._plain())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), 1 / self._per_s)

    async def _stream_on(self) -> None:
        while not self._is_over.is_set():
            await self._stream()

    def _body(self, **fields: Any) -> dict[str, Any]:
        self._serial += 1
        return {"model": "demo", "prompt": f"Request {self._serial} says", "temperature": 0, **fields}

    async def _plain(self) -> None:
        begun = time.monotonic()
        try:
            answer = await self._client.post(self._url + "/v1/completions", json=self._body(**SHORT))
            kind = str(answer.status_code)
            if kind == "200" and answer.json()["usage"]["completion_tokens"] != SHORT["max_tokens"]:
                kind = "not whole"
            if kind != "200":
                self.tally.note(f"{kind}: {answer.text}")
        except httpx2.HTTPError as error:
            kind = type(error).__name__
            self.tally.note(kind)
        self.tally.plain[kind] += 1
        self.tally.slowest_plain_s = max(self.tally.slowest_plain_s, time.monotonic() - begun)

    async def _stream(self) -> None:
        kind, last = "torn", ""
        body = self._body(**LONG, stream=True)
        try:
            async with self._client.stream("POST", self._url + "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    kind = str(answer.status_code)
                    self.tally.note(f"stream {kind}: {(await answer.aread()).decode()}")
                else:
                    has_error = False
                    async for line in answer.aiter_lines():
                        self.num_open += not last
                        has_error = has_error or line.startswith('data: {"error"')
                        last = line or last
                        if line.startswith('data: {"error"'):
                            self.tally.note(line)
                    if last == "data: [DONE]":
                        kind = "error event" if has_error else "done"
        except httpx2.HTTPError as error:
            self.tally.note(f"stream: {type(error).__name__}")
        self.num_open -= bool(last)
        self.tally.streams[kind] += 1


class Fleet:
    """Ray with replicas, started by up.py."""

    def __init__(self, folder: Path, port: int, **deployment: Any) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._folder = folder
        self._deployment = deployment
        self._log = folder / "up.log"
        self.dashboard = ""

    def write(self, name: str, *, settings: dict[str, Any] | None = None, **deployment: Any) -> Path:
        config = yaml.safe_load((HERE / "hallmark.yaml").read_text())
        config["http_options"]["port"] = self._port
        (application,) = config["applications"]
        application["args"]["settings"] |= {"cache_dir": str(CACHE), **(settings or {})}
        (only,) = application["deployments"]
        del only["autoscaling_config"]
        only |= {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0}, **self._deployment, **deployment}
        if "autoscaling_config" in only:
            del only["num_replicas"]
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def start(self, path: Path) -> float:
        """Return the seconds until up.py says that it runs."""
        begun = time.monotonic()
        with self._log.open("wb") as log:
            command = [sys.executable, str(HERE / "up.py"), str(path)]
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self._wait(lambda: ": running;" in self._log.read_text(errors="replace"), "the replicas")
        self.dashboard = self._log.read_text().split("says more, ")[1].split()[0]
        return time.monotonic() - begun

    def update(self, path: Path) -> float:
        """Return the seconds until what the YAML says is running."""
        begun = time.monotonic()
        command = [sys.executable, str(HERE / "up.py"), "--address", self.dashboard, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the update failed: {done.stdout} {done.stderr}")
        return time.monotonic() - begun

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        due = time.monotonic() + LIMIT_S
        while not is_so():
            if self._process.poll() is not None or time.monotonic() > due:
                raise SystemExit(f"no {what}:\n{self._log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)

    def replicas(self) -> list[psutil.Process]:
        family = psutil.Process(self._process.pid).children(recursive=True)
        found = [each.parent() for each in family if _is_engine(each)]
        return [each for each in found if each is not None]

    def engine_of(self, replica: psutil.Process) -> psutil.Process:
        (engine,) = [each for each in replica.children(recursive=True) if _is_engine(each)]
        return engine

    def kill(self, process: psutil.Process) -> float:
        """Kill it with -9; return the seconds until both replicas have an engine that is another."""
        before = {self.engine_of(each).pid for each in self.replicas()}
        begun = time.monotonic()
        process.send_signal(signal.SIGKILL)
        self._wait(lambda: self._are_new(before), "second replica")
        return time.monotonic() - begun

    def _are_new(self, before: set[int]) -> bool:
        try:
            now = {self.engine_of(each).pid for each in self.replicas()}
            return len(now) == 2 and len(now & before) == 1
        except (psutil.NoSuchProcess, ValueError):
            return False

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        self.terminate()
        try:
            return self._process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            for each in psutil.Process(self._process.pid).children(recursive=True):
                each.kill()
            self._process.kill()
            return self._process.wait()


def _is_engine(process: psutil.Process) -> bool:
    try:
        return "server.engine.process" in process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


@contextmanager
def direct_server(folder: Path) -> Iterator[str]:
    """`hallmark serve` beside it, for comparison."""
    port = free_port()
    command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), "--cache-dir", str(CACHE)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "direct.log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        due = time.monotonic() + LIMIT_S
        while True:
            try:
                if httpx2.get(url + "/readyz").status_code == 200:
                    break
            except httpx2.HTTPError:
                pass
            if process.poll() is not None or time.monotonic() > due:
                raise SystemExit("the direct server did not start")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


# ---- what the proxy adds


async def _one(client: httpx2.AsyncClient, url: str, serial: int) -> tuple[float, float, list[float]]:
    """Time to the first token, in all, and between tokens; in ms."""
    body = {"model": "demo", "prompt": f"Number {serial} is", "stream": True, "temperature": 0, **SHORT}
    begun = time.perf_counter()
    stamps = []
    async with client.stream("POST", url + "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                stamps.append(time.perf_counter())
    gaps = [1000 * (after - before) for before, after in pairwise(stamps)]
    return 1000 * (stamps[0] - begun), 1000 * (time.perf_counter() - begun), gaps


async def _rate(url: str, num_clients: int, seconds: float) -> float:
    """Non-streamed requests of 16 tokens a second, closed loop."""
    num_done = 0
    due = time.monotonic() + seconds

    async def ask(client: httpx2.AsyncClient, number: int) -> None:
        nonlocal num_done
        serial = 0
        while time.monotonic() < due:
            serial += 1
            body = {"model": "demo", "prompt": f"{number} {serial} says", "temperature": 0, **SHORT}
            (await client.post(url + "/v1/completions", json=body)).raise_for_status()
            num_done += 1

    async with httpx2.AsyncClient(timeout=LIMIT_S) as client:
        begun = time.monotonic()
        await asyncio.gather(*(ask(client, number) for number in range(num_clients)))
        return num_done / (time.monotonic() - begun)


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 2),
        "p10": round(ordered[len(ordered) // 10], 2),
        "p90": round(ordered[len(ordered) * 9 // 10], 2),
        "n": len(ordered),
    }


async def measure(urls: dict[str, str], num_requests: int, seconds: float) -> dict[str, Any]:
    """Measure both URLs in turns, so that other work of the machine meets both."""
    found: dict[str, dict[str, list[float]]] = {name: {"ttft": [], "total": [], "gap": [], "rate": []} for name in urls}
    async with httpx2.AsyncClient(timeout=LIMIT_S) as client:
        for serial in range(num_requests + 5):
            for name, url in urls.items():
                ttft, total, gaps = await _one(client, url, serial)
                if serial >= 5:  # those before open the connection
                    found[name]["ttft"].append(ttft)
                    found[name]["total"].append(total)
                    found[name]["gap"] += gaps
    for _ in range(3):
        for name, url in urls.items():
            found[name]["rate"].append(await _rate(url, 8, seconds))
    return {
        name: {
            "ttft_ms": _spread(each["ttft"]),
            "total_of_16_tokens_ms": _spread(each["total"]),
            "between_tokens_ms": _spread(each["gap"]),
            "requests_per_s_of_8_clients": [round(rate, 1) for rate in each["rate"]],
        }
        for name, each in found.items()
    }


# ---- affinity


async def converse(url: str, num_sessions: int, num_turns: int, *, is_affine: bool) -> dict[str, Any]:
    """Conversations of several turns; without affinity each request says that it is a session of its own."""
    served: dict[int, set[str]] = {number: set() for number in range(num_sessions)}
    num_cached = num_prompt = serial = 0
    async with httpx2.AsyncClient(timeout=LIMIT_S) as client:
        turns: dict[int, list[dict[str, str]]] = {number: [] for number in range(num_sessions)}
        for turn in range(num_turns):
            for number, messages in turns.items():
                serial += 1
                text = f"Conversation {number} {is_affine}, turn {turn}: " + "we speak of many things. " * 8
                messages.append({"role": "user", "content": text})
                body = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0}
                headers = {} if is_affine else {"x-session-id": f"{is_affine}-{serial}"}
                answer = await client.post(url + "/v1/chat/completions", json=body, headers=headers)
                answer.raise_for_status()
                served[number].add(answer.headers["x-hallmark-replica"])
                usage = answer.json()["usage"]
                num_cached += usage["prompt_tokens_details"]["cached_tokens"]
                num_prompt += usage["prompt_tokens"]
                messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    return {
        "conversations": num_sessions,
        "turns": num_turns,
        "on_one_replica": sum(len(each) == 1 for each in served.values()),
        "cached_share_of_prompt_tokens": round(num_cached / num_prompt, 3),
    }


# ---- what a connection may do

_BODY = b'{"model":"demo","prompt":"a","max_tokens":2}'
_POST = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
_LENGTH = b"Content-Length: %d\r\n\r\n" % len(_BODY)
_HOST = b"Host: localhost\r\n"
CASES: dict[str, tuple[bytes, bool]] = {  # what is sent, and whether the sender then closes its side
    "a plain request": (_POST + _HOST + _LENGTH + _BODY, False),
    "a Host of another name": (_POST + b"Host: evil.example\r\n" + _LENGTH + _BODY, False),
    "no Host": (_POST + _LENGTH + _BODY, False),
    "two Hosts": (_POST + _HOST + b"Host: other\r\n" + _LENGTH + _BODY, False),
    "a chunked body with a trailer": (
        _POST + _HOST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(_BODY) + _BODY + b"\r\n0\r\nX-A: b\r\n\r\n",
        False,
    ),
    "closed after the request": (_POST + _HOST + _LENGTH + _BODY, True),
    "a body that its header says is too large": (_POST + _HOST + b"Content-Length: 99999999\r\n\r\n{", False),
    "101 headers": (_POST + _HOST + b"".join(b"X-%d: a\r\n" % i for i in range(101)) + _LENGTH + _BODY, False),
    "a header of 100 KB": (_POST + _HOST + b"X-A: " + b"a" * 100_000 + b"\r\n" + _LENGTH + _BODY, False),
    "no HTTP": (b"hello\r\n\r\n", False),
    "a websocket": (
        b"GET /v1/completions HTTP/1.1\r\n" + _HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        False,
    ),
    "headers that never end": (_POST + _HOST, False),
}


def connection_case(url: str, sent: bytes, *, is_half_closed: bool) -> str:
    """The status, with the error's code, or how the connection ends; within 20 s."""
    address = httpx2.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=20) as sock:
        got = b""
        try:
            sock.sendall(sent)
            if is_half_closed:
                sock.shutdown(socket.SHUT_WR)
            while not got:
                part = sock.recv(65536)
                if not part:
                    return "closed unanswered"
                got = part.partition(b"\r\n\r\n")[2] if part.startswith(b"HTTP/1.1 100") else part
            sock.settimeout(1)
            with suppress(TimeoutError):
                while part := sock.recv(65536):
                    got += part
        except TimeoutError:
            return "open after 20 s"
        except OSError as error:
            return f"connection ended: {type(error).__name__}"
    code = got.split(b'"code":"')[1].split(b'"')[0].decode() if b'"code":"' in got else ""
    return f"{got.split(b' ', 2)[1].decode()} {code}".strip()


# ---- the trial

PHASES = ("connections", "speed", "affinity", "kill_engine", "kill_replica", "update", "scale", "shutdown")


def say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", flush=True)


def machine() -> dict[str, Any]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    packages = ("ray", "hallmark-serve", "torch", "fastapi", "starlette", "uvicorn", "httptools", "uvloop")
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


async def kill_some(fleet: Fleet, what: str, num_kills: int) -> dict[str, Any]:
    recovered = []
    async with Load(fleet.url, per_s=8, num_streams=6) as load:
        for number in range(num_kills):
            await load.begun(5)  # so that both replicas have some, most likely
            replicas = sorted(fleet.replicas(), key=psutil.Process.create_time)
            target = fleet.engine_of(replicas[number % 2]) if what == "engine" else replicas[0]
            recovered.append(round(await asyncio.to_thread(fleet.kill, target), 1))
            await asyncio.sleep(10)  # until the new one serves
    return {"kills": num_kills, "new_process_after_s": recovered, **load.tally.report(), "lost": load.tally.num_lost}


async def update(fleet: Fleet, path: Path) -> dict[str, Any]:
    async with Load(fleet.url, per_s=8, num_streams=6) as load:
        await load.begun(5)
        seconds = await asyncio.to_thread(fleet.update, path)
        await asyncio.sleep(3)
    lost = load.tally.num_lost + load.tally.streams["error event"]  # an update has no right to one
    return {"seconds": round(seconds, 1), **load.tally.report(), "lost": lost}


async def scale(fleet: Fleet) -> dict[str, Any]:
    """More streams than one replica is meant to have: from one replica to two, and back."""

    async def wait_for(num_replicas: int) -> float:
        begun = time.monotonic()
        while len(fleet.replicas()) != num_replicas and time.monotonic() - begun < LIMIT_S:
            await asyncio.sleep(0.2)
        return time.monotonic() - begun

    await wait_for(1)
    async with Load(fleet.url, per_s=1, num_streams=8) as load:
        second_after_s = await wait_for(2)
        await asyncio.sleep(5)
    gone_after_s = await wait_for(1)
    return {
        "replicas": "1, then 2 under load, then 1",
        "second_replica_after_s": round(second_after_s, 1),
        "gone_after_s": round(gone_after_s, 1),
        **load.tally.report(),
        "lost": load.tally.num_lost + load.tally.streams["error event"] + (len(fleet.replicas()) != 1),
    }


async def shut_down(fleet: Fleet) -> dict[str, Any]:
    """SIGTERM while streams run: they end by themselves."""
    load = Load(fleet.url, per_s=0.001, num_streams=4)
    async with load:
        await load.begun(4)
        load.end()
        fleet.terminate()
    return {**load.tally.report(), "lost": load.tally.streams.total() - load.tally.streams["done"]}


def bad_input(folder: Path) -> dict[str, Any]:
    """Start with each bad input; return its exit code and what it printed."""
    text = (HERE / "hallmark.yaml").read_text()
    changes = {
        "an unknown setting": ("admin_port: 0", "max_num_seq: 3"),
        "a value of a wrong type": ("device: cpu", "max_num_seqs: many"),
        "an unknown entry of Ray's": ("target_ongoing_requests", "target_ongoing_request"),
        "a setting that is Ray's": ("device: cpu", "port: 8001"),
        "one admin port for all": ("admin_port: 0", "admin_port: 9000"),
        "two GPUs for one rank": ("num_cpus: 0.5", "num_gpus: 2"),
    }
    found = {}
    for name, (before, after) in changes.items():
        path = folder / "bad.yaml"
        path.write_text(text.replace(before, after))
        done = subprocess.run(
            [sys.executable, str(HERE / "up.py"), str(path)], capture_output=True, text=True, check=False
        )
        found[name] = {"exit_code": done.returncode, "printed": (done.stdout + done.stderr).replace(f"{folder}/", "")}
    return found


AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 3,
    "upscale_delay_s": 1,
    "downscale_delay_s": 3,
    "look_back_period_s": 3,
    "metrics_interval_s": 1,
}


class Trial:
    """The phases, each written to the file when it is done."""

    def __init__(self, out: Path, only: Sequence[str], folder: Path, *, is_quick: bool) -> None:
        self._out = out
        self._only = only
        self._folder = folder
        self._is_quick = is_quick
        self._fleet = Fleet(folder, free_port())
        self._found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        self._found = {name: self._found[name] for name in ("machine", "bad_input", *PHASES) if name in self._found}
        self.lost: dict[str, int] = {}

    def run(self) -> None:
        self._put("machine", machine())
        self._put("bad_input", bad_input(self._folder))
        self.lost["bad_input"] = sum(
            each["exit_code"] != 2 or each["printed"].count("\n") != 1 for each in self._found["bad_input"].values()
        )
        fleet = self._fleet
        try:
            say(f"two replicas after {fleet.start(fleet.write('first')):.1f} s")
            if {"connections", "speed"} & set(self._only):
                with direct_server(self._folder) as direct:
                    self._beside({"direct": direct, "ray": fleet.url})
            if "affinity" in self._only:
                kinds = ("by_prefix", "none")
                found = {kind: asyncio.run(converse(fleet.url, 8, 5, is_affine=kind != "none")) for kind in kinds}
                self._put("affinity", found)
            num_kills = 1 if self._is_quick else 3
            for what in ("engine", "replica"):
                self._phase(f"kill_{what}", lambda what=what: kill_some(fleet, what, num_kills))
            self._phase("update", lambda: update(fleet, fleet.write("second", settings={"max_num_seqs": 12})))
            if "scale" in self._only:
                fleet.update(fleet.write("third", settings={"max_num_seqs": 12}, autoscaling_config=AUTOSCALING))
            self._phase("scale", lambda: scale(fleet))
            self._phase("shutdown", lambda: shut_down(fleet))
        finally:
            if fleet.stop() != 0:
                self.lost["up.py"] = 1

    def _beside(self, urls: dict[str, str]) -> None:
        if "connections" in self._only:
            cases = CASES.items()
            found = {
                case: {name: connection_case(url, sent, is_half_closed=half) for name, url in urls.items()}
                for case, (sent, half) in cases
            }
            self._put("connections", found)
        if "speed" in self._only:
            loads = [round(each, 2) for each in os.getloadavg()]
            found = asyncio.run(measure(urls, 10 if self._is_quick else 60, 8.0))
            self._put("speed", {"machine": machine(), "load_average_before": loads, **found})

    def _phase(self, name: str, run: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> None:
        if name in self._only:
            found = asyncio.run(run())
            self.lost[name] = found["lost"]
            self._put(name, found)

    def _put(self, name: str, found: dict[str, Any]) -> None:
        self._found[name] = found | {"date": f"{datetime.now(UTC):%Y-%m-%d}"} if name in PHASES else found
        say(f"{name}: {json.dumps(found)}")
        self._out.write_text(json.dumps(self._found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--only", nargs="+", choices=PHASES, default=PHASES, help="the file keeps what it has of others"
    )
    parser.add_argument("--quick", action="store_true", help="one kill of each kind, and few requests for speed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ray-trial-") as name:
        trial = Trial(options.out, options.only, Path(name), is_quick=options.quick)
        trial.run()
    say(f"lost: {trial.lost}; written to {options.out}")
    return 1 if any(trial.lost.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
