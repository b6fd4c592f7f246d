"""CPU time of the API's process for a token and for a request, beside an engine that answers at once.

python trials/front_end_cpu.py --before OLDER_CHECKOUT --out docs/benchmarks/front-end-cpu.json

Checkouts are measured in turn, each by its own server, whose engine is this script: it has one token for each stream
every `--step-ms`. CPU time is that of the API's process alone; the load comes from a process of its own. Three loads:
streams of one token an event; requests of one token; the same two of a bare FastAPI application that echoes.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from ready import wait_ready

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
STREAMS = 128
TEXT = "The little engine answered at once, and every word of its answer was sent in an event of its own. "


# --- the engine: a process of the measured server ---


def engine(path: str) -> None:
    """Answer every request with the tokens of a text, one a step for all, until the connection ends."""
    from server.protocol import wire
    from server.protocol.messages import (
        Cancel,
        Configure,
        DispatchCount,
        EngineReady,
        FinishReason,
        Heartbeat,
        PathUse,
        PlanRow,
        RequestTimes,
        StepOutput,
        StepRecord,
        Submit,
        TokenDelta,
    )
    from server.text.tokenizer import Tokenizer

    step_s = float(os.environ["FRONT_END_STEP_MS"]) / 1000
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    frames = wire.Frames()
    sent: dict[str, int] = {}  # tokens so far of each request that is not over
    limits: dict[str, int] = {}
    uses = [PathUse("prefill", "sdpa.cpu", "proven", []), PathUse("decode", "sdpa.cpu", "proven", [])]
    text: list[int] = []
    is_ready, step, beat_at = False, 0, 0.0

    def put(message: Any) -> None:
        connection.sendall(wire.frame(message))

    next_at = time.monotonic()
    while True:
        data = b""
        if select.select([connection], [], [], max(0.0005, next_at - time.monotonic()))[0]:
            data = connection.recv(1 << 20)
            if not data:
                return
        for body in frames.feed(data) if data else ():
            message = wire.to_engine(body)
            if isinstance(message, Configure):
                folder = Path(message.settings.model)
                written = TEXT * 40
                if os.environ.get("FRONT_END_THINKS"):
                    written = f"<think>\n{written}"  # more than an answer has: all of it is reasoning
                text = Tokenizer.load(folder).encode(written, add_special_tokens=False)
                row = PlanRow(
                    shape="decode fp32 h4:2 d64",
                    phase="decode",
                    query_bucket="le_128",
                    context_bucket="le_128",
                    head_dim=64,
                    path="sdpa.cpu",
                    status="proven",
                    wanted="sdpa.cpu",
                    fallback_reasons=[],
                    rejected={},
                    matrix_digest=None,
                    evidence=None,
                )
                put(EngineReady(os.getpid(), "demo", 4096, 4096, 16, {"device": "cpu"}, None, "none", [row], 1))
                is_ready = True
            elif isinstance(message, Submit):
                sent[message.request_id], limits[message.request_id] = 0, message.sampling.max_tokens
            elif isinstance(message, Cancel):
                sent.pop(message.request_id, None)
        now = time.monotonic()
        if not is_ready or now < next_at:
            continue
        next_at = max(next_at + step_s, now)
        if now - beat_at > 0.5:
            beat_at = now
            put(Heartbeat(step, now, len(sent), 0))
        if not sent:
            continue
        step += 1
        deltas = []
        for request_id, place in list(sent.items()):
            sent[request_id] = place + 1
            is_last = place + 1 >= limits[request_id]
            times = RequestTimes(now, now, now, 1, 0) if place == 0 else None
            use = uses if place == 0 or is_last else None
            finish = FinishReason.LENGTH if is_last else None
            deltas.append(TokenDelta(request_id, [text[place % len(text)]], finish, times=times, path_uses=use))
            if is_last:
                del sent[request_id]
        dispatches = [
            DispatchCount("decode", "le_128", "sdpa.cpu", "proven", "sdpa.cpu", [], len(deltas), len(deltas), 1)
        ]
        record = StepRecord(step, now, 0.0, dispatches, len(sent), 0, 0, 0, 4096, 0, 0, 0)
        put(StepOutput(record, deltas))


# --- the servers ---


def serve(flags: Sequence[str]) -> int:
    """`hallmark serve` of the checkout on PYTHONPATH, with the engine above."""
    from functools import partial

    from server.cli import main as cli

    command = (sys.executable, str(HERE), "engine")
    cli.EngineClient = partial(cli.EngineClient, command=command)  # type: ignore[misc, assignment]
    return cli.main(["serve", *flags])


def echo(port: int) -> None:
    """A bare FastAPI application on uvicorn: the text of a chat, an event each `FRONT_END_STEP_MS`."""
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse

    app, step_s = FastAPI(), float(os.environ["FRONT_END_STEP_MS"]) / 1000

    @app.get("/readyz")
    async def ready() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> Any:
        num_tokens = body["max_tokens"]

        async def events() -> AsyncIterator[str]:
            for i in range(num_tokens):
                choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
                yield "data: " + json.dumps({"id": "echo", "object": "text_completion", "choices": [choice]}) + "\n\n"
                if i + 1 < num_tokens:
                    await asyncio.sleep(step_s)
            yield "data: [DONE]\n\n"

        if body.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream")
        return {"id": "echo", "object": "text_completion", "choices": [{"index": 0, "text": " word"}]}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


# --- the load: a process of its own ---


async def send_one(host: str, port: int, path: str, body: bytes) -> tuple[int, int]:
    """Send one request on a connection of its own; returns its events with a text, and whether it is whole."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    data = await reader.read(-1)
    writer.close()
    is_whole = b" 200 " in data[:20] and (b"[DONE]" in data or b"chunked" not in data[:600].lower())
    return len(re.findall(rb'"(?:text|content|reasoning_content)": ?"[^"]', data)), is_whole


