"""Thousands of short mixed requests, and what the server keeps of them: memory, file descriptors, threads, pages.

python trials/soak.py --requests 20000 --out docs/benchmarks/soak-cpu.json -- --device cpu

Starts `hallmark serve` with the flags behind `--`, or asks the server at `--url`; `--pid` is then its API process:
without it only what the server tells is looked at. Exits with 1 when something grew by more than its bound per 1,000
requests after the warm-up, when pages stay in use, or when any answer was not the one that its request deserves.
"""

import argparse
import asyncio
import json
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
from ready import wait_ready
from soak_requests import Job, Traffic, answer_to

from server.cli.main import version

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 1800.0  # a first start proves every shape
IDLE_TIMEOUT_S = 60.0
MIB = 2**20
# By how much each number may grow per 1,000 requests. A leak of 256 bytes a request is seen; the allocators of two
# Python processes wander by some 0.1 MiB. Where a number is absent (no GPU, no --pid) there is nothing to fit.
BOUNDS = {
    "api_rss_mib": 0.25,
    "engine_rss_mib": 0.25,
    "gpu_used_mib": 1.0,
    "api_fds": 0.2,
    "engine_fds": 0.2,
    "api_threads": 0.2,
    "engine_threads": 0.2,
    "series": 0.2,
}
GAUGES = ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "oldest_inflight_seconds")
COUNTERS = ("engine_restarts_total", "gpu_oom_total", "nonfinite_logits_total", "preemptions_total")


def processes_of(pid: int | None) -> dict[str, int]:
    """The API process and its engine, by name; empty without a pid."""
    if pid is None:
        return {}
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):
            if "server.engine.process" in child.cmdline():
                return {"api": pid, "engine": child.pid}
    raise SystemExit(f"process {pid} has no engine; is it `hallmark serve`?")


def numbers_of(name: str, pid: int) -> dict[str, float]:
    """Memory that is not a mapped file's, open files and threads of a process."""
    process = psutil.Process(pid)
    memory = process.memory_info()
    return {
        f"{name}_rss_mib": round((memory.rss - memory.shared) / 2**20, 3),
        f"{name}_fds": process.num_fds(),
        f"{name}_threads": process.num_threads(),
    }


def gpu_used_mib() -> dict[str, float]:
    """Return the memory in use of all GPUs by the driver's count, empty without one; the server's metrics are peaks."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return {} if found.returncode else {"gpu_used_mib": sum(map(float, found.stdout.split()))}


async def metrics_of(client: httpx2.AsyncClient, url: str) -> dict[str, float]:
    """Sums over labels of what the server says of itself, and how many series it has."""
    sums: defaultdict[str, float] = defaultdict(float)
    for line in (await client.get(f"{url}/metrics")).raise_for_status().text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            sums["series"] += 1
            family = name.partition("{")[0].removeprefix("hallmark_")
            if family in GAUGES or family in COUNTERS or family == "peak_temporary_bytes":
                sums[family] += float(value)
    return dict(sums)


class Soak:
    """One run: sends the traffic, and takes a sample whenever some requests more have ended."""

    def __init__(self, arguments: argparse.Namespace, url: str, processes: dict[str, int]) -> None:
        self.samples: list[dict[str, float]] = []
        self.answers: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self._arguments = arguments
        self._url = url
        self._metrics_url = arguments.metrics_url or url
        self._processes = processes
        self._num_ended = 0
        self._began_at = time.monotonic()

    async def run(self) -> None:
        headers = {"authorization": f"Bearer {self._arguments.api_key}"}
        async with httpx2.AsyncClient(timeout=30, headers=headers) as watcher:
            traffic = await Traffic.of(watcher, self._url, random.Random(self._arguments.seed))
            await self._sample(watcher)
            while self._num_ended < self._arguments.requests:
                size = min(self._arguments.sample_every, self._arguments.requests - self._num_ended)
                jobs = iter([traffic.next() for _ in range(size)])
                # A client for each round: the connections that it kept would be counted as the server's files.
                async with httpx2.AsyncClient(timeout=120, headers=headers) as client:
                    await asyncio.gather(*(self._work(client, jobs) for _ in range(self._arguments.concurrency)))
                self._num_ended += size
                await self._wait_idle(watcher)
                await self._sample(watcher)

    async def _work(self, client: httpx2.AsyncClient, jobs: Iterator[Job]) -> None:
        for job in jobs:
            found = await answer_to(client, self._url, job)
            self.answers[job.kind] += 1
            if found != job.wanted:
                self.wrong[f"{job.kind}: {found} instead of {job.wanted}"] += 1

    async def _wait_idle(self, watcher: httpx2.AsyncClient) -> None:
        """Wait until nothing runs; what is not over after IDLE_TIMEOUT_S is in the sample."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while time.monotonic() < deadline:
            now = await metrics_of(watcher, self._metrics_url)
            if not any(now[gauge] for gauge in GAUGES):
                return
            await asyncio.sleep(0.1)

    async def _sample(self, watcher: httpx2.AsyncClient) -> None:
        sample: dict[str, float] = {
            "requests": self._num_ended,
            "at_s": round(time.monotonic() - self._began_at, 1),
            **await metrics_of(watcher, self._metrics_url),
            **gpu_used_mib(),
        }
        for name, pid in self._processes.items():
            sample |= numbers_of(name, pid)
        self.samples.append(sample)
        print(json.dumps(sample), file=sys.stderr, flush=True)


