"""The endpoints around the model: its name, and its tokens."""

from typing import Any

from fastapi import APIRouter, Request

from server.edge.admission import Edge
from server.edge.body_memory import in_thread
from server.edge.redact import shown
from server.errors import InvalidValue
from server.http.json_body import parse_json
from server.http.prompts import chat_prompt, encode_text
from server.http.schemas import DetokenizeFields, TokenizeFields, checked_text, read
from server.http.token_ids import checked_ids


def routes(edge: Edge) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(edge)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        edge.check_model(name)
        return _model(edge)

    @router.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        max_model_len = edge.require_ready().max_model_len
        tokens = await in_thread(await request.body(), lambda it: _tokenize(edge, parse_json(it), max_model_len))
        return {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}

    @router.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        edge.require_ready()
        return {"prompt": await in_thread(await request.body(), lambda it: _detokenize(edge, parse_json(it)))}

    return router


def _model(edge: Edge) -> dict[str, Any]:
    ready = edge.engine.ready
    return {
        "id": edge.model,
        "object": "model",
        "created": edge.started_at,
        "owned_by": "hallmark",
        "max_model_len": ready.max_model_len if ready else None,  # not known before the engine has started
    }


def _tokenize(edge: Edge, body: dict[str, Any], max_model_len: int) -> list[int]:
    fields = read(TokenizeFields, body)
    edge.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidValue("Send either prompt or messages.", param="prompt")
    if fields.messages is not None:
        opens = fields.add_generation_prompt
        return chat_prompt(
            edge.tokenizer,
            edge.template,
            fields.messages,
            max_model_len,
            opens=opens,
            special_tokens_in_text=edge.settings.special_tokens_in_text,
        )
    if not isinstance(fields.prompt, str):
        raise InvalidValue(f"prompt must be a string, got {shown(fields.prompt)}.", param="prompt")
    text = checked_text(fields.prompt, "prompt")
    return encode_text(edge.tokenizer, text, max_model_len, add_special_tokens=fields.add_special_tokens)


def _detokenize(edge: Edge, body: dict[str, Any]) -> str:
    fields = read(DetokenizeFields, body)
    edge.check_model(fields.model)
    return edge.tokenizer.decode(checked_ids(fields.tokens, edge.tokenizer.vocab_size, "tokens"))
