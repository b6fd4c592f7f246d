"""Start servers of several ranks, right ones and ones with a planted fault, and say what their checks saw.

    python trials/ranks_proof.py --out FILE                                       all parts, by the demo model
    python trials/ranks_proof.py --out FILE --parts right --model FOLDER -- --on-unproven refuse --matrix evidence

    right   with --reproducible, while it serves: layers proven, the attestation a match whose every batch is explained,
            shadow checks of each rank and replays of answers, none of which differs
    border  the last rank's rows of queries, keys and values begin one row late: the layers' check names rank and layer
    kernel  the last rank's attention is 1.01 times what it should be: shadow checks name the rank
    stale   the last rank serves on by the decisions of its start when a path is quarantined: all ranks start again
    launch  the last rank cannot launch what decodes short contexts: named, quarantined, the next path serves
    lost    the last rank is killed under load: streams end within --end-s with an error, and it is ready again

Faults are put in by a module on the processes' path. What stands behind -- are flags of every server. Prints each
check, writes all of them to FILE, and exits with 1 where one is wrong. No server gets NVLink multicast.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import psutil
from ranks_beside import NO_MULTICAST, commit_of_code, machine, versions
from running_server import DEMO, ROOT, Server, free_port, running

ON_LAST = """
import sys
if "server.engine.follower" in sys.orig_argv:
    from server.engine.startup import subject
    read, built = subject.read_subject, []
    def read_subject(settings, rank=0):
        if rank == settings.tensor_parallel_size - 1 and not built:
            built.append(rank)
            plant()
        return read(settings, rank)
    subject.read_subject = read_subject
"""
BORDER = """
def plant():
    from dataclasses import replace
    from kernels.linear.weights import PlainWeight
    load = subject.load_weights
    def late(layer):
        values = layer.qkv.weight.dequantized().roll(-1, 0).to(layer.qkv.weight.dtype)
        return replace(layer, qkv=replace(layer.qkv, weight=PlainWeight(values)))
    def load_weights(*given):
        weights = load(*given)
        return replace(weights, layers=tuple(late(it) for it in weights.layers))
    sys.modules["__main__"].load_weights = subject.load_weights = load_weights
"""
STALE = """
def plant():
    from server.engine.operators.dispatch import Dispatcher
    Dispatcher.decide = lambda *_: None
"""
# The path that is decided first for decode of short contexts, and no other.
LAUNCH = """
def plant():
    import torch
    from server.engine.operators.dispatch import Dispatcher
    call = Dispatcher.call
    def failing(self, choice, *given, **named):
        shape = choice.decision.shape
        if (shape.phase.value, shape.context_bucket.label) == ("decode", "le_128") and choice.use.path in FIRST:
            raise torch.OutOfMemoryError("planted")
        return call(self, choice, *given, **named)
    Dispatcher.call = failing
"""
KERNEL = """
def plant():
    from server.engine.operators.dispatch import Dispatcher
    call = Dispatcher.call
    def scaled(self, choice, q, k, v, part, layer, out, **named):
        call(self, choice, q, k, v, part, layer, out, **named)
        out.mul_(1.01)
    Dispatcher.call = scaled
