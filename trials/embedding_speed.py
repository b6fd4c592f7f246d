"""Time embeddings of a running server of the task `embed`: one text alone, a list of texts, and many clients at once.

    hallmark serve --model DIR --task embed --port 8000 &
    python trials/embedding_speed.py --url http://127.0.0.1:8000 --out embeddings.json

Prompts are random token ids, no two alike, so no prefix is shared. Times are the client's, with HTTP.
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
ROUNDS, WARM, SECONDS = 12, 3, 4.0


class Server:
    """An embedding server and its model's name."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client, self._model, self._random = client, model, random.Random(7)

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

    async def repeated(self, num_texts: int, num_tokens: int) -> float:
        """Return the median time of a request that is alone, seconds."""
        times = [await self.embed(num_texts, num_tokens) for _ in range(WARM + ROUNDS)]
        return statistics.median(times[WARM:])

    async def by_many(self, num_clients: int, num_tokens: int) -> tuple[float, float]:
        """Return texts a second and the median time of a request, of clients that each ask again when answered."""
        times: list[float] = []

        async def ask(until: float) -> None:
            while time.perf_counter() < until:
                times.append(await self.embed(1, num_tokens))

        await asyncio.gather(*(ask(time.perf_counter() + 1) for _ in range(num_clients)))
        times.clear()
        started = time.perf_counter()
        await asyncio.gather(*(ask(started + SECONDS) for _ in range(num_clients)))
        return len(times) / (time.perf_counter() - started), statistics.median(times)


async def measured(url: str) -> list[dict[str, object]]:
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        models = (await client.get("/v1/models")).json()
        server, rows = Server(client, models["data"][0]["id"]), list[dict[str, object]]()
        for tokens in ALONE:
            seconds = await server.repeated(1, tokens)
            rows.append({"case": "alone", "texts": 1, "tokens": tokens, "ms": round(seconds * 1e3, 2)})
        for texts, tokens in LISTS:
            seconds = await server.repeated(texts, tokens)
            rate = round(texts * tokens / seconds)
            rows.append(
                {"case": "list", "texts": texts, "tokens": tokens, "ms": round(seconds * 1e3, 2), "tokens_per_s": rate}
            )
        for clients, tokens in CLIENTS:
            rate, seconds = await server.by_many(clients, tokens)
            row = {"case": "clients", "clients": clients, "tokens": tokens, "ms": round(seconds * 1e3, 2)}
            rows.append({**row, "texts_per_s": round(rate), "tokens_per_s": round(rate * tokens)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = asyncio.run(measured(args.url))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    command = "python trials/embedding_speed.py"
    args.out.write_text(json.dumps({"command": command, "date": date, "rows": rows}, indent=1) + "\n")
    for row in rows:
        sys.stdout.write(f"{row}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