def growth(samples: Sequence[dict[str, float]], name: str) -> float:
    """Per 1,000 requests: the median slope of all pairs of samples (Theil and Sen), which one jump does not turn."""
    points = [(sample["requests"], sample[name]) for sample in samples]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :]]
    return 1000 * statistics.median(slopes)


def verdict(samples: Sequence[dict[str, float]], wrong: Mapping[str, int], warm_up: int) -> dict[str, Any]:
    """Growth beside its bounds, and every reason to fail."""
    first, last = samples[0], samples[-1]
    steady = [sample for sample in samples if sample["requests"] >= warm_up]
    found = {name: round(growth(steady, name), 4) for name in BOUNDS if name in last}
    reasons = [
        f"{name} grew by {slope:g} per 1,000 requests, the bound is {BOUNDS[name]:g}"
        for name, slope in found.items()
        if slope > BOUNDS[name]
    ]
    reasons += [
        f"{name} is {last[name]:g} at the end, it was {first[name]:g}" for name in GAUGES if last[name] > first[name]
    ]
    for name in ("engine_restarts_total", "gpu_oom_total", "nonfinite_logits_total"):
        if last[name] > first[name]:
            reasons.append(f"{name} went from {first[name]:g} to {last[name]:g}")
    reasons += [f"{count} x {what}" for what, count in sorted(wrong.items())]
    return {"growth_per_1000_requests": found, "bounds": BOUNDS, "failed": reasons, "passed": not reasons}


@asynccontextmanager
async def serving(arguments: argparse.Namespace) -> AsyncIterator[tuple[str, int | None]]:
    """The server's address and its pid; ended afterwards, if it was started here."""
    if arguments.url:
        yield arguments.url.rstrip("/"), arguments.pid
        return
    with tempfile.NamedTemporaryFile(prefix="soak-", suffix=".log", delete=False) as log:
        url = f"http://127.0.0.1:{arguments.port}"
        program = [sys.executable, "-m", "server.cli", "serve", "--port", str(arguments.port), *arguments.flags]
        process = subprocess.Popen(program, cwd=ROOT, stdout=log, stderr=log)
    print(f"the server's log is {log.name}", file=sys.stderr)
    try:
        wait_ready(process, url, Path(log.name), START_TIMEOUT_S)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    async with serving(arguments) as (url, pid):
        began_at = time.time()
        soak = Soak(arguments, url, processes_of(pid))
        await soak.run()
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {arguments.api_key}"}) as client:
            fingerprint = (await client.get(f"{arguments.metrics_url or url}/version")).json()["fingerprint"]
    warm_up = arguments.requests // 4 if arguments.warm_up is None else arguments.warm_up
    return {
        "schema": 1,
        "command": " ".join(["python", *sys.argv]),
        "version": version(),
        "python": platform.python_version(),
        "fingerprint": fingerprint,
        "began_at": round(began_at),
        "requests": arguments.requests,
        "warm_up": warm_up,
        "answers": dict(sorted(soak.answers.items())),
        **verdict(soak.samples, soak.wrong, warm_up),
        "samples": soak.samples,
    }


def text_of(result: dict[str, Any]) -> str:
    """JSON with a sample a line."""
    head = json.dumps({name: value for name, value in result.items() if name != "samples"}, indent=1)
    samples = ",\n  ".join(map(json.dumps, result["samples"]))
    return f'{head[:-2]},\n "samples": [\n  {samples}\n ]\n}}\n'


def parse(argv: list[str]) -> argparse.Namespace:
    own, flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, what in (
        ("requests", 20_000, "to send in all"),
        ("concurrency", 16, "requests at once"),
        ("sample-every", 250, "requests between two samples"),
        ("warm-up", None, "requests that the fit leaves out (default: a quarter)"),
        ("port", 18611, "of the server that is started"),
        ("pid", None, "with --url: its API process on this machine"),
        ("seed", 0, "of the traffic"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    parser.add_argument("--url", help="a running server; none is started")
    parser.add_argument("--metrics-url", help="its admin port, where it has one")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--out", type=Path, help="JSON file (default: standard output)")
    return parser.parse_args(own, argparse.Namespace(flags=flags))


def main() -> int:
    arguments = parse(sys.argv[1:])
    result = asyncio.run(measure(arguments))
    if arguments.out:
        arguments.out.write_text(text_of(result))
    else:
        print(text_of(result), end="")
    print("\n".join(result["failed"]) or "passed", file=sys.stderr)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
