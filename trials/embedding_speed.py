"""Time embeddings of a running server of the task `embed`: one text alone, a list of texts, and many clients at once.

    hallmark serve --model DIR --task embed --port 8000 &
    python trials/embedding_speed.py --url http://127.0.0.1:8000 --out embeddings.json

Prompts are random token ids, no two alike, so no prefix is shared. Times are the client's, with HTTP; a row has the
median and the range of n requests.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx

ALONE = (16, 128, 512, 2048, 8192)  # tokens of one text
LISTS = ((32, 128), (32, 512), (256, 128))  # texts of one request, tokens of each
CLIENTS = ((16, 128), (64, 128), (64, 512))  # clients that ask one after another, tokens of each text


class Server:
    """An embedding server and its model's name."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model
        self._random = random.Random(7)

    async def embed(self, num_texts: int, num_tokens: int) -> float:
        """Ask for so many texts in one request and return its time, seconds."""
        prompts = [[self._random.randrange(10, 2000) for _ in range(num_tokens)] for _ in range(num_texts)]
        started = time.perf_counter()
        body = {"model": self._model, "input": prompts, "encoding_format": "base64"}
        response = await self._client.post("/v1/embeddings", json=body)
        response.raise_for_status()
        answer = response.json()
        seconds = time.perf_counter() - started
        found = len(answer["data"]), answer["usage"]["prompt_tokens"]
        if found != (num_texts, num_texts * num_tokens):
            raise SystemExit(f"asked for {num_texts} texts of {num_tokens} tokens, got (texts, tokens) {found}")
        return seconds

    async def repeated(self, num_texts: int, num_tokens: int, rounds: int) -> list[float]:
        """Return the times of requests one after another, seconds, after two that do not count."""
        return [await self.embed(num_texts, num_tokens) for _ in range(2 + rounds)][2:]

    async def by_many(self, num_clients: int, num_tokens: int, seconds: float) -> tuple[float, list[float]]:
        """Return texts a second and the time of each request, of clients that each ask again when answered."""
        times: list[float] = []

        async def ask(until: float) -> None:
            while time.perf_counter() < until:
                times.append(await self.embed(1, num_tokens))

        await asyncio.gather(*(ask(time.perf_counter() + seconds / 4) for _ in range(num_clients)))
        times.clear()
        started = time.perf_counter()
        await asyncio.gather(*(ask(started + seconds) for _ in range(num_clients)))
        return len(times) / (time.perf_counter() - started), times


def spread(times: list[float]) -> dict[str, object]:
    """The median and the range of times in seconds, as a row has them."""
    found = {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
    return {"n": len(times), **{name: round(seconds * 1e3, 2) for name, seconds in found.items()}}


async def measured(url: str, rounds: int, seconds: float) -> list[dict[str, object]]:
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        models = (await client.get("/v1/models")).json()
        server, rows = Server(client, models["data"][0]["id"]), list[dict[str, object]]()
        for tokens in ALONE:
            times = await server.repeated(1, tokens, rounds)
            rows.append({"case": "alone", "texts": 1, "tokens": tokens, **spread(times)})
        for texts, tokens in LISTS:
            times = await server.repeated(texts, tokens, rounds)
            rate = round(texts * tokens / statistics.median(times))
            rows.append({"case": "list", "texts": texts, "tokens": tokens, **spread(times), "tokens_per_s": rate})
        for clients, tokens in CLIENTS:
            texts_per_s, times = await server.by_many(clients, tokens, seconds)
            rates = {"texts_per_s": round(texts_per_s), "tokens_per_s": round(texts_per_s * tokens)}
            rows.append({"case": "clients", "clients": clients, "tokens": tokens, **spread(times), **rates})
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
