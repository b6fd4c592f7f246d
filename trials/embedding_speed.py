"""Time embeddings of a running server of the task `embed`: one text alone, a list of texts, and many clients at once.

    hallmark serve --model DIR --task embed --port 8000 &
    python trials/embedding_speed.py --url http://127.0.0.1:8000 --out embeddings.json

Prompts are random token ids, no two alike, so no prefix is shared. Times are the client's, from the first byte sent to
the last one received, each client on a kept connection of its own; a row has the median and the range of n requests.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import httpx2

from qualification.load.connection import Connection, Exchange

ALONE = (16, 128, 512, 2048, 8192)  # tokens of one text
LISTS = ((32, 128), (32, 512), (256, 128))  # texts of one request, tokens of each
CLIENTS = ((16, 128), (64, 128), (64, 512))  # clients that ask one after another, tokens of each text


class Answer(Exchange):
    """One request and the body of its whole answer."""

    def __init__(self, payload: bytes, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(payload, loop)
        self.content = b""

    def body(self, data: bytes, _now: float) -> None:
        self.content += data

    def end(self, error: str | None = None) -> None:
        if not self.ended.done():
            self.error = error
            self.ended.set_result(None)


class Client:
    """A client on one kept connection. httpx took longer for a request of 64 at once than the server did (one H200)."""

    def __init__(self, url: httpx2.URL, model: str, seed: int) -> None:
        self._url, self._model = url, model
        self._random = random.Random(seed)
        self._connection: Connection | None = None

    async def embed(self, num_texts: int, num_tokens: int) -> float:
        """Ask for so many texts in one request and return its time, seconds."""
        prompts = [[self._random.randrange(10, 2000) for _ in range(num_tokens)] for _ in range(num_texts)]
        body = json.dumps({"model": self._model, "input": prompts, "encoding_format": "base64"}).encode()
        host = self._url.netloc.decode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        loop = asyncio.get_running_loop()
        if self._connection is None:
            _, self._connection = await loop.create_connection(Connection, self._url.host, self._url.port)
        answered = Answer(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body, loop)
        self._connection.send(answered)
        await answered.ended
        seconds = time.monotonic() - answered.sent_at
        if answered.error is not None or answered.status != 200:
            raise SystemExit(answered.error or f"{answered.status}: {answered.content[:500].decode(errors='replace')}")
        answer = json.loads(answered.content)
        found = len(answer["data"]), answer["usage"]["prompt_tokens"]
        if found != (num_texts, num_texts * num_tokens):
            raise SystemExit(f"asked for {num_texts} texts of {num_tokens} tokens, got (texts, tokens) {found}")
        return seconds

    async def repeated(self, num_texts: int, num_tokens: int, rounds: int) -> list[float]:
        """Return the times of requests one after another, seconds, after two that do not count."""
        return [await self.embed(num_texts, num_tokens) for _ in range(2 + rounds)][2:]

    async def until(self, end: float, num_tokens: int) -> list[float]:
        """Return the times of requests of one text, one after another, seconds, the last sent before `end`."""
        times = []
        while time.perf_counter() < end:
            times.append(await self.embed(1, num_tokens))
        return times

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


async def by_many(clients: Sequence[Client], num_tokens: int, seconds: float) -> tuple[float, list[float]]:
    """Return texts a second and the time of each request, of clients that each ask again when answered."""
    for share in (0.25, 1.0):  # the first does not count
        started = time.perf_counter()
        end = started + share * seconds
        found = await asyncio.gather(*(client.until(end, num_tokens) for client in clients))
        elapsed = time.perf_counter() - started
    times = [it for of_client in found for it in of_client]
    return len(times) / elapsed, times


def spread(times: list[float]) -> dict[str, object]:
    """The median and the range of times in seconds, as a row has them."""
    found = {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
    return {"n": len(times), **{name: round(seconds * 1e3, 2) for name, seconds in found.items()}}


async def measured(base: str, rounds: int, seconds: float) -> list[dict[str, object]]:
    url = httpx2.URL(base)
    model = httpx2.get(url.join("/v1/models"), timeout=120).raise_for_status().json()["data"][0]["id"]
    clients = [Client(url, model, seed) for seed in range(max(num_clients for num_clients, _ in CLIENTS))]
    rows: list[dict[str, object]] = []
    for tokens in ALONE:
        times = await clients[0].repeated(1, tokens, rounds)
        rows.append({"case": "alone", "texts": 1, "tokens": tokens, **spread(times)})
    for texts, tokens in LISTS:
        times = await clients[0].repeated(texts, tokens, rounds)
        rate = round(texts * tokens / statistics.median(times))
        rows.append({"case": "list", "texts": texts, "tokens": tokens, **spread(times), "tokens_per_s": rate})
    for num_clients, tokens in CLIENTS:
        texts_per_s, times = await by_many(clients[:num_clients], tokens, seconds)
        rates = {"texts_per_s": round(texts_per_s), "tokens_per_s": round(texts_per_s * tokens)}
        rows.append({"case": "clients", "clients": num_clients, "tokens": tokens, **spread(times), **rates})
    for client in clients:
        client.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=12, help="requests of a row (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each row of many clients (default: %(default)s)")
    args = parser.parse_args()
    rows = asyncio.run(measured(args.url, args.rounds, args.seconds))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    command = f"python trials/embedding_speed.py --rounds {args.rounds} --seconds {args.seconds:g}"
    args.out.write_text(json.dumps({"command": command, "date": date, "rows": rows}, indent=1) + "\n")
    for row in rows:
        sys.stdout.write(f"{row}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
