"""An services whose engine follows a script, and a tokenizer with one token a byte, so that a test can count."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from random import Random

import httpx2
import msgspec
import tokenizers
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message
from tokenizers import decoders, models, pre_tokenizers

from server.edge.admission import Admission
from server.edge.body_memory import Bodies
from server.edge.guard import Guard, GuardLimits
from server.edge.hosts import Hosts
from server.edge.keys import NO_KEYS, Access, ApiKeys, Keys
from server.edge.lifecycle import Lifecycle
from server.http.app import create_app
from server.http.services import Program, ServedModel, Services, Telemetry
from server.protocol.images import PromptImage, PromptImages
from server.protocol.messages import (
    Attest,
    AttestationReport,
    ChangeQuarantine,
    EngineReady,
    EngineRefused,
    FinishReason,
    Heartbeat,
    PathUse,
    PlanRow,
    QuarantineChanged,
    RequestTimes,
    SamplingParams,
    TokenDelta,
    TokenScores,
)
from server.receipt.keyring import KeyRing
from server.receipt.receipts import Receipts
from server.settings import ReceiptMode, Settings
from server.supervisor.choices import Choices
from server.supervisor.client import EngineState
from server.supervisor.requests import AttestationRequests, QuarantineRequests
from server.supervisor.streams import Take
from server.telemetry.metrics import Metrics
from server.telemetry.tracing import Tracing
from server.text.answer.syntax import choose_syntax
from server.text.chat_template import ChatTemplate
from server.text.sampling_defaults import SamplingDefaults
from server.text.tokenizer import Tokenizer
from support.scraped import scraped_value

MAX_MODEL_LEN = 1024
END = 256  # the end-of-text token
VOCAB_SIZE = 257
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' and m.content == 'refuse me' %}"
    "{{ raise_exception('not like this') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TIMES = RequestTimes(submitted_at=10.0, scheduled_at=10.25, first_token_at=10.75, num_chunks=2, num_cached_tokens=0)
USES = [PathUse("prefill", "sdpa.math", "provisional", ["head_dim"]), PathUse("decode", "sdpa.cpu", "proven", [])]


def plan_row(phase: str = "prefill", path: str | None = "sdpa.math", **changes: object) -> PlanRow:
    row = PlanRow(
        shape=f"{phase} fp32 h4:2 d320",
        phase=phase,
        query_bucket="le_128",
        context_bucket="le_128",
        head_dim=320,
        path=path,
        status="provisional",
        wanted="sdpa.cpu",
        fallback_reasons=["head_dim"],
        rejected={
            "sdpa.cpu": [("head_dim", "takes at most 256, the shape has 320")],
            "triton.prefill": [("arch", "runs on cuda, this machine is cpu")],
        },
        matrix_digest="abc123",
        evidence={"p50_us": 12.5, "worst": float("inf")},
    )
    return msgspec.structs.replace(row, **changes)


READY = EngineReady(
    pid=4242,
    model="tiny",
    max_model_len=MAX_MODEL_LEN,
    num_pages=64,
    page_size=16,
    fingerprint={"device": "cpu", "gpu": "test", "sm": None, "torch": "2.13.0", "triton": "3.6.0"},
    matrix_digest="abc123",
    matrix_verdict="valid",
    plan=[plan_row(), plan_row("decode", "sdpa.cpu", status="proven", fallback_reasons=[], rejected={"sdpa.math": []})],
    attention_layers=4,
)
REFUSED = EngineRefused("unproven", "1 of 2 shapes has no proven path", [plan_row(path=None, status="unproven")])

Script = Callable[[list[int]], Sequence[TokenDelta]]  # the answer to a prompt


def delta(text: str = "", finish: FinishReason | None = None, *, is_first: bool = False) -> TokenDelta:
    """One token for each byte of `text`; an end token is added where the model stops by itself."""
    ids = [*text.encode(), *([END] if finish is FinishReason.STOP else [])]
    return TokenDelta("", ids, finish, times=TIMES if is_first else None, path_uses=USES if finish else None)


def playing(*deltas: TokenDelta) -> Script:
    """A script that answers every prompt with these."""
    return lambda _: deltas


def saying(*texts: str, finish: FinishReason = FinishReason.STOP) -> Script:
    """A script that answers every prompt with these texts, a delta each, and then ends."""
    return playing(*(delta(text, is_first=i == 0) for i, text in enumerate(texts)), delta("", finish))


def usage_of(num_prompt: int, num_tokens: int, num_cached: int = 0) -> dict[str, object]:
    """A usage as the API gives it."""
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}
    return counts | {"prompt_tokens_details": {"cached_tokens": num_cached}}


def scores_of(position: int, token_ids: Sequence[int], num_top: int) -> TokenScores:
    """Scores that a test can foretell: the log probability is an eighth of the negative id; 0, 1, ... are likeliest."""
    top = [*range(num_top), *(-i / 8 for i in range(num_top))]
    return TokenScores.of(position, num_top, ([-it / 8, it + 1, *top] for it in token_ids))


def _scored(delta: TokenDelta, prompt: list[int], num_before: int, sampling: SamplingParams) -> TokenDelta:
    scores = []
    if sampling.prompt_logprobs is not None and not num_before:
        scores.append(scores_of(1, prompt[1:], sampling.prompt_logprobs))
    if sampling.logprobs is not None:
        scores += [
            scores_of(len(prompt) + num_before + i, [it], sampling.logprobs) for i, it in enumerate(delta.token_ids)
        ]
    return msgspec.structs.replace(delta, scores=tuple(scores)) if scores else delta


class ScriptedEngine:
    """Plays a script to every request; `gate` holds it back after its first `num_free` deltas."""

    def __init__(self, script: Script = saying("Hel", "lo")) -> None:  # noqa: B008 -- a constant
        self.state = EngineState.READY
        self.ready: EngineReady | None = READY
        self.refused: EngineRefused | None = None
        self.last_heartbeat: Heartbeat | None = Heartbeat(1, time.monotonic(), 0, 0)
        self.report: AttestationReport | None = None  # the answer to who asks for an attestation
        self.attestations = AttestationRequests(self._attest)
        self.stranded: list[str] = []  # shapes that no other path may serve
        self.quarantine = QuarantineRequests(self._change_quarantine)
        self.script = script
        self.submitted: list[tuple[str, list[int], SamplingParams]] = []
        self.salts: list[bytes] = []
        self.priorities: list[int] = []
        self.choices: list[Choices | None] = []
        self.images: list[tuple[PromptImage, ...]] = []
        self.traceparents: list[str | None] = []
        self.cancelled: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_free = 0

    def _attest(self, _: Attest) -> None:
        if self.report is not None:
            self.attestations.put(self.report)

    def _change_quarantine(self, message: ChangeQuarantine) -> None:
        kept = [pair for pair in self.quarantine.by_operator if pair not in message.lift]
        if not self.stranded:
            kept += message.add
        self.quarantine.put(QuarantineChanged(message.request, self.stranded, kept))

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self.state = EngineState.CLOSED

    async def stream(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        cache_salt: bytes = b"",
        traceparent: str | None = None,
        priority: int = 0,
        choices: Choices | None = None,
        take: Take | None = None,
        images: PromptImages | None = None,
    ) -> AsyncGenerator[TokenDelta]:
        self.submitted.append((request_id, prompt_token_ids, sampling))
        self.traceparents.append(traceparent)
        self.salts.append(cache_salt)
        self.priorities.append(priority)
        self.choices.append(choices)
        self.images.append(() if images is None else images.take())
        is_finished, num_tokens = False, 0
        try:
            for i, scripted in enumerate(self.script(prompt_token_ids)):
                it = _scored(scripted, prompt_token_ids, num_tokens, sampling)
                num_tokens += len(it.token_ids)
                if i >= self.num_free:
                    await self.gate.wait()
                await asyncio.sleep(0)
                is_finished = it.finish_reason is not None
                if take is None or is_finished or not take(it):
                    yield it
        finally:
            if not is_finished:
                self.cancelled.append(request_id)

    def refuse(self) -> None:
        self.state, self.ready, self.refused = EngineState.REFUSED, None, REFUSED


def write_tokenizer(
    folder: Path, *, has_template: bool = True, template: str = TEMPLATE, special: Sequence[str] = ()
) -> None:
    """A byte-level tokenizer without merges: token id = byte value, then END, then further `special` tokens."""
    alphabet = [chr(b) if chr(b) in pre_tokenizers.ByteLevel.alphabet() else "" for b in range(256)]
    spare = iter(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(alphabet)))
    vocab = {char or next(spare): i for i, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", *special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>"} | ({"chat_template": template} if has_template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _texts_of(folder: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer and template of a folder, loaded once while its files stay the same: it takes 8 ms."""
    files = tuple((file.name, file.read_bytes()) for file in sorted(folder.glob("*.j*")))
    return _texts(folder, files)


