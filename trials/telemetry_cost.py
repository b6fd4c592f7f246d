"""Cost of telemetry: tokens a second with everything on (traces to a collector, JSON logs, scrapes) beside
a server without metrics, traces and scrapes; rounds in turn, on one machine, in one run.

python trials/telemetry_cost.py --rounds 6 --streams 64 --tokens 128 -- [flags of hallmark serve]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
from ready import wait_ready

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
PORTS = {"on": 18601, "off": 18602}
ADMIN_PORT, SINK_PORT = 18603, 18604
SCRAPE_EVERY_S = 5  # three times as often as Prometheus does by default


class Nothing:
    """Takes every call and does nothing."""

    loop_seen_at = float("inf")

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0.0


def serve_silently(flags: list[str]) -> int:
    """`hallmark serve` whose metrics are no-ops."""
    from server.cli import main as cli
    from server.telemetry.metrics import Metrics

    class Silent(Metrics):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.latency = self.slo = self.attention = self.engine = self.traffic = Nothing()  # type: ignore[assignment]

    cli.Metrics = Silent  # type: ignore[misc]
    return cli.main(["serve", *flags])


def sink() -> None:
    """A collector that takes everything."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    ThreadingHTTPServer((HOST, SINK_PORT), Handler).serve_forever()


async def one(port: int, request: bytes) -> int:
    """Events of one stream."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(request)
    body = await reader.read()
    writer.close()
    return body.count(b"data: ") - 1  # the last is [DONE]


def work(port: int, num_streams: int, num_tokens: int, done: "multiprocessing.Queue[int]") -> None:
    fields = {"prompt": list(range(40, 104)), "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    request = head.encode() + b"Content-Type: application/json\r\n\r\n" + body

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*(one(port, request) for _ in range(num_streams))))

    done.put(asyncio.run(all_of_them()))


def load(port: int, arguments: argparse.Namespace) -> float:
    """Tokens a second."""
    done: multiprocessing.Queue[int] = multiprocessing.Queue()
    share = arguments.streams // arguments.processes
    workers = [
        multiprocessing.Process(target=work, args=(port, share, arguments.tokens, done))
        for _ in range(arguments.processes)
    ]
    began_at = time.perf_counter()
    for worker in workers:
        worker.start()
    assert all(done.get() > 0 for _ in workers)
    took_s = time.perf_counter() - began_at
    for worker in workers:
        worker.join()
    return share * arguments.processes * arguments.tokens / took_s


def cpu_s(pid: int) -> float:
    """Processor time of the API process so far (not of the engine's)."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def scrape_for_ever(times_ms: list[float]) -> None:
    request = urllib.request.Request(
        f"http://{HOST}:{ADMIN_PORT}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )
    while True:
        began_at = time.perf_counter()
        try:
            urllib.request.urlopen(request, timeout=5).read()
        except (urllib.error.URLError, OSError):  # the server has ended
            return
        times_ms.append((time.perf_counter() - began_at) * 1000)
        time.sleep(SCRAPE_EVERY_S)


def url_of(name: str) -> str:
    return f"http://{HOST}:{PORTS[name]}"


def log_file(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"telemetry-cost-{name}.log"


def measure(servers: dict[str, subprocess.Popen[bytes]], arguments: argparse.Namespace) -> dict[str, Any]:
    for name, process in servers.items():
        wait_ready(process, url_of(name), log_file(name))
    scrapes_ms: list[float] = []
    threading.Thread(target=scrape_for_ever, args=(scrapes_ms,), daemon=True).start()
    rates: dict[str, list[float]] = {"on": [], "off": []}
    cpu: dict[str, float] = {"on": 0.0, "off": 0.0}
    for number in range(-1, arguments.rounds):
        for name in ("on", "off") if number % 2 else ("off", "on"):
            before_s = cpu_s(servers[name].pid)
            rate = load(PORTS[name], arguments)
            if number >= 0:  # the first warms up
                rates[name].append(round(rate, 1))
                cpu[name] += cpu_s(servers[name].pid) - before_s
    medians = {name: statistics.median(found) for name, found in rates.items()}
    num_tokens = arguments.rounds * arguments.streams * arguments.tokens
    return {
        "tokens_per_s": rates,
        "median": medians,
        "on_over_off": round(medians["on"] / medians["off"], 4),
        "api_cpu_us_per_token": {name: round(total / num_tokens * 1e6, 2) for name, total in cpu.items()},
        "scrape_ms": {"median": round(statistics.median(scrapes_ms), 1), "max": round(max(scrapes_ms), 1)},
        "streams": arguments.streams,
        "tokens": arguments.tokens,
    }


def main() -> int:
    argv = sys.argv[1:]
    if argv[:1] == ["sink"]:
        sink()
    if argv[:1] == ["off"]:
        return serve_silently(argv[1:])
    own, _, flags = " ".join(argv).partition("-- ")
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rounds", 6), ("streams", 64), ("tokens", 128), ("processes", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--then", help="a command, its parts separated by commas, URL for the server's")
    arguments = parser.parse_args(own.removesuffix("--").split())
    started = [subprocess.Popen([sys.executable, __file__, "sink"])]
    traced = ["--otlp-endpoint", f"http://{HOST}:{SINK_PORT}", "--log-format", "json", "--admin-port", str(ADMIN_PORT)]
    commands = {
        "on": [sys.executable, "-m", "server.cli", "serve", "--port", str(PORTS["on"]), *traced],
        "off": [sys.executable, __file__, "off", "--port", str(PORTS["off"])],
    }
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    servers = {}
    try:
        for name, command in commands.items():
            with log_file(name).open("wb") as log:
                servers[name] = subprocess.Popen([*command, *flags.split()], env=environ, stdout=log, stderr=log)
            started.append(servers[name])
            # One after the other: each measures what memory is free.
            wait_ready(servers[name], url_of(name), log_file(name))
        print(json.dumps(measure(servers, arguments)), flush=True)
        if arguments.then:
            url = f"http://{HOST}:{PORTS['on']}"
            subprocess.run([part.replace("URL", url) for part in arguments.then.split(",")], check=True)
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(timeout=30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
