"""The traffic of soak.py: what to send, how to leave, and which answer it deserves."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx2

NUM_PREFIXES = 12
PREFIX_TOKENS = 96
MAX_TOKENS = 8
VOCAB = range(20, 1000)  # ids that every tokenizer has
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
STREAMED = "streamed to the end"
LEFT = "left"


@dataclass(frozen=True)
class Job:
    kind: str
    path: str
    body: Any  # bytes are sent as they are
    wanted: int | str = 200  # a status, STREAMED or LEFT
    leaves_after: int | None = None  # events of the stream; 0: as soon as the request is sent


class Traffic:
    """A seeded sequence of requests."""

    def __init__(self, rng: random.Random, max_model_len: int, *, has_chat: bool) -> None:
        self._rng = rng
        self._max_model_len = max_model_len
        self._prefixes = [self._ids(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
        makers: list[tuple[int, Callable[[], Job]]] = [
            (20, self._whole),
            (20, self._stream),
            (15, self._left_mid_way),
            (5, self._left_at_once),
            (12, self._with_prefix),
            (10, self._penalized),
            (5, self._scored),
            (5, self._batch),
            (8, self._failing),
        ]
        if has_chat:
            makers.append((10, self._chat))
        self._weights, self._makers = zip(*makers, strict=True)

    @classmethod
    async def of(cls, client: httpx2.AsyncClient, url: str, rng: random.Random) -> "Traffic":
        """Return the traffic for the model of that server."""
        [model] = (await client.get(f"{url}/v1/models")).raise_for_status().json()["data"]
        chat = await client.post(url + CHAT, json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
        return cls(rng, model["max_model_len"], has_chat=chat.status_code == 200)

    def next(self) -> Job:
        make: Callable[[], Job] = self._rng.choices(self._makers, self._weights)[0]
        return make()

    def _ids(self, num: int) -> list[int]:
        return self._rng.choices(VOCAB, k=num)

    def _fields(self, **fields: Any) -> dict[str, Any]:
        return {"prompt": self._ids(self._rng.randint(1, 40)), "max_tokens": self._rng.randint(1, MAX_TOKENS)} | fields

    def _whole(self) -> Job:
        words = " ".join(self._rng.choices(["once", "upon", "a", "time", "stra\u00dfe", "\u96ea", "\U0001f600"], k=8))
        return Job("whole", COMPLETIONS, self._fields(prompt=words))

    def _stream(self) -> Job:
        options = {"include_usage": self._rng.random() < 0.5}
        return Job("stream", COMPLETIONS, self._fields(stream=True, stream_options=options), STREAMED)

    def _left_mid_way(self) -> Job:
        fields = self._fields(stream=True, max_tokens=200, ignore_eos=True)
        return Job("left mid-way", COMPLETIONS, fields, LEFT, leaves_after=self._rng.randint(1, 4))

    def _left_at_once(self) -> Job:
        fields = self._fields(stream=self._rng.random() < 0.5, max_tokens=200, ignore_eos=True)
        return Job("left at once", COMPLETIONS, fields, LEFT, leaves_after=0)

    def _with_prefix(self) -> Job:
        prompt = self._rng.choice(self._prefixes) + self._ids(self._rng.randint(1, 20))
        salt = {"cache_salt": self._rng.choice("ab")} if self._rng.random() < 0.2 else {}
        return Job("prefix", COMPLETIONS, self._fields(prompt=prompt, **salt))

    def _penalized(self) -> Job:
        rng = self._rng
        fields = {
            "temperature": rng.choice([0.0, 0.7, 1.3]),
            "top_p": rng.choice([0.5, 0.9, 1.0]),
            "top_k": rng.choice([-1, 5, 50]),
            "seed": rng.randint(-9, 9),
            "repetition_penalty": rng.choice([1.0, 1.2]),
            "presence_penalty": rng.uniform(-2, 2),
            "frequency_penalty": rng.uniform(-2, 2),
            "stop": ["\n\n", "the"],
        }
        is_stream = rng.random() < 0.3
        return Job("penalized", COMPLETIONS, self._fields(stream=is_stream, **fields), STREAMED if is_stream else 200)

    def _scored(self) -> Job:
        fields = self._fields(echo=True, logprobs=self._rng.randint(0, 5), max_tokens=self._rng.randint(0, 1))
        return Job("scored", COMPLETIONS, fields)

    def _batch(self) -> Job:
        prompts = [self._ids(self._rng.randint(1, 10)) for _ in range(self._rng.randint(2, 6))]
        return Job("batch", COMPLETIONS, self._fields(prompt=prompts))

    def _chat(self) -> Job:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": str(self._rng.random())}]
        is_stream = self._rng.random() < 0.5
        body = {"messages": messages, "max_tokens": self._rng.randint(1, MAX_TOKENS), "stream": is_stream}
        return Job("chat", CHAT, body, STREAMED if is_stream else 200)

    def _failing(self) -> Job:
        path, body, status = self._rng.choice(
            [
                (COMPLETIONS, self._fields(model="no-such-model"), 404),
                (COMPLETIONS, self._fields(prompt=""), 400),
                (COMPLETIONS, self._fields(prompt=[10**9]), 400),
                (COMPLETIONS, self._fields(prompt=[21] * self._max_model_len), 400),
                (COMPLETIONS, self._fields(temperature="hot"), 400),
                (COMPLETIONS, self._fields(**{f"unknown_{self._rng.random()}": 1}), 400),
                (CHAT, {"messages": []}, 400),
                (COMPLETIONS, b'{"prompt": "half', 400),
                (f"/{self._rng.random()}", {}, 404),
            ]
        )
        return Job("failing", path, body, status)


async def answer_to(client: httpx2.AsyncClient, url: str, job: Job) -> int | str:
    """Return the request's outcome: the status where it is not a stream's, STREAMED, LEFT, or what went wrong."""
    content = job.body if isinstance(job.body, bytes) else json.dumps(job.body).encode()
    request = client.build_request(
        "POST", url + job.path, content=content, headers={"content-type": "application/json"}
    )
    try:
        if job.leaves_after == 0:
            return await _leave_at_once(client, request)
        response = await client.send(request, stream=True)
        try:
            return await _read(response, job)
        finally:
            await response.aclose()
    except httpx2.HTTPError as error:
        return type(error).__name__


async def _read(response: httpx2.Response, job: Job) -> int | str:
    if job.wanted not in (STREAMED, LEFT) or response.status_code != 200:
        await response.aread()
        return response.status_code
    num_events = 0
    async for line in response.aiter_lines():
        if line.startswith('data: {"error"'):
            return line[:200]
        if line == "data: [DONE]":
            return STREAMED
        num_events += line.startswith("data: ")
        if job.leaves_after is not None and num_events >= job.leaves_after:
            return LEFT
    return "a stream without [DONE]"


async def _leave_at_once(client: httpx2.AsyncClient, request: httpx2.Request) -> str:
    request.extensions["timeout"] = {"connect": 30, "write": 30, "pool": 120, "read": 0.002}
    try:
        response = await client.send(request, stream=True)
        await response.aclose()
    except httpx2.ReadTimeout:
        pass
    return LEFT
