"""An OpenAI-compatible server that does what a test says, over real HTTP: its times and its faults are planted here."""

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.local_http import listening

COUNTERS = {
    'hallmark_attention_fallback_total{reason="head_dim"}': 0,
    'hallmark_requests_total{route="/v1/completions",outcome="server_error"}': 0,
    'hallmark_requests_total{route="/v1/completions",outcome="ok"}': 3,
    'hallmark_kernel_compiles_total{after_ready="true"}': 0,
    'hallmark_kernel_compiles_total{after_ready="false"}': 9,
    "hallmark_nonfinite_logits_total": 0,
    'hallmark_engine_restarts_total{cause="killed"}': 0,
}
CPU = {"device": "cpu", "gpu": "fake", "sm": None, "driver": None}


def no_delay(_: int) -> float:
    return 0.0


def no_shift(_: int) -> float:
    return 0.0


def plan_row(**changes: object) -> dict[str, object]:
    known = {"shape": "prefill fp32 h4:2", "path": "a", "status": "provisional", "wanted": "a", "fallback_reasons": []}
    return known | changes


@dataclass
class Script:
    """Script of the server; a test changes a field."""

    model: str = "demo"
    max_model_len: int | None = 4096
    first_token_s: Callable[[int], float] = no_delay  # of the number of prompt tokens
    token_s: float = 0.0
    tokens_per_event: int = 1
    has_usage: bool = True
    is_spaced: bool = False  # JSON with spaces, and lines that end in \r\n
    status: int = 200
    error_event: bool = False
    is_cut: bool = False  # the connection ends in the middle
    drops_idle: bool = False  # the connection ends after each answer, unsaid
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)  # Authorization headers
    num_connections: int = 0
    # What a canary asks.
    tokens: list[int] = field(default_factory=lambda: list(range(50)))  # of any text
    rows: list[dict[str, object]] = field(default_factory=lambda: [plan_row(), plan_row(status="proven")])
    fingerprint: dict[str, object] = field(default_factory=lambda: dict(CPU))
    matrix_digest: str | None = None
    model_digests: dict[str, str | None] = field(default_factory=lambda: {"tokenizer": "7" * 64, "weights": "3" * 64})
    counters: dict[str, float] = field(default_factory=lambda: dict(COUNTERS))
    counters_grow: str | None = None  # this one by 1 with each completion
    salt: int = 0  # another one answers otherwise
    chosen: Callable[[dict[str, Any], list[int]], list[int]] = lambda _, tokens: tokens  # of a body: what is answered
    num_special: int = 0  # tokens more of each prompt
    answer_s: float = 0.0  # that a completion takes
    num_at_once: int = 0  # completions, and the most there were
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    logprob_shift: Callable[[int], float] = no_shift  # of the prompt's length: what its log probabilities are off by
    can_score: bool = True
    raw: bytes | None = None  # the answer to a completion, as it is
    hangs: bool = False  # a completion is taken and never answered


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every small write waits 40 ms for the client's delayed ACK
    script: Script

    def setup(self) -> None:
        super().setup()
        self.script.num_connections += 1

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        script = self.script
        script.keys.add(self.headers["authorization"])
        if self.path == "/v1/models":
            self.send_json({"data": [{"id": script.model, "max_model_len": script.max_model_len}]})
        elif self.path == "/attention":
            matrix = {"digest": script.matrix_digest}
            report = {"fingerprint": script.fingerprint, "shapes": script.rows, "matrix": matrix}
            self.send_json(report | {"model_digests": script.model_digests})
        elif self.path == "/metrics":
            names = sorted({name.split("{")[0] for name in script.counters})
            types = [f"# TYPE {name} counter\n" for name in names]
            text = "".join([*types, *(f"{name} {value}\n" for name, value in script.counters.items())])
            self.send_body(text.encode(), "text/plain", 200)
        else:
            self.send_json({}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        script = self.script
        if self.path == "/tokenize":
            self.send_json({"tokens": script.tokens})
            return
        script.bodies.append(body)
        if script.counters_grow:
            script.counters[script.counters_grow] += 1
        if script.hangs:
            self.rfile.read(1)  # until the client goes away
        elif script.raw is not None:
            self.send_body(script.raw, "application/json", 200)
        elif script.status != 200:
            self.send_json({"error": {"message": "go away"}}, script.status)
        elif body.get("stream"):
            self.stream(body)
        elif body.get("echo"):
            self.score(body["prompt"])
        else:
            self.complete(body)

    def complete(self, body: dict[str, Any]) -> None:
        prompt = body.get("prompt", [1, 2, 3])
        script, is_chat = self.script, "messages" in body
        with script.lock:
            script.num_at_once += 1
            script.most_at_once = max(script.most_at_once, script.num_at_once)
        time.sleep(script.answer_s)
        choices: list[dict[str, Any]] = []
        for index in range(body.get("n", 1)):
            tokens = script.chosen(body, [token + script.salt + index for token in prompt[-20:]])
            text = " ".join(map(str, tokens))
            names = [f"token_id:{token}" for token in tokens]
            scores = {"tokens": names, "token_logprobs": [-1.0 - 0.01 * token for token in tokens]}
            choices.append({"message": {"content": text}} if is_chat else {"text": text, "logprobs": scores})
        with script.lock:
            script.num_at_once -= 1
        self.send_json({"choices": choices, "usage": {"prompt_tokens": len(prompt) + script.num_special}})

    def score(self, prompt: list[int]) -> None:
        names = [f"token_id:{token}" for token in prompt]
        shift = self.script.logprob_shift(len(prompt))
        values = [-1.0 - 0.01 * token + shift for token in prompt[1:]]
        likeliest = [{name: value, "token_id:7": -0.5} for name, value in zip(names[1:], values, strict=True)]
        scores = {"tokens": names, "token_logprobs": [None, *values], "top_logprobs": [None, *likeliest]}
        choice = {"text": "", "logprobs": scores if self.script.can_score else None}
        self.send_json({"choices": [choice]})

    def stream(self, body: dict[str, Any]) -> None:
        script, num_tokens = self.script, body["max_tokens"]
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        time.sleep(script.first_token_s(len(body["prompt"])))
        for first in range(0, num_tokens, script.tokens_per_event):
            if first:
                time.sleep(script.token_s)
            if first and script.is_cut:
                self.close_connection = True
                return
            self.event({"choices": [{"index": 0, "text": 'a "choices":[] b', "finish_reason": None}], "usage": None})
        if script.error_event:
            self.event({"error": {"message": "the engine\ndied"}})
        elif script.has_usage:
            self.event({"choices": [], "usage": {"completion_tokens": num_tokens}})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")
        self.close_connection = script.drops_idle

    def event(self, body: dict[str, Any]) -> None:
        separators = (", ", ": ") if self.script.is_spaced else (",", ":")
        end = b"\r\n\r\n" if self.script.is_spaced else b"\n\n"
        self.chunk(b": still there" + end + b"data: " + json.dumps(body, separators=separators).encode() + end)

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def send_json(self, body: object, status: int = 200) -> None:
        self.send_body(json.dumps(body).encode(), "application/json", status)

    def send_body(self, text: bytes, kind: str, status: int) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving(script: Script) -> Generator[str, None, None]:
    """The URL of a server that follows the script."""
    with listening(type("Scripted", (Handler,), {"script": script})) as url:
        yield url
