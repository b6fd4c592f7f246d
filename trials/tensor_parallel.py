"""Servers of several ranks on a machine with several GPUs: are they right, and how fast are they beside others?

    python trials/tensor_parallel.py correct --out FILE [--limit-s 150]
    python trials/tensor_parallel.py measure MODEL --out FILE --ours 1:0 --ours 2:2,3 [--peer 'NAME:GPUS:COMMAND']

`correct` starts the demo model (or --model) on one rank, two and, where there are as many GPUs, four, in fp32 and in
bf16, several servers on one GPU, and compares them: greedy and seeded tokens, prefix hits, structured output, log
probabilities, attestation; last it kills a rank of a loaded server. It exits with 1 when a check failed.

`measure` starts servers side by side, each on its own GPUs (RANKS:GPUS, a peer by a shell command that may hold {model}
and {port}), and sends all of them the load of `hallmark bench serve` in turn. Weights are dummies. FILE gets both
sides, the machine and its links. Starts are not part of what is measured.
"""

import argparse
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import torch

from qualification.bench.machine import commit_of_code
from qualification.bench.serve.cases import Scenario, ServePlan, cases_of
from qualification.bench.serve.file import ServedSide
from qualification.bench.serve.report import ratios, ratios_table, sides_table
from qualification.bench.serve.row import LatencyObjectives
from qualification.bench.serve.run import Load, Side, measure
from qualification.common.table import table
from qualification.load.discovery import discover

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "server" / "model" / "demo"
# These machines have NVLink without multicast: both libraries must not try it.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
PROMPTS = ["Once upon a time", "The king", "The sea was calm", "It was a dark night. " * 40 + "Then", "A", "In the"]
END_S = 10.0  # within which streams of a server that lost a rank must end
_PORT = 8200
_MOST_PROCESSES = 4  # of the load


@dataclass
class Started:
    """A server that this program started. `start_s` until it was ready."""

    name: str
    gpus: str
    command: list[str]
    process: "subprocess.Popen[bytes]"
    url: str
    log_file: Path
    start_s: float = 0.0

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=30)

    def complete(self, **body: object) -> dict[str, Any]:
        answer = httpx2.post(
            self.url + "/v1/completions", json={"max_tokens": 32, "temperature": 0, **body}, timeout=60
        )
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def texts(self, **body: object) -> list[str]:
        return [choice["text"] for choice in self.complete(**body)["choices"]]

    def value(self, name: str, label: str = "") -> float:
        """Sum of the samples of a metric with a label."""
        lines = self.get("/metrics").text.splitlines()
        samples = [line for line in lines if line.startswith((name + "{", name + " ")) and label in line]
        return sum(float(sample.rsplit(" ", 1)[1]) for sample in samples)

    def wait_ready(self, deadline: float, began: float) -> None:
        """Raises RuntimeError where the server ends or is late, with the end of its log."""
        while True:
            with suppress(httpx2.TransportError):
                status = httpx2.get(self.url + "/readyz", timeout=5).status_code
                if status == 404:  # a peer's
                    status = httpx2.get(self.url + "/health", timeout=5).status_code
                if status == 200:
                    self.start_s = time.monotonic() - began
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                state = "is not ready" if self.process.poll() is None else f"ended with {self.process.returncode}"
                raise RuntimeError(f"{self.name} {state}:\n{self.log[-3000:]}")
            time.sleep(0.2)


@contextmanager
def started(name: str, gpus: str, command: list[str], port: int, folder: Path) -> Iterator[Started]:
    """A server on its GPUs; it and its children are ended afterwards."""
    log_file = folder / f"{name}.log"
    environ = {**os.environ, **NO_MULTICAST, "CUDA_VISIBLE_DEVICES": gpus}
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Started(name, gpus, command, process, f"http://127.0.0.1:{port}", log_file)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ours(model: str, ranks: int, port: int, flags: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "server.cli", "serve", "--model", model, "--port", str(port)),
        *("--tensor-parallel-size", str(ranks), "--on-unproven", "degrade"),
        *flags,
    ]


