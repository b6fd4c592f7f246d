"""/v1/embeddings, /v1/score and /v1/rerank: each input is a prompt whose last token's vector is the answer."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from server.edge.context import context_of
from server.edge.routing import PlainRoute
from server.errors import (
    EngineDied,
    InvalidValue,
    ModelNotFound,
    NonFiniteLogits,
    NotReady,
    PromptTooLong,
    SlowClient,
)
from server.http.common.document import takes
from server.http.common.inputs import checked_ids, listed
from server.http.common.json_pieces import json_response
from server.http.common.validation import read
from server.http.generation.admitted import Admitted, FieldsT, admitted
from server.http.generation.answer import answer_of, namer_of
from server.http.generation.prepared import Job, Prepared
from server.http.generation.prompts import MAX_CHARS_PER_TOKEN, encode_text, held, truncated
from server.http.images.source import RequestImages
from server.http.pooling.answers import embedding_list, probability_of, reranked, score_list
from server.http.pooling.requests import EmbeddingRequest, RerankRequest, ScoreRequest
from server.http.pooling.rerank_prompt import RerankPrompt
from server.http.pooling.schemas import EmbeddingList, Reranked, ScoreList
from server.http.services import ServedModel, Services
from server.model.load.pooling import PoolingModel
from server.protocol.messages import EngineReady, Pooling, SamplingParams
from server.settings import Task

# The first of each names the span; vLLM has the others too, /v2/rerank for Cohere's client.
EMBEDDINGS, SCORE, RERANK = ("/v1/embeddings",), ("/v1/score", "/score"), ("/v1/rerank", "/v2/rerank", "/rerank")
PATHS = {
    **dict.fromkeys(EMBEDDINGS, Task.EMBED),
    **dict.fromkeys((*SCORE, *RERANK), Task.SCORE),
}
REQUESTS = {Task.EMBED: (EmbeddingRequest,), Task.SCORE: (ScoreRequest, RerankRequest)}
_ERRORS = (ModelNotFound, PromptTooLong, NotReady, EngineDied, NonFiniteLogits, SlowClient)


def pooling_routes(services: Services, pooling: PoolingModel) -> APIRouter:
    """The routes of a model's task. Raises ModelError where it cannot be scored."""
    return _embedding_routes(services, pooling) if pooling.task is Task.EMBED else _score_routes(services, pooling)


def _embedding_routes(services: Services, pooling: PoolingModel) -> APIRouter:
    router = APIRouter(route_class=PlainRoute, tags=["OpenAI"])
    model = services.model

    def prepare(unique_id: str, ready: EngineReady, body: dict[str, Any]) -> Prepared[EmbeddingRequest]:
        fields = read(EmbeddingRequest, body)
        model.check_name(fields.model)
        _check_dimensions(fields.dimensions, pooling)
        prompts = [_input_ids(model, it, ready.max_model_len, fields) for it in listed(fields.input)]
        jobs = _jobs(prompts, unique_id, ready.max_model_len, "input", Pooling())
        return Prepared(fields, jobs, cache_salt=fields.cache_salt)

    @router.post(EMBEDDINGS[0], response_model=EmbeddingList, openapi_extra=takes(EmbeddingRequest, *_ERRORS))
    async def embeddings(request: Request) -> Response:
        """Return an embedding of each text."""
        it = await _entered(services, request, EMBEDDINGS[0], "embeddings", prepare)
        fields = it.prepared.fields
        name, vectors = namer_of(it, request.scope, fields.hallmark), await _vectors(it)
        body = await embedding_list(
            vectors,
            model.name,
            it.record.num_prompt_tokens,
            dimensions=fields.dimensions,
            normalizes=pooling.normalizes,
            is_base64=fields.encoding_format == "base64",
        )
        return json_response(name(body))

    return router


def _score_routes(services: Services, pooling: PoolingModel) -> APIRouter:
    router = APIRouter(route_class=PlainRoute, tags=["scores"])
    model = services.model
    prompt = RerankPrompt(model.tokenizer, pooling.label_ids, special_tokens_in_text=model.special_tokens_in_text)
    wanted = Pooling(prompt.label_ids)

    def jobs(
        pairs: Sequence[tuple[str, str]], instruction: str | None, ready: EngineReady, unique_id: str, param: str
    ) -> list[Job]:
        limit = ready.max_model_len * MAX_CHARS_PER_TOKEN
        for query, document in pairs:
            if (num_chars := len(query) + len(document)) > limit:
                raise PromptTooLong(f"A pair may have at most {limit} characters, one has {num_chars}.", param=param)
        prompts = [prompt.token_ids(*pair, instruction) for pair in pairs]
        return _jobs(prompts, unique_id, ready.max_model_len, param, wanted)

    def prepare_score(unique_id: str, ready: EngineReady, body: dict[str, Any]) -> Prepared[ScoreRequest]:
        fields = read(ScoreRequest, body)
        model.check_name(fields.model)
        pairs = _pairs(_list(fields.text_1), _list(fields.text_2))
        made = jobs(pairs, fields.instruction, ready, unique_id, "text_2")
        return Prepared(fields, made, cache_salt=fields.cache_salt)

    def prepare_rerank(unique_id: str, ready: EngineReady, body: dict[str, Any]) -> Prepared[RerankRequest]:
        fields = read(RerankRequest, body)
        model.check_name(fields.model)
        pairs = [(fields.query, document) for document in fields.documents]
        made = jobs(pairs, fields.instruction, ready, unique_id, "documents")
        return Prepared(fields, made, cache_salt=fields.cache_salt)

    async def score(request: Request) -> Response:
        """Return how probably each document is relevant to its query."""
        it = await _entered(services, request, SCORE[0], "score", prepare_score)
        name = namer_of(it, request.scope, it.prepared.fields.hallmark)
        scores = [probability_of(pooled) for pooled in await _vectors(it)]
        body = score_list(scores, it.context.unique_id, model.name, it.record.num_prompt_tokens)
        return json_response(name(body))

    async def rerank(request: Request) -> Response:
        """Return documents in the order of their relevance to a query."""
        it = await _entered(services, request, RERANK[0], "rerank", prepare_rerank)
        fields = it.prepared.fields
        name = namer_of(it, request.scope, fields.hallmark)
        scores = [probability_of(pooled) for pooled in await _vectors(it)]
        body = reranked(
            scores,
            fields.documents if fields.return_documents else None,
            it.context.unique_id,
            model.name,
            it.record.num_prompt_tokens,
            fields.top_n or len(scores),
        )
        return json_response(name(body))

    for path in SCORE:
        router.add_api_route(
            path, score, methods=["POST"], response_model=ScoreList, openapi_extra=takes(ScoreRequest, *_ERRORS)
        )
    for path in RERANK:
        router.add_api_route(
            path, rerank, methods=["POST"], response_model=Reranked, openapi_extra=takes(RerankRequest, *_ERRORS)
        )
    return router


