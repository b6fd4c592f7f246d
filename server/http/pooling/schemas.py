"""Answers as the document shows them; `answers` writes them without pydantic."""

from typing import Literal

from pydantic import Field

from server.http.common.provenance import Provenance
from server.http.common.schemas import Schema


class PooledAnswer(Schema):
    hallmark: Provenance | None = Field(None, description="Only where it was asked for.")


class PoolingUsage(Schema):
    prompt_tokens: int
    total_tokens: int


class Embedding(Schema):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="With `base64`: fp32 numbers, little endian.")


class EmbeddingList(PooledAnswer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class Score(Schema):
    object: Literal["score"]
    index: int
    score: float = Field(description="Probability of yes, 0 to 1.")


class ScoreList(PooledAnswer):
    id: str
    object: Literal["list"]
    created: int = Field(description="Unix seconds.")
    model: str
    data: list[Score]
    usage: PoolingUsage


class RerankedDocument(Schema):
    text: str


class RerankResult(Schema):
    index: int = Field(description="In the request's documents.")
    relevance_score: float = Field(description="Probability of yes, 0 to 1.")
    document: RerankedDocument | None = Field(None, description="With `return_documents`.")


class Reranked(PooledAnswer):
    id: str
    model: str
    results: list[RerankResult] = Field(description="The most relevant first.")
    usage: PoolingUsage
