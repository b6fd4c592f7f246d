"""Memory of the API's process, and how long /livez takes, while clients ask for the log probabilities of long prompts.

python trials/details_memory.py --out docs/benchmarks/details-memory.json

Each of `--clients` sends, all at once, requests of 64 prompts of `--tokens` tokens with the 20 likeliest at each place,
whole and as a stream; then some read nothing for as long as the server lets them. Resident memory of the API's process
is read each 20 ms, /livez asked each 20 ms by a process of its own.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import psutil
from running_server import ROOT, Server, free_port, running

NUM_PROMPTS = 64
MIB = 2**20
PROBE = """
import http.client, sys, time
port, out = int(sys.argv[1]), []
while not sys.stdin.closed:
    begun = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/livez")
    connection.getresponse().read()
    connection.close()
    print(time.perf_counter() - begun, flush=True)
    time.sleep(0.02)
"""


class Watch:
    """Resident bytes of a process, read by a thread, and the times of /livez."""

    def __init__(self, server: Server) -> None:
        self._process = psutil.Process(server.process.pid)
        self._port = server.port

    @contextmanager
    def measured(self, found: dict[str, Any]) -> Iterator[None]:
        """Put what was measured meanwhile into `found`."""
        seen, ended = [self._process.memory_info().rss], threading.Event()

        def look() -> None:
            while not ended.wait(0.02):
                seen.append(self._process.memory_info().rss)

        probe = subprocess.Popen([sys.executable, "-c", PROBE, str(self._port)], stdout=subprocess.PIPE, text=True)
        thread = threading.Thread(target=look)
        thread.start()
        begun = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - begun
            ended.set()
            thread.join()
            probe.terminate()
            assert probe.stdout is not None
            times = sorted(float(line) for line in probe.stdout.read().split())
            probe.wait()
        found |= {
            "took_s": round(took_s, 1),
            "rss_mib": {"before": seen[0] // MIB, "most": max(seen) // MIB, "after": seen[-1] // MIB},
            "livez_ms": {
                "samples": len(times),
                "p50": round(1000 * times[len(times) // 2], 1),
                "p99": round(1000 * times[int(len(times) * 0.99)], 1),
                "most": round(1000 * times[-1], 1),
            },
        }


def body_of(rng: random.Random, num_tokens: int, fields: dict[str, Any]) -> bytes:
    prompts = [rng.choices(range(20, 4000), k=num_tokens) for _ in range(NUM_PROMPTS)]
    return json.dumps({"prompt": prompts, "max_tokens": 1, **fields}).encode()


async def ask(url: str, bodies: list[bytes], *, reads: bool) -> dict[str, int]:
    """Send all bodies at once; return how many answers were of which status, and the bytes read."""
    statuses: dict[str, int] = {}

    async def one(client: httpx2.AsyncClient, body: bytes) -> int:
        num_bytes = 0
        try:
            async with client.stream("POST", f"{url}/v1/completions", content=body) as answer:
                statuses[str(answer.status_code)] = statuses.get(str(answer.status_code), 0) + 1
                if not reads:
                    await asyncio.sleep(40)
                async for part in answer.aiter_raw():
                    num_bytes += len(part)
        except httpx2.HTTPError as error:
            name = type(error).__name__
            statuses[name] = statuses.get(name, 0) + 1
        return num_bytes

    async with httpx2.AsyncClient(timeout=600, headers={"content-type": "application/json"}) as client:
        sizes = await asyncio.gather(*(one(client, body) for body in bodies))
    return statuses | {"bytes": sum(sizes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1100)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    rng = random.Random(7)
    kinds = {
        "whole": ({"prompt_logprobs": 20}, True),
        "stream": ({"echo": True, "logprobs": 20, "stream": True}, True),
        "whole, read by nobody": ({"prompt_logprobs": 20}, False),
    }
    port, rows = free_port(), []
    with tempfile.TemporaryDirectory() as folder:
        program = [str(Path(sys.executable).with_name("hallmark")), "serve", "--port", str(port)]
        environ = os.environ | {"HALLMARK_CACHE_DIR": str(ROOT / ".cache" / "details-memory")}
        with running(program, port, Path(folder) / "log", environ) as server:
            server.wait_ready(600)
            watch = Watch(server)
            for name, (fields, reads) in kinds.items():
                bodies = [body_of(rng, wanted.tokens, fields) for _ in range(wanted.clients)]
                row: dict[str, Any] = {"kind": name, "clients": wanted.clients, "prompts_each": NUM_PROMPTS}
                row |= {"tokens_each": wanted.tokens, "values_each": NUM_PROMPTS * wanted.tokens * 21}
                with watch.measured(row):
                    row["answers"] = asyncio.run(ask(server.url, bodies, reads=reads))
                print(json.dumps(row), flush=True)
                rows.append(row)
            print(server.log[-2000:])
    if wanted.out is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], check=True, cwd=ROOT, capture_output=True, text=True
        )
        found = {
            "command": " ".join(["python trials/details_memory.py", *sys.argv[1:]]),
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit.stdout.strip(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}",
            "python": platform.python_version(),
            "rows": rows,
        }
        wanted.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
