"""Requests to the stable server for as long as a drill takes: whole and streamed in turn, each answer compared."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx2

_EVERY_S = 1.0  # so seldom that a median of the baseline is not moved by it
_PROMPT_TOKENS, _NEW_TOKENS = 32, 8


@dataclass(slots=True)
class Steady:
    """Outcomes of the requests."""

    num_sent: int = 0
    lost: list[str] = field(default_factory=list)  # what went wrong, one line each
    seconds: list[float] = field(default_factory=list)  # of those that were answered
    answers: set[str] = field(default_factory=set)  # distinct ones: one, where nothing was disturbed


@contextmanager
def steady_load(url: str) -> Iterator[Steady]:
    """Send a request a second in a thread, one at a time, until the block ends."""
    found, is_over = Steady(), threading.Event()
    thread = threading.Thread(target=_send, args=(url, found, is_over))
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def _send(url: str, found: Steady, is_over: threading.Event) -> None:
    with httpx2.Client(timeout=120) as client:
        while not is_over.is_set():
            is_streamed = found.num_sent % 2 == 1
            found.num_sent += 1
            began = time.monotonic()
            try:
                found.answers.add(streamed(client, url) if is_streamed else whole(client, url))
                found.seconds.append(time.monotonic() - began)
            except (httpx2.HTTPError, ValueError, LookupError) as error:
                found.lost.append(f"{'streamed' if is_streamed else 'whole'}: {type(error).__name__}: {error}")
            is_over.wait(max(0.0, began + _EVERY_S - time.monotonic()))


def _body(*, is_streamed: bool) -> dict[str, object]:
    prompt = list(range(100, 100 + _PROMPT_TOKENS))
    return {
        "prompt": prompt,
        "max_tokens": _NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": is_streamed,
    }


def whole(client: httpx2.Client, url: str) -> str:
    answer = client.post(f"{url}/v1/completions", json=_body(is_streamed=False))
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def streamed(client: httpx2.Client, url: str) -> str:
    """Raises ValueError for a stream that ends early or with an error."""
    texts, is_done = [], False
    with client.stream("POST", f"{url}/v1/completions", json=_body(is_streamed=True)) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            is_done = is_done or data == "[DONE]"
            if data.startswith("{"):
                event = json.loads(data)
                if "choices" not in event:
                    raise ValueError(f"the stream says {data[:200]}")
                texts += [choice["text"] for choice in event["choices"]]
    if not is_done:
        raise ValueError(f"the stream ended after {len(texts)} events without [DONE]")
    return "".join(texts)