async def send_all(port: int, path: str, body: dict[str, Any], num_requests: int) -> dict[str, Any]:
    """Send `num_requests`, at most STREAMS at a time."""
    data, room = json.dumps(body).encode(), asyncio.Semaphore(STREAMS)

    async def run() -> tuple[int, int]:
        async with room:
            return await send_one("127.0.0.1", port, path, data)

    began_at = time.perf_counter()
    found = await asyncio.gather(*(run() for _ in range(num_requests)))
    elapsed_s = time.perf_counter() - began_at
    assert all(is_whole for _, is_whole in found), "an answer is not whole"
    return {"events": sum(num for num, _ in found), "elapsed_s": elapsed_s}


# --- measuring ---


@dataclass(frozen=True, slots=True)
class Sample:
    """One load on one server."""

    server: str
    load: str
    cpu_us: float  # of the API's process, for a token or a request
    events: int
    tokens: int  # 0: of requests
    requests: int
    per_wall_s: float  # tokens or requests


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def driven(port: int, path: str, body: dict[str, Any], num_requests: int) -> dict[str, Any]:
    """The load, from a process of its own."""
    command = [sys.executable, str(HERE), "load", str(port), path, json.dumps(body), str(num_requests)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    path: str
    body: dict[str, Any]
    num_requests: int
    tokens_each: int  # 0: it measures requests


COMPLETION = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0, "ignore_eos": True}
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]


@dataclass(frozen=True, slots=True)
class Loads:
    stream: Load
    chat: Load
    request: Load
    tools: Load
    reasoning: Load


def loads_of(tokens: int) -> Loads:
    path, streamed = "/v1/chat/completions", {"stream": True, "max_tokens": tokens}
    return Loads(
        stream=Load("stream", "/v1/completions", COMPLETION | streamed, STREAMS, tokens),
        chat=Load("chat stream", path, CHAT | streamed, STREAMS, tokens),
        request=Load("request", "/v1/completions", COMPLETION | {"max_tokens": 1}, 10 * STREAMS, 0),
        tools=Load("chat stream, parsed for calls", path, CHAT | streamed | {"tools": TOOLS}, STREAMS, tokens),
        reasoning=Load("chat stream, all of it reasoning", path, CHAT | streamed, STREAMS, tokens),
    )


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    role: tuple[str, ...]  # arguments of this script
    checkout: Path
    loads: list[Load]
    thinks: bool = False  # its engine's answers are reasoning


