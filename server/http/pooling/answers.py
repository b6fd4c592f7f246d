"""Bodies of answers, made of the engine's vectors."""

import asyncio
import base64
import time
from collections.abc import Sequence
from math import exp

import msgspec
import numpy as np
from numpy.typing import NDArray

_VECTORS_A_TURN = 16  # are written before other requests have their turn: about a millisecond


def embedding_of(pooled: bytes, dimensions: int | None, *, normalizes: bool) -> NDArray[np.float32]:
    """The first `dimensions` numbers of a vector; divided by their length if `normalizes`, or if some are cut."""
    vector: NDArray[np.float32] = np.frombuffer(pooled, "<f4")
    if dimensions is not None and dimensions < len(vector):
        vector, normalizes = vector[:dimensions], True
    length = max(float(np.linalg.norm(vector)), 1e-12) if normalizes else 1.0
    found: NDArray[np.float32] = np.divide(vector, length, dtype=np.float32)
    return found


def probability_of(pooled: bytes) -> float:
    """The probability of the first of two labels, by their logits."""
    yes, no = np.frombuffer(pooled, "<f4").tolist()
    return 1 / (1 + exp(no - yes)) if no - yes < 700 else 0.0


async def embedding_list(
    vectors: Sequence[bytes], model: str, num_tokens: int, *, dimensions: int | None, normalizes: bool, is_base64: bool
) -> bytes:
    """The body of an answer with embeddings, written in turns with other requests."""
    items = []
    for index, pooled in enumerate(vectors):
        vector = embedding_of(pooled, dimensions, normalizes=normalizes)
        content = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_base64 else vector.tolist()
        items.append(msgspec.json.encode({"object": "embedding", "index": index, "embedding": content}))
        if index % _VECTORS_A_TURN == _VECTORS_A_TURN - 1:
            await asyncio.sleep(0)
    rest = msgspec.json.encode({"model": model, "usage": _usage(num_tokens)})
    return b'{"object":"list","data":[' + b",".join(items) + b"]," + rest[1:]


def score_list(scores: Sequence[float], unique_id: str, model: str, num_tokens: int) -> bytes:
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    head = {"id": f"score-{unique_id}", "object": "list", "created": int(time.time()), "model": model}
    return msgspec.json.encode({**head, "data": data, "usage": _usage(num_tokens)})


def reranked(
    scores: Sequence[float], documents: Sequence[str] | None, unique_id: str, model: str, num_tokens: int, top_n: int
) -> bytes:
    """The body of a ranking; equal scores keep the request's order. `documents`: None to leave them out."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({} if documents is None else {"document": {"text": documents[index]}})
        for index in order
    ]
    body = {"id": f"rerank-{unique_id}", "model": model, "results": results, "usage": _usage(num_tokens)}
    return msgspec.json.encode(body)


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
