"""Prompts whose tokens are submitted as embeddings: a model's own, so that its answers are those of the tokens."""

from hashlib import sha256

import torch

from server.model.decoder import Decoder
from server.protocol.messages import EmbeddedSpan

PLACEHOLDER = 3


def with_spans(decoder: Decoder, prompt: list[int], *places: tuple[int, int]) -> tuple[list[int], list[EmbeddedSpan]]:
    """Return a prompt with placeholders for its tokens [start, stop) of each place, and their embeddings."""
    token_ids, spans = list(prompt), []
    for start, stop in places:
        hidden = torch.nn.functional.embedding(torch.tensor(prompt[start:stop]), decoder.weights.embedding)
        digest = sha256(str(prompt[start:stop]).encode()).digest()
        spans.append(EmbeddedSpan(start, stop - start, digest, hidden.float().numpy().tobytes()))
        token_ids[start:stop] = [PLACEHOLDER] * (stop - start)
    return token_ids, spans