@lru_cache(maxsize=8)
def _texts(folder: Path, _: tuple[tuple[str, bytes], ...]) -> tuple[Tokenizer, ChatTemplate | None]:
    template = ChatTemplate.load(folder)
    return Tokenizer.load(folder, template), template


def make_services(
    folder: Path, engine: ScriptedEngine, settings: Settings, *, tracing: Tracing | None = None
) -> Services:
    metrics = Metrics(settings.model_name, CollectorRegistry(), version="1.2.3")
    tokenizer, template = _texts_of(folder)
    metrics.on_ready(READY)
    model = ServedModel(
        settings.model_names,
        tokenizer,
        template,
        choose_syntax(template, settings.tool_call_parser, settings.reasoning_parser),
        SamplingDefaults(),
        special_tokens_in_text=settings.special_tokens_in_text,
    )
    return Services(
        settings=settings,
        program=Program("1.2.3", started_at=1_700_000_000),
        model=model,
        engine=engine,  # type: ignore[arg-type]
        telemetry=Telemetry(
            metrics, tracing or Tracing(None, version="1.2.3", count_dropped=metrics.traffic.spans_dropped)
        ),
        lifecycle=Lifecycle(),
        admission=Admission(settings.max_queued_requests, settings.max_queued_tokens, settings.max_queued_bytes),
        receipts=None
        if settings.receipts is ReceiptMode.OFF
        else Receipts(KeyRing(Ed25519PrivateKey.generate()), Random(settings.seed)),
    )


def with_model(services: Services, **fields: object) -> Services:
    """The services with other fields of the model."""
    return replace(services, model=replace(services.model, **fields))  # type: ignore[arg-type]


class Served:
    """An application without a socket: `post` and `get` run it on a loop of their own."""

    def __init__(self, services: Services, engine: ScriptedEngine, keys: Keys = NO_KEYS) -> None:
        self.services = services
        self.engine = engine
        self._keys = keys

    @cached_property
    def app(self) -> FastAPI:
        """Made when it is asked for, in 17 ms: `Running` and `with_keys` make one of their own."""
        return create_app(self.services, self._keys)

    def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app), base_url="http://localhost")

    def request(self, method: str, path: str, **options: object) -> httpx2.Response:
        async def send() -> httpx2.Response:
            async with self.client() as client:
                return await client.request(method, path, **options)  # type: ignore[arg-type]

        return asyncio.run(send())

    def get(self, path: str, **options: object) -> httpx2.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: object, **options: object) -> httpx2.Response:
        return self.request("POST", path, json=body, **options)

    def value(self, name: str, **labels: str) -> float | None:
        """A sample of the metrics; None where it does not exist."""
        return scraped_value(self.services.telemetry.metrics.registry, f"hallmark_{name}", labels)


def scope_of(path: str) -> dict[str, object]:
    """An ASGI scope of a POST of JSON."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }


def leave(it: Served, path: str, body: dict[str, object]) -> list[Message]:
    """Ask as a client that leaves: of a stream at its first bytes, else when the engine has the request.

    Returns the messages that were sent. The engine goes no further than its `num_free` deltas.
    """
    sent: list[Message] = []

    async def run() -> None:
        gone = asyncio.Event()
        inbox: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Message:
            if inbox:
                return inbox.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        it.engine.gate = asyncio.Event()
        task = asyncio.create_task(it.app(scope_of(path), receive, send))
        while not (it.engine.submitted and (sent or not body["stream"])):
            await asyncio.sleep(0)
        assert it.services.lifecycle.num_inflight == 1
        gone.set()
        await asyncio.wait_for(task, 30)

    asyncio.run(run())
    return sent


def events(response: httpx2.Response) -> list[object]:
    """The events of a stream: parsed, but for the closing [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def served(
    folder: Path,
    script: Script | None = None,
    *,
    template: str | None = None,
    special: Sequence[str] = (),
    **settings: object,
) -> Served:
    """A served model with the folder's tokenizer; one with this chat template and special tokens is written first."""
    if template is not None:
        write_tokenizer(folder, template=template, special=special)
    engine = ScriptedEngine(script) if script else ScriptedEngine()
    services = make_services(folder, engine, Settings(model="tiny", **settings))  # type: ignore[arg-type]
    return Served(services, engine)


def impatient(it: Served, app: ASGIApp) -> Guard:
    """A guard around an application that hangs up on who reads nothing for 50 ms."""
    limits = GuardLimits(10_000, receive_timeout_s=5, request_timeout_s=5, send_timeout_s=0.05)
    nothing: frozenset[str] = frozenset()
    access = Access(NO_KEYS, nothing, nothing)
    options = {"access": access, "hosts": Hosts(None), "routes": nothing, "lifecycle": it.services.lifecycle}
    return Guard(app, limits=limits, bodies=Bodies(10_000), metrics=it.services.telemetry.metrics, **options)  # type: ignore[arg-type]


def with_keys(it: Served, *keys: str, operator: str | None = None) -> Served:
    operators = None if operator is None else ApiKeys([operator])
    return Served(replace(it.services), it.engine, Keys(ApiKeys(list(keys)) if keys else None, operators))