def measured(server: str, process: psutil.Process, port: int, load: Load) -> Sample:
    before = cpu_s(process)
    found = driven(port, load.path, load.body, load.num_requests)
    spent_s = cpu_s(process) - before
    count = load.num_requests * (load.tokens_each or 1)
    return Sample(
        server,
        load.name,
        spent_s / count * 1e6,
        found["events"],
        load.num_requests * load.tokens_each,
        load.num_requests,
        count / found["elapsed_s"],
    )


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        port: int = it.getsockname()[1]
        return port


def run_server(server: Server, step_ms: float) -> list[Sample]:
    """Start a server, warm it up, and measure each load once."""
    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(server.checkout), "FRONT_END_STEP_MS": str(step_ms)}
    environment |= {"FRONT_END_THINKS": "1"} if server.thinks else {}
    command = [sys.executable, str(HERE), *server.role, "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=server.checkout, env=environment, stdout=out, stderr=out)
        try:
            wait_ready(process, f"http://127.0.0.1:{port}", log)
            handle = psutil.Process(process.pid)
            for load in server.loads:
                driven(port, load.path, load.body | ({"max_tokens": 2} if load.tokens_each else {}), 16)
            return [measured(server.name, handle, port, load) for load in server.loads]
        finally:
            process.terminate()
            process.wait(30)


def commit_of(checkout: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=checkout, check=True, capture_output=True, text=True
    ).stdout.strip()


def summary(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The median and the range of each server's loads."""
    rows = []
    for key in dict.fromkeys((it.server, it.load) for it in samples):
        own = [it for it in samples if (it.server, it.load) == key]
        cpu = [it.cpu_us for it in own]
        row: dict[str, Any] = {
            "server": key[0],
            "load": key[1],
            "rounds": len(own),
            "cpu_us_p50": round(statistics.median(cpu), 2),
            "cpu_us_least": round(min(cpu), 2),
            "cpu_us_most": round(max(cpu), 2),
            "per_wall_s_p50": round(statistics.median(it.per_wall_s for it in own)),
        }
        tokens = sum(it.tokens for it in own)
        if tokens:
            row["merged_tokens_share"] = round(1 - sum(it.events for it in own) / tokens, 4)
        rows.append(row)
    return rows


def ratios(samples: Sequence[Sample]) -> dict[str, float]:
    """Return after over before, of the least CPU time: what else the machine does only adds to it."""
    least = {
        key: min(it.cpu_us for it in samples if (it.server, it.load) == key)
        for key in {(it.server, it.load) for it in samples}
    }
    return {
        load: round(least["after", load] / value, 3)
        for (server, load), value in sorted(least.items())
        if server == "before" and ("after", load) in least
    }


def result_of(args: argparse.Namespace, samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "command": " ".join(["python trials/front_end_cpu.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "before": commit_of(args.before),
        "after": commit_of(args.after),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "streams": STREAMS,
        "tokens_each": args.tokens,
        "step_ms": args.step_ms,
        "after_over_before_least_cpu": ratios(samples),
        "summary": summary(samples),
        "samples": [asdict(it) for it in samples],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--after", type=Path, default=ROOT, help="checkout that is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=40.0, help="between two tokens of a stream")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    samples: list[Sample] = []

    loads = loads_of(args.tokens)
    servers = [
        Server("before", ("serve",), args.before, [loads.stream, loads.chat, loads.request]),
        Server("after", ("serve",), args.after, [loads.stream, loads.chat, loads.request, loads.tools]),
        Server("after", ("serve", "--reasoning-parser", "qwen3"), args.after, [loads.reasoning], thinks=True),
        Server("bare FastAPI", ("echo",), args.after, [loads.stream, loads.request]),
    ]
    for number in range(args.rounds):
        for server in servers if number % 2 else reversed(servers):
            samples += run_server(server, args.step_ms)
        print(number, ratios(samples), flush=True)
        args.out.write_text(json.dumps(result_of(args, samples), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["engine", path]:
            engine(path)
        case ["serve", *flags]:
            sys.exit(serve(flags))
        case ["echo", "--port", port]:
            echo(int(port))
        case ["load", port, path, body, num_requests]:
            print(json.dumps(asyncio.run(send_all(int(port), path, json.loads(body), int(num_requests)))))
        case _:
            sys.exit(main())