def machine() -> dict[str, object]:
    """GPUs, versions, and how the GPUs are linked."""
    smi = shutil.which("nvidia-smi")

    def said(*arguments: str) -> list[str]:
        if smi is None:
            return []
        return subprocess.run([smi, *arguments], capture_output=True, text=True, check=False).stdout.splitlines()

    has_cuda = torch.cuda.is_available()
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "driver": next(iter(said("--query-gpu=driver_version", "--format=csv,noheader")), None),
        "power_limit": said("--query-gpu=power.limit", "--format=csv,noheader"),
        "link": said("topo", "-m"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,  # type: ignore[no-untyped-call]
        "environment": NO_MULTICAST,
    }


def head() -> dict[str, object]:
    return {
        "schema": 1,
        "command": "python " + shlex.join(sys.argv),
        "commit": commit_of_code(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }


# --- correctness ------------------------------------------------------------------------------------------------------


@dataclass
class Checks:
    """Results, printed at once: a run that is cut off has said what it saw."""

    found: list[dict[str, object]] = field(default_factory=list)

    def add(self, name: str, is_right: bool | None, **details: object) -> None:
        """`is_right` None: said, not judged."""
        self.found.append({"check": name, "is_right": is_right, **details})
        print({True: "ok    ", False: "WRONG ", None: "      "}[is_right] + name, details or "", flush=True)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A check that fails to run is wrong."""
        try:
            yield
        except (httpx2.HTTPError, RuntimeError, KeyError, IndexError, ValueError) as error:
            self.add(name, False, error=f"{type(error).__name__}: {error}"[-1500:])

    @property
    def num_wrong(self) -> int:
        return sum(it["is_right"] is False for it in self.found)


def correct(args: argparse.Namespace) -> int:
    deadline = time.monotonic() + args.limit_s - 15
    checks, num_gpus = Checks(), max(torch.cuda.device_count(), 1)
    worlds = [world for world in args.worlds if world <= num_gpus or args.device == "cpu"]
    for world in set(args.worlds) - set(worlds):
        checks.add(f"tp{world} is left out", None, gpus=num_gpus)
    last = num_gpus - 1
    where = {1: "0", 2: f"{max(last - 1, 0)},{last}", 4: "0,1,2,3"}
    flags = (
        *("--max-model-len", "2048", "--max-num-seqs", "16", "--kv-cache-tokens", "65536"),
        *("--max-num-batched-tokens", "1024", "--device", args.device),
    )
    with tempfile.TemporaryDirectory() as text, ExitStack() as stack:
        folder, began = Path(text), time.monotonic()
        servers: dict[str, Started] = {}
        for dtype in args.dtypes:
            for world in worlds if dtype == "bf16" else [it for it in worlds if it <= 2]:
                name, port = f"{dtype}-tp{world}", _PORT + len(servers)
                command = ours(args.model, world, port, [*flags, "--dtype", dtype])
                servers[name] = stack.enter_context(started(name, where[world], command, port, folder))
        every = list(servers.values())
        _wait_all(checks, servers, deadline, began)
        for dtype, is_exact in (("fp32", True), ("bf16", False)):
            for world in worlds:
                one, many = servers.get(f"{dtype}-tp1"), servers.get(f"{dtype}-tp{world}")
                if one is not None and many is not None and many is not one:
                    with checks.within(f"{dtype} tp{world}"):
                        compare(checks, one, many, is_exact=is_exact)
        for dtype in args.dtypes:
            largest = [it for name, it in servers.items() if name.startswith(dtype) and not name.endswith("tp1")][-1:]
            for server in largest:
                with checks.within(f"{server.name} loses a rank"):
                    lose_a_rank(checks, server, deadline + 15, is_exact=dtype == "fp32")
        logs = {server.name: server.log[-6000:] for server in every} if checks.num_wrong else {}
    result = {**head(), "checks": checks.found, "logs": logs}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(checks.found)} checks, {checks.num_wrong} wrong; wrote {args.out}", flush=True)
    return 1 if checks.num_wrong or not checks.found else 0


def _wait_all(checks: Checks, servers: dict[str, Started], deadline: float, began: float) -> None:
    """Wait for all servers; drop those that do not become ready."""

    def wait(server: Started) -> str | None:
        try:
            server.wait_ready(deadline, began)
        except RuntimeError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(servers)) as pool:
        for name, error in zip(list(servers), pool.map(wait, servers.values()), strict=True):
            graphs = [line for line in servers[name].log.splitlines() if "graphs captured" in line]
            said = {"start_s": round(servers[name].start_s, 1), "graphs": graphs[-1:]}
            # A dtype that no kernel path serves on this GPU is no fault of the ranks: the first one shows it, too.
            checks.add(f"{name} is ready", error is None, **(said if error is None else {"error": error[-1500:]}))
            if error is not None:
                del servers[name]


def compare(checks: Checks, one: Started, many: Started, *, is_exact: bool) -> None:
    """Hold a server of several ranks against one of one rank. `is_exact`: rounding is too small to change tokens."""
    name = many.name

    def same(what: str, ask: Callable[[Started], list[str]]) -> None:
        expected, found = ask(one), ask(many)
        num_same = sum(map(str.__eq__, expected, found))
        is_right = found == expected if is_exact else None  # 16 bits round, and may choose the other of two alike
        checks.add(f"{name}: {what}", is_right, same=f"{num_same} of {len(expected)}")

    same("greedy, together", lambda it: it.texts(prompt=PROMPTS))
    same("greedy, alone", lambda it: [text for prompt in PROMPTS[:3] for text in it.texts(prompt=prompt)])
    same("drawn with seeds, n=3", lambda it: it.texts(prompt=PROMPTS[:3], n=3, temperature=0.9, seed=7))
    drawn = {"prompt": PROMPTS, "temperature": 0.8, "seed": 11}
    checks.add(f"{name}: the same seed gives the same", many.texts(**drawn) == many.texts(**drawn))

    def scores(server: Started) -> list[float]:
        (choice,) = server.complete(prompt=PROMPTS[3], max_tokens=1, echo=True, logprobs=1)["choices"]
        return [value for value in choice["logprobs"]["token_logprobs"] if value is not None]

    pairs = list(zip(scores(one), scores(many), strict=True))
    error = max(abs(a - b) for a, b in pairs)
    limit = 1e-3 if is_exact else 0.25
    checks.add(f"{name}: log probabilities of a prompt", error <= limit, largest_error=error, limit=limit)

    hits = "hallmark_prefix_cache_hit_tokens_total"
    before = many.value(hits)
    again = [many.texts(prompt=PROMPTS[3]) for _ in range(2)]
    gained = many.value(hits) - before
    checks.add(f"{name}: pages found again, the same answer", again[0] == again[1] and gained > 0, hits=gained)
    digits = many.texts(prompt=PROMPTS[0], structured_outputs={"regex": "[0-9]{12}"}, max_tokens=40, temperature=1.0)
    checks.add(f"{name}: structured output", all(it.isdigit() and len(it) == 12 for it in digits), answers=digits)

    httpx2.post(many.url + "/attention/attest", json={}, timeout=60).raise_for_status()
    attested = many.get("/attention").json()["attestation"]
    shares = [it["explained"]["share"] for it in attested["batches"] if it.get("explained")]
    is_whole = attested["result"] == "match"
    # Of shapes that are served unproven, as here, little of the time is explained.
    checks.add(f"{name}: attestation", is_whole, explained=[round(it, 3) for it in shares], result=attested["result"])
    compared = {it: many.value("hallmark_shadow_checks_total", f'result="{it}"') for it in ("match", "mismatch")}
    is_right = compared["mismatch"] == 0 and (compared["match"] > 0 or None)
    checks.add(f"{name}: shadow checks", is_right, **compared)


def lose_a_rank(checks: Checks, server: Started, deadline: float, *, is_exact: bool) -> None:
    """Kill a rank of a loaded server: streams end with an error, all ranks start again, and it answers as before."""
    before, ends = server.texts(prompt=PROMPTS), list[tuple[float, bool]]()
    lost = followers_of(server.process.pid)  # now: a look at all processes takes as long as a short stream
    began = threading.Semaphore(0)

    def stream(prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 1900, "temperature": 0, "stream": True, "ignore_eos": True}
        has_error = has_begun = False
        with (
            suppress(httpx2.TransportError),
            httpx2.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response,
        ):
            for line in response.iter_lines():
                has_error = has_error or '"error"' in line
                if not has_begun:
                    has_begun = True
                    began.release()
        ends.append((time.monotonic(), has_error))

    threads = [threading.Thread(target=stream, args=(prompt,), daemon=True) for prompt in PROMPTS[:3] * 2]
    for thread in threads:
        thread.start()
    for _ in threads:
        began.acquire(timeout=20)
    os.kill(lost[-1], signal.SIGKILL)
    lost_at = time.monotonic()
    for thread in threads:
        thread.join(timeout=2 * END_S)
    cut = [(at - lost_at, has_error) for at, has_error in ends if at > lost_at]  # others had ended before
    took_s = max((seconds for seconds, _ in cut), default=0.0)
    is_right = len(ends) == len(threads) and bool(cut) and all(has_error for _, has_error in cut) and took_s < END_S
    details = {"seconds": round(took_s, 2), "streams": len(cut)}
    checks.add(f"{server.name}: streams of a lost rank end with an error", is_right, **details)
    while any(Path(f"/proc/{pid}").exists() for pid in lost) and time.monotonic() < lost_at + END_S:
        time.sleep(0.05)
    left = [pid for pid in lost if Path(f"/proc/{pid}").exists()]
    checks.add(
        f"{server.name}: no rank of the old group is left", not left, seconds=round(time.monotonic() - lost_at, 2)
    )
    server.wait_ready(deadline, lost_at)
    checks.add(f"{server.name}: starts again", True, seconds=round(server.start_s, 1))
    after = server.texts(prompt=PROMPTS)
    num_same = sum(map(str.__eq__, before, after))
    # In 16 bits a prompt behind pages that were found may round to another answer than one computed whole.
    is_same = num_same == len(before) if is_exact else None
    checks.add(f"{server.name}: answers as before", is_same, same=f"{num_same} of {len(before)}")


def followers_of(pid: int) -> list[int]:
    """Return the ranks beside the first below a process, the youngest last."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    family, found = [pid], []
    while family:
        family += (below := sorted(children.get(family.pop(0), [])))
        for each in below:
            with suppress(OSError):
                if "server.engine.follower" in Path(f"/proc/{each}/cmdline").read_text():
                    found.append(each)
    return found


# --- speed ------------------------------------------------------------------------------------------------------------


def speed(args: argparse.Namespace) -> int:
    began, salt = time.monotonic(), secrets.token_hex(4)
    plan = ServePlan(
        scenarios=(Scenario.TTFT, Scenario.TPOT, Scenario.THROUGHPUT),
        lengths=tuple(args.lengths),
        samples=args.samples,
        batches=tuple(args.batches),
        tpot_output=args.tpot_output,
        tpot_rounds=args.rounds,
        streams=tuple(args.streams),
        throughput_rounds=1,
    )
    flags = (
        *("--load-format", "dummy", "--max-model-len", str(max(512, *args.lengths) + 512)),
        *("--max-num-seqs", str(max(1, *args.batches, *args.streams)), "--attestation-interval-s", "0"),
        *args.flags,
    )
    asked = [(f"ours-tp{ranks}", gpus, ours(args.model, ranks, _PORT + index, flags))
             for index, (ranks, gpus) in enumerate(args.ours)]  # fmt: skip
    for index, (name, gpus, text) in enumerate(args.peer, start=len(asked)):
        asked.append((name, gpus, ["bash", "-c", text.format(model=args.model, port=_PORT + index)]))
    with tempfile.TemporaryDirectory() as text, ExitStack() as stack:
        folder = Path(text)
        servers = [
            stack.enter_context(started(name, gpus, command, _PORT + index, folder))
            for index, (name, gpus, command) in enumerate(asked)
        ]
        try:
            with ThreadPoolExecutor(len(servers)) as pool:
                list(pool.map(lambda it: it.wait_ready(began + args.start_s, began), servers))
            print("ready after", {it.name: round(it.start_s, 1) for it in servers}, flush=True)
            sides = _measured(plan, salt, servers, args.processes)
        finally:
            for server in servers:
                (args.out.with_suffix(f".{server.name}.log")).write_text(server.log[-20000:])
    result = {
        **head(),
        "model": args.model,
        "plan": msgspec.to_builtins(plan),
        "salt": salt,
        "sides": [
            {**msgspec.to_builtins(side), "gpus": it.gpus, "server": shlex.join(it.command), "start_s": it.start_s}
            for side, it in zip(sides, servers, strict=True)
        ],
    }
    args.out.write_text(json.dumps(result).replace('{"case"', '\n{"case"') + "\n")
    print("\n".join(table(*sides_table(sides))))
    for index, side in enumerate(sides[:-1]):
        print(f"\n{side.name} over the others:\n" + "\n".join(table(*ratios_table(ratios(side, sides[index + 1 :])))))
    print(f"{time.monotonic() - began:.0f} s; wrote {args.out}", flush=True)
    return 0


def _measured(plan: ServePlan, salt: str, servers: Sequence[Started], num_processes: int) -> list[ServedSide]:
    """Send every case to all servers in turn."""
    sides = [Side(it.name, it.url, *discover(it.url, bearer=None)) for it in servers]
    loads = [Load(side, num_processes=num_processes, timeout_s=120) for side in sides]
    objectives = LatencyObjectives({}, 50.0)
    last, began = [""], time.monotonic()

    def progress(_: int, __: int, what: str) -> None:
        if what != last[0]:
            last[0] = what
            print(f"  {time.monotonic() - began:.0f} s {what}", file=sys.stderr, flush=True)

    try:
        found = measure(cases_of(plan, salt), loads, objectives=objectives, progress=progress)
    finally:
        for load in loads:
            load.close()
    return [ServedSide(it.side.name, it.side.url, it.side.target.model, it.rows, []) for it in found]


def _own(text: str) -> tuple[int, str]:
    ranks, _, gpus = text.partition(":")
    if not ranks.isdigit() or len(gpus.split(",")) != int(ranks):
        raise argparse.ArgumentTypeError(f"must be RANKS:GPUS with a GPU for each rank, got {text}")
    return int(ranks), gpus


def _peer(text: str) -> tuple[str, str, str]:
    name, gpus, command = [*text.split(":", 2), "", ""][:3]
    if not (name and gpus and command):
        raise argparse.ArgumentTypeError(f"must be NAME:GPUS:COMMAND, got {text}")
    return name, gpus, command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    right = commands.add_parser("correct")
    right.set_defaults(run=correct)
    right.add_argument("--out", type=Path, required=True)
    right.add_argument("--model", default=str(DEMO))
    right.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    right.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], choices=(1, 2, 4), help="1 is among them")
    right.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=("fp32", "bf16"))
    right.add_argument("--limit-s", type=float, default=150)
    fast = commands.add_parser("measure")
    fast.set_defaults(run=speed)
    fast.add_argument("model", help="a folder; its weights are not read")
    fast.add_argument("--out", type=Path, required=True)
    fast.add_argument("--ours", type=_own, action="append", default=[], metavar="RANKS:GPUS")
    fast.add_argument("--peer", type=_peer, action="append", default=[], metavar="NAME:GPUS:COMMAND")
    fast.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8192])
    fast.add_argument("--samples", type=int, default=9)
    fast.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    fast.add_argument("--tpot-output", type=int, default=128)
    fast.add_argument("--rounds", type=int, default=5)
    fast.add_argument("--streams", type=int, nargs="*", default=[128])
    fast.add_argument("--processes", type=int, default=_MOST_PROCESSES)
    fast.add_argument("--start-s", type=float, default=200, help="the most that starts may take")
    fast.add_argument("--flags", type=shlex.split, default=[], help="more flags of our servers")
    args = parser.parse_args()
    if 1 not in getattr(args, "worlds", [1]):
        parser.error("--worlds needs 1, which the others are compared with")
    if not getattr(args, "ours", [1]) and not args.peer:
        parser.error("needs at least one of --ours and --peer")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