async def _entered(
    services: Services,
    request: Request,
    route: str,
    operation: str,
    prepare: Callable[[str, EngineReady, dict[str, Any]], Prepared[FieldsT]],
) -> Admitted[FieldsT]:
    context = context_of(request.scope)

    def of_request(ready: EngineReady, body: dict[str, Any], _images: RequestImages) -> Prepared[FieldsT]:
        return prepare(context.unique_id, ready, body)

    return await context.enter(admitted(services, request, route=route, operation=operation, prepare=of_request))


async def _vectors(it: Admitted[Any]) -> list[bytes]:
    """The vector of each job, in order."""
    found: dict[int, bytes] = {}
    async for piece in answer_of(it):
        if piece.pooled is not None:
            found[piece.index] = piece.pooled
    return [found[job.index] for job in it.prepared.jobs]


def _jobs(prompts: Sequence[list[int]], unique_id: str, max_model_len: int, param: str, pooling: Pooling) -> list[Job]:
    """A job for each prompt. Raises PromptTooLong."""
    longest = max(map(len, prompts))
    if longest > max_model_len:
        raise PromptTooLong(
            f"This model's maximum context length is {max_model_len} tokens, but {param} has one of {longest}.",
            param=param,
        )
    sampling = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)
    return [Job(i, f"{unique_id}-{i}", prompt, sampling, ()) for i, prompt in enumerate(prompts)]


def _input_ids(model: ServedModel, given: str | list[int], max_model_len: int, fields: EmbeddingRequest) -> list[int]:
    plain = given if isinstance(given, list) else None
    limit, keeps_end = fields.truncate_prompt_tokens, fields.truncation_side == "left"
    if isinstance(given, str):
        given = given if limit is None else held(given, max_model_len, keeps_end=keeps_end)
        has_special = fields.add_special_tokens
        ids = encode_text(model.tokenizer, given, max_model_len, add_special_tokens=has_special, param="input")
    else:
        ids = checked_ids(given, model.tokenizer.vocab_size, "input")
    if limit is None or len(ids) <= limit:
        return ids
    if plain is None:
        plain = model.tokenizer.encode(str(given), add_special_tokens=False)
    # What the tokenizer adds stays: the last token is the one that is pooled.
    begin = next((i for i in range(len(ids) - len(plain) + 1) if ids[i : i + len(plain)] == plain), 0)
    before, behind = ids[:begin], ids[begin + len(plain) :]
    num_added = len(before) + len(behind)
    if 0 < limit <= num_added:
        message = f"must be at least {num_added + 1}: the tokenizer adds {num_added} to a text; got {limit}."
        raise InvalidValue(f"truncate_prompt_tokens {message}", param="truncate_prompt_tokens")
    limit = limit - num_added if limit > 0 else limit
    kept = truncated(plain, limit, max_model_len - num_added, keeps_end=keeps_end)
    return before + kept + behind


def _check_dimensions(dimensions: int | None, pooling: PoolingModel) -> None:
    """Raises InvalidValue for a length that the model does not allow."""
    allowed = pooling.dimensions
    if dimensions in (None, pooling.size) or dimensions in allowed:
        return
    if not allowed:
        message = "dimensions cannot be chosen: config.json does not say that this model allows it (--matryoshka)"
        message += "." if pooling.size is None else f"; its embeddings have {pooling.size} numbers, got {dimensions}."
    elif isinstance(allowed, range):
        message = f"dimensions must be {allowed[0]} to {allowed[-1]}, got {dimensions}."
    else:
        message = f"dimensions must be one of {', '.join(map(str, allowed))}, got {dimensions}."
    raise InvalidValue(message, param="dimensions")


def _pairs(queries: list[str], documents: list[str]) -> list[tuple[str, str]]:
    if len(queries) == 1:
        return list(itertools.product(queries, documents))
    if len(queries) != len(documents):
        message = f"text_1 must have 1 text or as many as text_2, {len(documents)}, got {len(queries)}."
        raise InvalidValue(message, param="text_1")
    return list(zip(queries, documents, strict=True))


def _list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
