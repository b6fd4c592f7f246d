"""Cost of attestation to a server under load: tokens a second with many attestations beside few, in turn, in one run.

python trials/attestation_cost.py --out docs/benchmarks/attestation.json -- --model DIR --load-format dummy

The server's own timer is at 10 s all the time; in every other window it is asked for more, one after another. What a
single one takes from the throughput follows from the difference, and from that what a timer at 10 minutes takes. The
streams are cut off behind the last window; with the defaults they must last for 25 s.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from running_server import Server, free_port, running

from qualification.bench.machine import commit_of_code
from qualification.load.client import LoadClient
from qualification.load.discovery import discover
from qualification.load.trace import Seed, at_once

TIMER_S = 10.0
INTERVAL_S = 600.0  # the default of --attestation-interval-s
TOKENS = "hallmark_generation_tokens_total"
REPORTS = "hallmark_attestation_total"


def load(url: str, arguments: argparse.Namespace, failures: list[str]) -> None:
    """Streams that last for all windows."""
    target, _ = discover(url)
    requests = at_once(
        Seed("attestation", "", 4000), num_requests=arguments.streams, num_input=64, num_output=arguments.tokens
    )
    client = LoadClient(target)
    failures += [str(it.error) for it in client.run(requests).samples if it.error is not None]


def window(server: Server, seconds: float, pause_s: float | None) -> dict[str, float]:
    """Tokens a second, and attestations in it; `pause_s` between those that are asked for, None for none."""
    tokens, reports, busy_s = server.value(TOKENS), server.value(REPORTS), 0.0
    began = time.perf_counter()
    while (left := seconds - (time.perf_counter() - began)) > 0:
        if pause_s is None:
            time.sleep(left)
        else:
            busy_s += server.post("/attention/attest", {}).json()["busy_s"]
            time.sleep(pause_s)
    num_tokens = server.value(TOKENS) - tokens
    took_s = time.perf_counter() - began
    rate = num_tokens / took_s
    return {
        "seconds": took_s,
        "tokens_a_second": rate,
        "attestations": server.value(REPORTS) - reports,
        "busy_s": busy_s,
    }


def measure(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    """Windows in turn (few, many, many, few), so that what slows with growing contexts slows both."""
    failures: list[str] = []
    streams = threading.Thread(target=load, args=(server.url, arguments, failures), daemon=True)
    streams.start()
    server.wait_for(lambda: server.value(TOKENS) >= 40 * arguments.streams, "the streams", 60)
    few, many = [], []
    for n in range(arguments.windows):
        for is_asking in (False, True) if n % 2 == 0 else (True, False):
            side = many if is_asking else few
            side.append(window(server, arguments.seconds, 0.2 if is_asking else None))
            print(f"{'many' if is_asking else 'few'}: {side[-1]}", flush=True)
    is_running, failures = streams.is_alive(), list(failures)
    latest = server.get("/attention").json()["attestation"]
    loss = 1 - statistics.fmean(it["tokens_a_second"] for it in many) / statistics.fmean(
        it["tokens_a_second"] for it in few
    )
    rates = [sum(it["attestations"] for it in side) / sum(it["seconds"] for it in side) for side in (few, many)]
    each_s = loss / (rates[1] - rates[0])
    results = {name: server.value(REPORTS, result=name) for name in ("match", "mismatch", "error")}
    return {
        "streams": arguments.streams,
        "few": few,
        "many": many,
        "lost_share": loss,
        "attestations_a_second": rates,
        "lost_s_an_attestation": each_s,
        "busy_s_an_attestation": sum(it["busy_s"] for it in many) / sum(it["attestations"] for it in many),
        "lost_share_with_a_timer_of_600_s": each_s / INTERVAL_S,
        "reports": results,
        "latest": {name: latest[name] for name in ("trigger", "result", "busy_s")},
        "is_measured_under_load": is_running and not failures,
        "failures": failures[:3],
    }


def main() -> int:
    """Exits with 1 where an attestation was no match, or costs 0.5% of throughput or more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4000, help="of each stream: they must outlast the windows")
    parser.add_argument("--windows", type=int, default=4, help="of each kind")
    parser.add_argument("--seconds", type=float, default=2.5, help="of a window")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="-- flags of hallmark serve")
    arguments = parser.parse_args()
    flags = [flag for flag in arguments.flags if flag != "--"]
    port = free_port()
    program = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), *flags]
    with tempfile.TemporaryDirectory() as folder:
        environ = dict(os.environ) | {"HALLMARK_ATTESTATION_INTERVAL_S": str(TIMER_S)}
        with running(program, port, Path(folder) / "log", environ) as server:
            server.wait_ready()
            found = measure(server, arguments)
            machine = server.get("/attention").json()["fingerprint"]
    at = datetime.now(UTC).isoformat(timespec="seconds")
    command = f"python trials/attestation_cost.py -- {' '.join(flags)}"
    head = {"at": at, "command": command, "commit": commit_of_code(), "machine": machine}
    arguments.out.write_text(json.dumps(head | found, indent=1) + "\n")
    print(json.dumps(found, indent=1), flush=True)
    is_right = found["is_measured_under_load"] and not found["reports"]["mismatch"] and not found["reports"]["error"]
    return 0 if is_right and found["lost_share_with_a_timer_of_600_s"] < 0.005 else 1


if __name__ == "__main__":
    sys.exit(main())