"""
FIRST = ("sdpa.cpu", "gluon.decode.hopper", "gluon.ordered.hopper", "torch.ordered.cpu")
SHORT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


@dataclass
class Checks:
    """Results, printed at once: a run that is cut off has said what it saw."""

    began: float = field(default_factory=time.monotonic)
    found: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, part: str, name: str, is_right: bool | None, **details: object) -> None:
        """`is_right` None: said, not judged."""
        at_s = round(time.monotonic() - self.began, 1)
        with self.lock:
            self.found.append({"part": part, "check": name, "ok": is_right, "at_s": at_s, **details})
            word = {True: "ok   ", False: "WRONG", None: "     "}[is_right]
            print(f"{at_s:6.1f} s  {word} {part}: {name}", details or "", flush=True)


@dataclass
class Trial:
    """Arguments of a part, and what it needs of the run."""

    args: argparse.Namespace
    folder: Path
    checks: Checks
    part: str

    def add(self, name: str, is_right: bool | None, **details: object) -> None:
        self.checks.add(self.part, name, is_right, **details)

    @contextmanager
    def server(self, *flags: str, planted: str = "") -> Iterator[Server]:
        """A server of the ranks; `planted`: code of the last one, which defines plant()."""
        own = self.folder / self.part
        own.mkdir()
        if planted:
            (own / "sitecustomize.py").write_text(f"FIRST = {FIRST!r}\n{ON_LAST}{planted}")
        port, args = free_port(), self.args
        command = [
            *(sys.executable, "-m", "server.cli", "serve", "--model", str(args.model), "--port", str(port)),
            *("--tensor-parallel-size", str(args.ranks), "--cache-dir", str(own / "cache")),
            *("--served-model-name", "model", "--max-num-seqs", "32", "--kv-cache-tokens", str(args.kv_cache_tokens)),
            *("--on-unproven", "degrade", *flags, *args.flags),
        ]
        path = os.pathsep.join(filter(None, (str(own), str(ROOT), os.environ.get("PYTHONPATH"))))
        log = own / "log"
        with running(command, port, log, {**os.environ, **NO_MULTICAST, "PYTHONPATH": path}) as server:
            try:
                yield server
            finally:
                self.args.out.with_suffix(f".{self.part}.log").write_text(server.log[-20000:])

    def ready(self, server: Server) -> None:
        began = time.monotonic()
        server.wait_ready(self.args.start_s)
        self.add("ready", True, start_s=round(time.monotonic() - began, 1))


def right(trial: Trial) -> None:
    checked = ("--shadow-interval-s", "0.2", "--shadow-budget", "0.5", "--replay-share", "1")
    with trial.server("--reproducible", "--on-unproven", "qualify", *checked) as server:
        trial.ready(server)
        report = server.get("/attention").json()
        layers = report["layers"]
        trial.add("layers are proven", layers["status"] == "proven", **layers)
        statuses = [row["status"] for row in report["shapes"]]
        trial.add("statuses", None, **{it: statuses.count(it) for it in set(statuses)})
        asked = list(_prompts(trial.args.answers))
        began = time.monotonic()
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda body: server.post("/v1/completions", body).status_code, asked))
        seconds = round(time.monotonic() - began, 1)
        trial.add("all are answered", set(answers) == {200}, answers=len(answers), seconds=seconds)
        _wait_for_replays(server, trial.args.checks_s)
        matches, wrong = (server.value("hallmark_shadow_checks_total", result=it) for it in ("match", "mismatch"))
        trial.add("shadow checks", matches > 0 and not wrong, match=matches, mismatch=wrong)
        latest = server.get("/attention").json()["shadow_checks"]
        ranks = sorted({it["rank"] for it in latest if it["result"] == "match"})
        trial.add("of each rank", ranks == list(range(trial.args.ranks)), ranks=ranks, latest=len(latest))
        replays, differing = (server.value(f"hallmark_{it}_total") for it in ("replays", "replay_mismatches"))
        trial.add("replays, whose bits are equal", replays > 0 and not differing, replays=replays, differing=differing)
        server.post("/attention/attest", {})
        attested = server.get("/attention").json()["attestation"]
        trial.add("the attestation is a match", attested["result"] == "match", batches=len(attested["batches"]))
        explained = [it["explained"] or {"share": 0.0} for it in attested["batches"]]
        shares = [it["share"] for it in explained]
        unnamed = {name for it in explained for kind in ("unproven", "unexplained") for name in it.get(kind, ())}
        trial.add("each batch is explained", min(shares) >= 0.9999, shares=shares, unnamed=sorted(unnamed))


def _prompts(count: int) -> Iterator[dict[str, Any]]:
    """Requests of all lengths, half of which begin alike, greedy and drawn."""
    draw = Random(1)
    common = [draw.randrange(10, 2000) for _ in range(400)]
    for index in range(count):
        length = round(8 * 50 ** draw.random())
        shared = draw.randrange(length) if index % 2 else 0
        prompt = common[:shared] + [draw.randrange(10, 2000) for _ in range(length - shared)]
        how = {"temperature": 0.9, "seed": index} if index % 3 == 0 else {"temperature": 0}
        yield {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, **how}


def _wait_for_replays(server: Server, limit_s: float) -> None:
    """Wait until nothing is compared any more, for so long at most."""
    deadline, latest = time.monotonic() + limit_s, -1.0
    while time.monotonic() < deadline:
        count = server.value("hallmark_replays_total")
        if count == latest and count:
            return
        latest = count
        time.sleep(2)


def border(trial: Trial) -> None:
    with trial.server(planted=BORDER) as server:
        trial.ready(server)
        layers = server.get("/attention").json()["layers"]
        is_named = f" of rank {trial.args.ranks - 1}, in " in layers["detail"]
        trial.add("layers have failed, rank and layer are named", layers["status"] == "failed" and is_named, **layers)


def kernel(trial: Trial) -> None:
    with trial.server("--shadow-interval-s", "0.05", "--shadow-budget", "0.5", planted=KERNEL) as server:
        trial.ready(server)
        wrong: list[dict[str, Any]] = []
        deadline = time.monotonic() + trial.args.checks_s
        while not wrong and time.monotonic() < deadline:
            server.post("/v1/completions", {**SHORT, "ignore_eos": True})
            wrong = [it for it in server.get("/attention").json()["shadow_checks"] if it["result"] == "mismatch"]
        ranks = {it["rank"] for it in wrong}
        trial.add("a shadow check names the rank", ranks == {trial.args.ranks - 1}, detail=wrong and wrong[0]["detail"])


def stale(trial: Trial) -> None:
    with trial.server(planted=STALE) as server:
        trial.ready(server)
        rows = server.get("/attention").json()["shapes"]
        path = next(it["path"] for it in rows if it["phase"] == "decode")
        trial.add("a path is quarantined", server.post("/attention/quarantine", {"path": path}).is_success, path=path)
        began = time.monotonic()
        with suppress(httpx2.HTTPError):
            server.post("/v1/completions", {**SHORT, "max_tokens": 256, "ignore_eos": True})
        line = _line(server, "stale decisions on rank")
        trial.add("the rank is named", line is not None, line=line, seconds=round(time.monotonic() - began, 2))
        server.wait_for(lambda: server.value("hallmark_engine_restarts_total") > 0, "a new start")
        trial.ready(server)
        served = {it["path"] for it in server.get("/attention").json()["shapes"] if it["phase"] == "decode"}
        trial.add("all ranks serve by another path", path not in served, paths=sorted(map(str, served)))
        trial.add("it answers", server.post("/v1/completions", SHORT).status_code == 200)


def launch(trial: Trial) -> None:
    with trial.server(planted=LAUNCH) as server:
        trial.ready(server)
        line = _line(server, f"could not be launched on rank {trial.args.ranks - 1} of {trial.args.ranks}: planted")
        trial.add("path and rank are named", line is not None, line=line)
        rows = server.get("/attention").json()["shapes"]
        [row] = [it for it in rows if (it["phase"], it["context_bucket"]) == ("decode", "le_128")][:1]
        is_other = "quarantined" in row["fallback_reasons"]
        trial.add("another path serves the shape", is_other, path=row["path"], reasons=row["fallback_reasons"])
        restarts = server.value("hallmark_engine_restarts_total", cause="device")
        trial.add("one restart for each broken pair", restarts >= 1, restarts=restarts)
        trial.add("it answers", server.post("/v1/completions", SHORT).status_code == 200)


def lost(trial: Trial) -> None:
    with trial.server() as server:
        trial.ready(server)
        before = server.post("/v1/completions", SHORT).json()["choices"][0]["text"]
        followers = [it for it in _family(server) if "server.engine.follower" in it.cmdline()]
        longest = server.get("/v1/models").json()["data"][0]["max_model_len"]
        prompts = [f"{index} times upon a time" for index in range(trial.args.streams)]
        streams = [_Stream(server, prompt, min(4000, longest - 64)) for prompt in prompts]
        for stream in streams:
            stream.start()
        for stream in streams:
            assert stream.has_begun.wait(60), f"a stream has not begun ({stream.error}):\n{server.log[-3000:]}"
        lost_at = time.monotonic()
        os.kill(followers[-1].pid, signal.SIGKILL)
        for stream in streams:
            stream.join(60)
        took_s = max((it.ended_at or float("inf")) - lost_at for it in streams)
        codes = [it.error for it in streams]
        is_right = took_s <= trial.args.end_s and set(codes) == {"engine_died"}
        trial.add("streams end with an error", is_right, seconds=round(took_s, 3), streams=len(streams), codes=codes)
        left = _wait_for_ends(followers, lost_at)
        trial.add("no rank of the old group is left", not left, seconds=round(time.monotonic() - lost_at, 2))
        server.wait_ready(trial.args.start_s)
        trial.add("ready again", True, seconds=round(time.monotonic() - lost_at, 1))
        after = server.post("/v1/completions", SHORT).json()["choices"][0]["text"]
        trial.add("it answers as before", after == before)


class _Stream(threading.Thread):
    """A streamed answer that would go on for long. `error`: code of its last event, None without one."""

    def __init__(self, server: Server, prompt: str, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self._server, self._prompt, self._num_tokens = server, prompt, num_tokens
        self.has_begun = threading.Event()
        self.ended_at: float | None = None
        self.error: str | None = None

    def run(self) -> None:
        body = {"prompt": self._prompt, "max_tokens": self._num_tokens, "stream": True, "ignore_eos": True}
        with (
            suppress(httpx2.HTTPError),
            httpx2.stream("POST", self._server.url + "/v1/completions", json=body, timeout=60) as response,
        ):
            for line in response.iter_lines():
                if '"error"' in line:
                    self.error = json.loads(line.removeprefix("data: "))["error"]["code"]
                elif line:
                    self.has_begun.set()
        self.ended_at = time.monotonic()


def _family(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def _wait_for_ends(processes: Sequence[psutil.Process], since: float) -> list[int]:
    """Return the processes that are there ten seconds later."""

    def has_ended(process: psutil.Process) -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE  # whose parent has not asked yet
        except psutil.NoSuchProcess:
            return True

    while not all(map(has_ended, processes)) and time.monotonic() < since + 10:
        time.sleep(0.05)
    return [it.pid for it in processes if not has_ended(it)]


def _line(server: Server, text: str) -> str | None:
    return next((line[:400] for line in server.log.splitlines() if text in line), None)


PARTS: dict[str, Callable[[Trial], None]] = {
    "right": right,
    "border": border,
    "kernel": kernel,
    "stale": stale,
    "launch": launch,
    "lost": lost,
}


def run(args: argparse.Namespace) -> int:
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder:

        def part(name: str) -> None:
            try:
                PARTS[name](Trial(args, Path(folder), checks, name))
            except (httpx2.HTTPError, RuntimeError, AssertionError, KeyError, ValueError, LookupError) as error:
                checks.add(name, "it came to its end", False, error=f"{type(error).__name__}: {error}"[-1500:])

        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(part, args.parts))
    found = {
        "what": f"{args.ranks} ranks of {args.model.name}: {', '.join(args.parts)}; docstring of trials/ranks_proof.py",
        "command": "python " + shlex.join(sys.argv),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": args.commit or commit_of_code(),
        "machine": machine(),
        "versions": versions(),
        "checks": checks.found,
    }
    text = json.dumps(found, default=str).replace('{"part"', '\n{"part"')
    args.out.write_text(text + "\n")
    num_wrong = sum(it["ok"] is False for it in checks.found)
    print(f"{len(checks.found)} checks, {num_wrong} wrong; wrote {args.out}", flush=True)
    return 1 if num_wrong or not checks.found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; ends of logs are written beside it")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", type=Path, default=DEMO, help="with weights: of dummy ones no layers are checked")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--at-once", type=int, default=1, help="parts side by side, each with servers of its own")
    parser.add_argument("--answers", type=int, default=200, help="of the right server")
    parser.add_argument("--checks-s", type=float, default=60, help="seconds to wait for replays at most")
    parser.add_argument("--streams", type=int, default=8, help="that a lost rank ends")
    parser.add_argument("--end-s", type=float, default=1.0, help="within which they must end")
    parser.add_argument("--start-s", type=float, default=300, help="the most that a start may take")
    parser.add_argument("--kv-cache-tokens", type=int, default=65536)
    parser.add_argument("--commit", help="where this is no checkout")
    parser.add_argument("flags", nargs="*", help="of every server, behind --")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
