"""The answer of /v1/responses as it grows: its items, and the events that report them to a client."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from server.errors import HallmarkError
from server.http.chat.tools import object_of
from server.http.common.provenance import Namer
from server.http.generation.event_stream import named_event
from server.http.generation.pieces import Piece
from server.http.generation.usage import Usage
from server.http.responses.requests import ResponsesRequest
from server.http.responses.tools import Called, ToolSet, input_of, repeated_choice
from server.protocol.messages import SamplingParams
from server.text.answer.deltas import ArgumentsText, CallEnd, CallStart, ContentText, Delta, ReasoningText

_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}
LEFT_OUT = "left_out_tools"  # in the metadata of an answer


def failed_events(
    response: Mapping[str, Any], error: HallmarkError, ids: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the last two events of a stream that fails, without their numbers; `response` is what it was to become."""
    what = {"code": error.code, "message": error.message, "param": error.param}
    failed = {**response, "status": "failed", "error": {"code": "server_error", "message": error.message}}
    return {"type": "error", **what, **ids}, {"type": "response.failed", "response": failed}


class ResponseFormat:
    """One answer. Whole or streamed, its items are those that the events make."""

    def __init__(
        self,
        unique_id: str,
        fields: ResponsesRequest,
        sampling: SamplingParams,
        model: str,
        *,
        tools: ToolSet,
        usage: Callable[[], Usage],
        name: Namer,
        ended: Callable[[bytes, list[dict[str, Any]]], None],
    ) -> None:
        """name   adds the kernels where they are asked for
        ended  is called with the JSON of an answer that is whole, and with its items"""
        self.response_id = f"resp_{unique_id}"
        self._unique_id = unique_id
        self._usage = usage
        self._name = name
        self._ended = ended
        self._tools = tools
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the item that is open
        self._is_open = False
        self._num_events = 0
        self._finish_reason: str | None = None
        self._fixed = _fixed_fields(self.response_id, fields, sampling, model, tools)

    def opening(self, first: Piece) -> bytes:
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        begun = [self._event_bytes({"type": kind, "response": response}) for kind in kinds]
        return b"".join(begun) + self.event(first)

    def event(self, piece: Piece) -> bytes:
        return b"".join([self._event_bytes(event) for event in self._events(piece)])

    def closing(self) -> bytes:
        response = self._end()
        return self._name(self._event_bytes({"type": f"response.{response['status']}", "response": response}))

    def take(self, piece: Piece) -> None:
        for _ in self._events(piece):
            pass

    def whole(self) -> bytes:
        return self._name(msgspec.json.encode(self._end()))

    def failed(self, error: HallmarkError, ids: Mapping[str, str]) -> bytes:
        """The last events of a stream that fails."""
        return b"".join(map(self._event_bytes, failed_events(self._response("failed"), error, ids)))

    def _event_bytes(self, event: dict[str, Any]) -> bytes:
        event["sequence_number"] = self._num_events
        self._num_events += 1
        return named_event(event)

    def _end(self) -> dict[str, Any]:
        """The whole response; `ended` is called with it."""
        response = self._response("incomplete" if self._finish_reason == "length" else "completed")
        self._ended(msgspec.json.encode(response), self._items)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        is_ended = status in ("completed", "incomplete")
        return self._fixed | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items if is_ended else [],
            "usage": _counts(self._usage()) if is_ended else None,
        }

    def _events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        for delta in piece.all_deltas:
            yield from self._delta(delta)
        if piece.finish_reason is None:
            return
        self._finish_reason = piece.finish_reason
        if not self._items:
            yield from self._opened("message")
        yield from self._closed("incomplete" if piece.finish_reason == "length" else "completed")

    def _delta(self, delta: Delta) -> Iterator[dict[str, Any]]:
        match delta:
            case ContentText(text):
                yield from self._opened("message")
                yield self._more("response.output_text.delta", text, content_index=0, logprobs=[])
            case ReasoningText(text):
                yield from self._opened("reasoning")
                yield self._more("response.reasoning_text.delta", text, content_index=0)
            case CallStart():
                yield from self._closed()
                yield self._begun_call(delta)
            case ArgumentsText(_, text):
                if self._items[-1]["type"] != "function_call":
                    self._texts.append(
                        text
                    )  # what the item has is within these arguments, and given when they are whole
                else:
                    yield self._more("response.function_call_arguments.delta", text)
            case CallEnd():
                yield from self._closed(is_whole_call=True)

    def _begun_call(self, start: CallStart) -> dict[str, Any]:
        callee = self._tools.callee(start.name)
        if callee.kind is Called.SEARCH:
            call: dict[str, Any] = {"call_id": start.call_id, "execution": "client", "arguments": {}}
            return self._begun("tool_search_call", call)
        call = {"call_id": start.call_id, "name": callee.name}
        if callee.namespace is not None:
            call["namespace"] = callee.namespace
        if callee.kind is Called.CUSTOM:
            return self._begun("custom_tool_call", {**call, "input": ""})
        return self._begun("function_call", {**call, "arguments": ""})

    def _opened(self, kind: str) -> Iterator[dict[str, Any]]:
        if self._is_open and self._items[-1]["type"] == kind:
            return
        yield from self._closed()
        yield self._begun(kind, {"role": "assistant", "content": []} if kind == "message" else {"summary": []})
        part = _part(kind, "")
        yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _begun(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        item_id = f"{_ID_PREFIXES[kind]}_{self._unique_id}_{len(self._items)}"
        self._items.append({"id": item_id, "type": kind, "status": "in_progress", **fields})
        self._is_open = True
        index = len(self._items) - 1
        return {"type": "response.output_item.added", "output_index": index, "item": self._items[index]}

    def _more(self, event: str, text: str, **fields: Any) -> dict[str, Any]:
        self._texts.append(text)
        return self._of_item(event, delta=text, **fields)

    def _of_item(self, event: str, **fields: Any) -> dict[str, Any]:
        """An event of the item that is open."""
        index = len(self._items) - 1
        return {"type": event, "item_id": self._items[index]["id"], "output_index": index, **fields}

    def _closed(self, status: str = "completed", *, is_whole_call: bool = False) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        text, item = "".join(self._texts), self._items[-1]
        self._texts.clear()
        self._is_open = False
        kind = item["type"]
        if kind == "function_call":
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=text)
            item["arguments"] = text
        elif kind == "custom_tool_call":
            item["input"] = input_of(text)
            yield self._of_item("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._of_item("response.custom_tool_call_input.done", input=item["input"])
        elif kind == "tool_search_call":
            item["arguments"] = object_of(text)
        else:
            part = _part(kind, text)
            if kind == "message":
                yield self._of_item("response.output_text.done", content_index=0, text=text, logprobs=[])
            else:
                yield self._of_item("response.reasoning_text.done", content_index=0, text=text)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        is_call = kind in ("function_call", "custom_tool_call")
        item["status"] = status if not is_call else "completed" if is_whole_call else "incomplete"
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _counts(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _fixed_fields(
    response_id: str, fields: ResponsesRequest, sampling: SamplingParams, model: str, tools: ToolSet
) -> dict[str, Any]:
    """Return the fields of a response that repeat its request."""
    text = fields.text
    wanted = None if text is None else text.format
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": None,
        "metadata": (fields.metadata or {}) | ({LEFT_OUT: ", ".join(tools.left_out)} if tools.left_out else {}),
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": None if fields.reasoning is None else fields.reasoning.effort, "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store,
        "temperature": sampling.temperature if fields.temperature is None else fields.temperature,
        "text": {"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)}
        | ({} if text is None or text.verbosity is None else {"verbosity": text.verbosity}),
        "tool_choice": repeated_choice(fields.tool_choice),
        "tools": tools.visible,
        "top_logprobs": 0,
        "top_p": sampling.top_p if fields.top_p is None else fields.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }
