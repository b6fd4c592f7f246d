"""Bodies drawn at random, of every field there is and of values that fit none: no client makes the server fail."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from server.http.chat.requests import ChatRequest, Message
from server.http.openai.requests import CompletionRequest, TokenizeRequest
from server.protocol.messages import AttestationReport
from support.api.edge_fakes import saying, served

FIELDS = sorted(
    {
        *(name for kind in (CompletionRequest, ChatRequest, TokenizeRequest) for name in kind.model_fields),
        *CompletionRequest.unsupported,
        *Message.unsupported,
        *("tokens", "path", "shape", "role", "content", "type", "text", "name", "include_usage", "nothing"),
        *(" - at `$.messages[0].role", "a`b", "\ud800"),
    }
)
NUMBERS = (0, 1, -1, 2, 0.5, -0.5, 1e308, 10**30, -(10**30), 2**31, 2**63)
TEXTS = ("", "a", "é", "\ud800", "\x00", "auto", "none", "user", "text", "x" * 300, "` - at `$.messages[0].role")
REQUESTS = (
    ("POST", "/v1/completions", "prompt"), ("POST", "/v1/chat/completions", "messages"),
    ("POST", "/tokenize", "prompt"), ("POST", "/tokenize", "messages"), ("POST", "/detokenize", "tokens"),
    ("POST", "/attention/attest", "path"), ("POST", "/attention/quarantine", "path"),
    ("DELETE", "/attention/quarantine", "path"),
)  # fmt: skip
FITTING = {"prompt": ["hi", [1, 2], ["a", "b"]], "tokens": [[1, 2]], "path": ["sdpa.cpu"]}
JSON = {"content-type": "application/json"}


def drawn(chance: random.Random, depth: int = 0) -> object:
    if depth > 3 or chance.random() < 0.6:
        return chance.choice([None, True, False, *NUMBERS, *TEXTS])
    if chance.random() < 0.5:
        return [drawn(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice(FIELDS): drawn(chance, depth + 1) for _ in range(chance.randrange(4))}


def message(chance: random.Random) -> object:
    plain = {"role": "user", "content": chance.choice(["hi", [{"type": "text", "text": "a"}], drawn(chance)])}
    return plain | ({chance.choice(FIELDS): drawn(chance)} if chance.random() < 0.3 else {})


def body_of(chance: random.Random, wanted: str) -> bytes:
    messages = [message(chance) for _ in range(chance.randrange(3))]
    fitting = [messages, messages] if wanted == "messages" else FITTING[wanted]
    fields = {wanted: chance.choice([*fitting, drawn(chance)])}
    fields |= {chance.choice(FIELDS): drawn(chance) for _ in range(chance.randrange(4))}
    return json.dumps(fields).encode()


@pytest.mark.parametrize("seed", range(2))
def test_no_body_makes_the_server_fail(folder: Path, seed: int) -> None:
    async def run() -> set[int]:
        chance, it, found = random.Random(seed), served(folder, saying("hello", " world")), set()
        paths = it.app.openapi()["paths"]
        it.engine.report = AttestationReport("request", "match", 1.0, 0.1, [], [])
        async with it.client() as client:
            for _ in range(500):
                method, path, wanted = chance.choice(REQUESTS)
                body = body_of(chance, wanted)
                answer = await client.request(method, path, content=body, headers=JSON)
                assert answer.status_code in (200, 400, 404), (path, body)
                documented = paths[path][method.lower()]["responses"][str(answer.status_code)]["description"]
                assert answer.status_code == 200 or f"`{answer.json()['error']['code']}`" in documented
                found.add(answer.status_code)
        assert it.services.admission.num_requests == it.services.admission.num_tokens == 0
        return found

    assert {200, 400} <= asyncio.run(run())  # and 404 where a path of the quarantine was drawn
