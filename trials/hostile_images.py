"""Send a server of a small model that sees images hostile image files, and write down what came back.

PYTHONPATH=.:tests:trials python trials/hostile_images.py --cases 5000 --out docs/benchmarks/hostile-images.json

Files are drawn by tests/support/images/hostile.py: truncated, with flipped bytes, headers that claim up to 2**31 pixels
a side, data that unpacks to far more than it is, palettes, 16 bits, CMYK, any EXIF orientation, animations, 1 x 10,000.
Half go to chats, a quarter each to messages and to /tokenize. Beside them `/livez` is asked every 20 ms; all files are
drawn before, so that the time is the server's. The status is 1 for an answer of 5xx, for a refusal that names no part,
for a `/livez` slower than the limit, for an API process that grows beyond the limit, and for an engine that is another
process at the end.
"""

import argparse
import asyncio
import base64
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import psutil
from running_server import ROOT, Server, free_port, running

from support.images.hostile import drawn
from support.models.tiny_images import save_tiny

LIVEZ_EVERY_S = 0.02
SLOWEST_LIVEZ_MS = 100.0  # of 99 in a hundred
LARGEST_MB = 2048.0  # of the API process
CLIENTS = 8


class Results:
    """Answers by kind of file, and what a run is judged by."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.faults: list[str] = []
        self.livez_ms: list[float] = []
        self.largest_mb = 0.0


def request_of(draw: random.Random, file: bytes) -> tuple[str, dict[str, Any]]:
    """Return a route and a body with the image."""
    data = base64.b64encode(file).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]}
    source = {"type": "base64", "media_type": "image/png", "data": data}
    message = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "max_tokens": 1}
    return draw.choice(
        [
            ("/v1/chat/completions", chat | {"max_tokens": 1}),
            ("/v1/chat/completions", chat | {"max_tokens": 1, "stream": True}),
            ("/v1/messages", message),
            ("/tokenize", chat),
        ]
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A request with an image, ready to be sent."""

    kind: str
    path: str
    body: bytes


def case_of(draw: random.Random) -> Case:
    kind, file = drawn(draw)
    path, body = request_of(draw, file)
    return Case(kind, path, json.dumps(body).encode())


async def send(client: httpx2.AsyncClient, case: Case, results: Results) -> None:
    kind = case.kind
    answer = await client.post(case.path, content=case.body, headers={"content-type": "application/json"})
    results.answers[kind, answer.status_code] += 1
    if answer.status_code == 400:
        error = answer.json()["error"]
        if "messages" not in (error.get("param") or error["message"]):
            results.faults.append(f"{kind}: {answer.text[:200]}")
    elif answer.status_code != 200:
        results.faults.append(f"{kind}: {answer.status_code} {answer.text[:200]}")


async def watch(client: httpx2.AsyncClient, process: psutil.Process, results: Results) -> None:
    """Ask for /livez, and how large the API process is, until cancelled."""
    while True:
        began = time.perf_counter()
        await client.get("/livez")
        results.livez_ms.append(1000 * (time.perf_counter() - began))
        results.largest_mb = max(results.largest_mb, process.memory_info().rss / 2**20)
        await asyncio.sleep(LIVEZ_EVERY_S)


async def run(server: Server, cases: Sequence[Case]) -> Results:
    results = Results()
    left = iter(cases)
    timeout = httpx2.Timeout(120)
    async with (
        httpx2.AsyncClient(base_url=server.url, timeout=timeout) as client,
        httpx2.AsyncClient(base_url=server.url, timeout=timeout) as prober,
    ):
        watching = asyncio.create_task(watch(prober, psutil.Process(server.process.pid), results))

        async def sending() -> None:
            for case in left:
                await send(client, case, results)

        await asyncio.gather(*[sending() for _ in range(CLIENTS)])
        watching.cancel()
    return results


def judged(results: Results) -> list[str]:
    """Return what is wrong."""
    found = list(results.faults)
    slow = quantile(results.livez_ms, 0.99)
    if slow > SLOWEST_LIVEZ_MS:
        found.append(f"/livez took {slow:.0f} ms at its 99th percentile, the limit is {SLOWEST_LIVEZ_MS:.0f}")
    if results.largest_mb > LARGEST_MB:
        found.append(f"the API process took {results.largest_mb:.0f} MB, the limit is {LARGEST_MB:.0f}")
    return found


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        model.mkdir()
        save_tiny(model, "qwen3 vl")
        port = free_port()
        options = ["--model", str(model), "--port", str(port), "--cache-dir", str(folder / "cache"), "--device", "cpu"]
        program = [sys.executable, "-m", "server.cli", "serve", *options, "--max-model-len", "4096"]
        draw = random.Random(given.seed)
        cases = [case_of(draw) for _ in range(given.cases)]
        with running(program, port, folder / "log", os.environ) as server:
            server.wait_ready()
            engine = server.engine_pid()
            began = time.monotonic()
            results = asyncio.run(run(server, cases))
            took_s = time.monotonic() - began
            faults = judged(results)
            if server.engine_pid() != engine:
                faults.append("the engine died")
    kinds = sorted({kind for kind, _ in results.answers})
    report = {
        "command": f"python trials/hostile_images.py --cases {given.cases} --seed {given.seed}",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "took_s": round(took_s, 1),
        "answers": {kind: {str(code): n for (it, code), n in results.answers.items() if it == kind} for kind in kinds},
        "livez_ms": {str(share): round(quantile(results.livez_ms, share), 1) for share in (0.5, 0.99, 0.999, 1.0)},
        "largest_mb": round(results.largest_mb),
        "faults": faults[:20],
    }
    text = json.dumps(report, indent=1)
    print(text)
    if given.out is not None:
        (ROOT / given.out).write_text(text + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
